// Random numbers that are a function of (seed, choice, position), as worker.sampling.philox makes them.
#pragma once
#include <cstdint>

// The number with this index in [0, 1), a multiple of 2^-53. Philox4x32-10 (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", 2011) with the seed as its key.
static inline double uniform_number(uint64_t seed, uint64_t position, uint64_t choice, uint32_t index) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         static_cast<uint32_t>(choice), index};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++, key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u) {
    const uint64_t first = 0xD2511F53ull * counter[0], second = 0xCD9E8D57ull * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
                              static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    for (int word = 0; word < 4; word++) counter[word] = next[word];
  }
  const uint64_t bits = static_cast<uint64_t>(counter[0]) << 32 | counter[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}
