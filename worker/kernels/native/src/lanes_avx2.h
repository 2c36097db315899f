// Sixteen float32 numbers in two registers.
#pragma once
#include <immintrin.h>

struct V {
  __m256 a, b;
};

static inline V splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline V load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void store(float* to, V v) {
  _mm256_storeu_ps(to, v.a);
  _mm256_storeu_ps(to + 8, v.b);
}
static inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// x * y + z
static inline V madd(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// Where one is no number, y.
static inline V larger(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V smaller(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V rounded(V v) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.a, nearest), _mm256_round_ps(v.b, nearest)};
}
static inline __m256 eight_times_power_of_two(__m256 v, __m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
static inline V times_power_of_two(V v, V n) {
  return {eight_times_power_of_two(v.a, n.a), eight_times_power_of_two(v.b, n.b)};
}
static inline V zero_below(V x, V limit, V v) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ), v.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ), v.b)};
}
static inline V nan_if_nan(V x, V v) {
  return {_mm256_blendv_ps(v.a, x.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
          _mm256_blendv_ps(v.b, x.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
static inline bool any_nan(V v) {
  __m256 nan = _mm256_or_ps(_mm256_cmp_ps(v.a, v.a, _CMP_UNORD_Q), _mm256_cmp_ps(v.b, v.b, _CMP_UNORD_Q));
  return _mm256_movemask_ps(nan) != 0;
}

static inline float lane0(V v) { return _mm256_cvtss_f32(v.a); }

static inline float sum(V v) {
  __m256 eight = _mm256_add_ps(v.a, v.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float highest(V v) {
  __m256 eight = _mm256_max_ps(v.a, v.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline __m256 eight_from_bf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline V load_bf16(const uint16_t* from) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(from);
  return {eight_from_bf16(_mm_loadu_si128(halves)), eight_from_bf16(_mm_loadu_si128(halves + 1))};
}
// Rounds to nearest, ties to even.
static inline __m128i eight_as_bf16(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  up = _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  up = _mm256_srli_epi32(up, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}
static inline void store_bf16(uint16_t* to, V v) {
  __m128i* halves = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(halves, eight_as_bf16(v.a));
  _mm_storeu_si128(halves + 1, eight_as_bf16(v.b));
}
// The upper halves, which is all there is of numbers that bfloat16 has.
static inline __m128i eight_upper(__m256 v) {
  const __m256i halves = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
static inline void store_upper(uint16_t* to, V v) {
  __m128i* halves = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(halves, eight_upper(v.a));
  _mm_storeu_si128(halves + 1, eight_upper(v.b));
}
// Sixteen pairs: their first and their second numbers.
static inline void unpacked_pairs(const uint16_t* from, V& first, V& second) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i* pairs = reinterpret_cast<const __m256i*>(from);
  const __m256i a = _mm256_loadu_si256(pairs), b = _mm256_loadu_si256(pairs + 1);
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}

// Sixteen whole numbers.
struct I {
  __m256i a, b;
};

static inline I load_whole(const void* from) {
  const __m256i* eights = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(eights), _mm256_loadu_si256(eights + 1)};
}
static inline V as_floats(I whole) { return {_mm256_cvtepi32_ps(whole.a), _mm256_cvtepi32_ps(whole.b)}; }
static inline V load_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return as_floats({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

constexpr bool SHIFTED_INPUTS = false;
static inline __m256i four_more_of_eight(__m256i sums, __m256i four, __m256i weights) {
  const __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8),
                                         _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(four, 8), _mm256_srai_epi16(weights, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
static inline I four_more(I sums, int32_t inputs, I weights) {
  const __m256i four = _mm256_set1_epi32(inputs);
  return {four_more_of_eight(sums.a, four, weights.a), four_more_of_eight(sums.b, four, weights.b)};
}
