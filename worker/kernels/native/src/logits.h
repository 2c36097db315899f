// The passes over whole vocabularies: the highest logit of each block of tokens, and the weight of each block.
#pragma once
#include "lanes.h"
#include "threads.h"

constexpr int64_t TOKENS_PER_BLOCK = 64;

// What is wanted of some rows of logits. See worker.sampling.logit_rows.
struct LogitScan {
  const float* logits;    // [rows, stride], of which the first `vocabulary` of each row count
  int64_t stride;
  int64_t vocabulary;
  int64_t rows;
  float* maxima;          // [rows, blocks]; NaN where a logit is
  float* highest;         // [rows]
  const int64_t* firsts;  // [rows + 1]: row r wants the sums firsts[r] to firsts[r + 1]
  const float* temperatures;  // [sums], above 0
  float* sums;            // [sums, blocks]: of exp((logit - the row's highest) / temperature)
};

static inline void sixty_four(const float* from, int64_t left, V out[4]) {
  for (int part = 0; part < 4; part++, left -= LANES) {
    const float* here = from + part * LANES;
    out[part] = left >= LANES ? load(here) : left > 0 ? load_some(here, static_cast<int>(left), -__builtin_inff())
                                                      : splat(-__builtin_inff());
  }
}

static inline float block_maximum(const float* from, int64_t left) {
  V v[4];
  sixty_four(from, left, v);
  // larger() gives its second argument where one is NaN, so that a NaN could be lost: it is looked for by adding up.
  V any = add(add(sub(v[0], v[0]), sub(v[1], v[1])), add(sub(v[2], v[2]), sub(v[3], v[3])));
  float found = highest(larger(larger(v[0], v[1]), larger(v[2], v[3])));
  if (!any_nan(any)) return found;  // infinities are NaN here too
  for (V part : v)
    if (any_nan(part)) return __builtin_nanf("");
  return found;
}

// `warm`: at a temperature that is not 1. A division takes longer than all the rest.
template <bool warm>
static inline float block_weight(const float* from, int64_t left, V shift, V temperature) {
  V v[4];
  sixty_four(from, left, v);
  for (V& part : v) {
    part = sub(part, shift);
    part = exp_of(warm ? div(part, temperature) : part);
  }
  return sum(add(add(v[0], v[1]), add(v[2], v[3])));
}

static void scan_row(void* context, int64_t row) {
  const LogitScan& scan = *static_cast<const LogitScan*>(context);
  const int64_t blocks = (scan.vocabulary + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
  const float* logits = scan.logits + row * scan.stride;
  float* maxima = scan.maxima + row * blocks;
  float most = -__builtin_inff();
  bool nan = false;
  for (int64_t block = 0, at = 0; block < blocks; block++, at += TOKENS_PER_BLOCK) {
    float found = maxima[block] = block_maximum(logits + at, scan.vocabulary - at);
    nan |= found != found;
    most = found > most ? found : most;
  }
  scan.highest[row] = nan ? __builtin_nanf("") : most;
  for (int64_t wanted = scan.firsts[row]; wanted < scan.firsts[row + 1]; wanted++) {
    const V shift = splat(scan.highest[row]), temperature = splat(scan.temperatures[wanted]);
    float* sums = scan.sums + wanted * blocks;
    const auto weight = scan.temperatures[wanted] == 1.0f ? block_weight<false> : block_weight<true>;
    for (int64_t block = 0, at = 0; block < blocks; block++, at += TOKENS_PER_BLOCK)
      sums[block] = weight(logits + at, scan.vocabulary - at, shift, temperature);
  }
}

// Weights of single tokens, as in a scan: of `count` logits, each with its row's highest and its temperature.
struct LogitWeights {
  const float* logits;
  const float* highest;
  const float* temperatures;
  double* weights;
  int64_t count;
};

static inline V lanes_of(const float* from, int64_t left, float fill) {
  return left >= LANES ? load(from) : load_some(from, static_cast<int>(left), fill);
}

static void weigh(const LogitWeights& given) {
  for (int64_t at = 0; at < given.count; at += LANES) {
    const int64_t left = given.count - at;
    const V shifted = sub(lanes_of(given.logits + at, left, 0), lanes_of(given.highest + at, left, 0));
    alignas(64) float found[LANES];
    store(found, exp_of(div(shifted, lanes_of(given.temperatures + at, left, 1))));
    for (int lane = 0; lane < LANES && lane < left; lane++) given.weights[at + lane] = found[lane];
  }
}

// Copies of some rows, one after the other.
struct RowCopy {
  const char* from;
  int64_t stride;        // of `from`, bytes
  const int64_t* which;  // [rows]
  int64_t rows;
  char* to;
  int64_t to_stride;     // bytes
  int64_t size;          // of a row, bytes
};

static void copy_row(void* context, int64_t row) {
  const RowCopy& copy = *static_cast<const RowCopy*>(context);
  std::memcpy(copy.to + row * copy.to_stride, copy.from + copy.which[row] * copy.stride, copy.size);
}
