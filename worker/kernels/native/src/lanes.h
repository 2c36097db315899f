// Sixteen float32 numbers at a time, on whatever the processor has.
//
// One type, V, and the same functions over it for every level. All levels add and multiply lane by lane in the same
// order; they differ in whether madd() rounds once or twice. Nothing here depends on how many numbers there are beside
// these sixteen, so neither does any kernel built from it.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include "lanes_avx512.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif

constexpr int LANES = 16;

static inline int64_t padded(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Lanes from n on are `fill`; only n numbers are read.
static inline V load_some(const float* from, int n, float fill) {
  alignas(64) float whole[LANES];
  for (int lane = 0; lane < LANES; lane++) whole[lane] = lane < n ? from[lane] : fill;
  return load(whole);
}

#if !defined(__AVX512F__)
// Lanes before `first` and from `past` on become `other`.
static inline V lanes_within(V v, int first, int past, float other) {
  alignas(64) float whole[LANES];
  store(whole, v);
  for (int lane = 0; lane < LANES; lane++)
    if (lane < first || lane >= past) whole[lane] = other;
  return load(whole);
}

// Sixteen whole numbers of eight bits.
static inline void store_bytes(int8_t* to, V whole) {
  alignas(64) float sixteen[LANES];
  store(sixteen, whole);
  for (int lane = 0; lane < LANES; lane++) to[lane] = static_cast<int8_t>(static_cast<int32_t>(sixteen[lane]));
}
#endif

static inline void store_some(float* to, V v, int n) {
  alignas(64) float whole[LANES];
  store(whole, v);
  std::memcpy(to, whole, sizeof(float) * n);
}

// bfloat16 is the upper half of a float32.
static inline float from_bf16(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// e^x within 2 units in the last place, for -87 <= x <= 88; 0 below, e^88 above, NaN for NaN. The range is reduced as
// in Cody and Waite's "Software Manual for the Elementary Functions"; the polynomial is that of Cephes' expf.
static inline V exp_of(V x) {
  const V low = splat(-87.0f);
  const V within = smaller(splat(88.0f), larger(low, x));  // NaN stays
  const V n = rounded(mul(within, splat(1.44269504088896341f)));
  V r = madd(n, splat(-0.693359375f), within);
  r = madd(n, splat(2.12194440e-4f), r);
  V p = splat(1.9875691500e-4f);
  p = madd(p, r, splat(1.3981999507e-3f));
  p = madd(p, r, splat(8.3334519073e-3f));
  p = madd(p, r, splat(4.1665795894e-2f));
  p = madd(p, r, splat(1.6666665459e-1f));
  p = madd(p, r, splat(5.0000001201e-1f));
  p = add(madd(p, mul(r, r), r), splat(1.0f));
  return zero_below(x, low, times_power_of_two(p, n));
}
