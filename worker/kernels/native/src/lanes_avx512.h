// Sixteen float32 numbers in one register.
#pragma once
#include <immintrin.h>

using V = __m512;

static inline V splat(float value) { return _mm512_set1_ps(value); }
static inline V load(const float* from) { return _mm512_loadu_ps(from); }
static inline void store(float* to, V v) { _mm512_storeu_ps(to, v); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
// a * b + c
static inline V madd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
// Where one is no number, b.
static inline V larger(V a, V b) { return _mm512_max_ps(a, b); }
static inline V smaller(V a, V b) { return _mm512_min_ps(a, b); }
static inline V rounded(V v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V times_power_of_two(V v, V n) { return _mm512_scalef_ps(v, n); }
static inline V zero_below(V x, V limit, V v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
static inline V nan_if_nan(V x, V v) { return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }
static inline bool any_nan(V v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }

// Sixteen whole numbers of eight bits.
static inline void store_bytes(int8_t* to, V whole) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
}
// Lanes before `first` and from `past` on become `other`.
static inline V lanes_within(V v, int first, int past, float other) {
  const uint32_t before = first <= 0 ? 0 : first >= 16 ? 0xffff : (1u << first) - 1;
  const uint32_t up_to = past <= 0 ? 0 : past >= 16 ? 0xffff : (1u << past) - 1;
  return _mm512_mask_mov_ps(splat(other), static_cast<__mmask16>(up_to & ~before), v);
}

static inline __m256 halves_added(V v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}
static inline float lane0(V v) { return _mm512_cvtss_f32(v); }

static inline float sum(V v) {
  __m256 eight = halves_added(v);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float highest(V v) { return _mm512_reduce_max_ps(v); }

static inline V load_bf16(const uint16_t* from) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// Rounds to nearest, ties to even. The instruction of that name takes what is denormal for zero: not this.
static inline __m256i as_bf16(V v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
static inline void store_bf16(uint16_t* to, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), as_bf16(v)); }
// The upper halves, which is all there is of numbers that bfloat16 has.
static inline void store_upper(uint16_t* to, V v) {
  const __m512i halves = _mm512_srli_epi32(_mm512_castps_si512(v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(halves));
}
// Sixteen pairs: their first and their second numbers.
static inline void unpacked_pairs(const uint16_t* from, V& first, V& second) {
  const __m512i pairs = _mm512_loadu_si512(from);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Sixteen whole numbers.
using I = __m512i;

static inline I load_whole(const void* from) { return _mm512_loadu_si512(from); }
static inline V as_floats(I whole) { return _mm512_cvtepi32_ps(whole); }
static inline V load_int8(const int8_t* from) {
  return as_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

#if defined(__AVX512VNNI__)
// Multiplies unsigned numbers: 128 is added to the inputs.
constexpr bool SHIFTED_INPUTS = true;
static inline I four_more(I sums, int32_t inputs, I weights) {
  return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(inputs ^ static_cast<int32_t>(0x80808080u)), weights);
}
#else
constexpr bool SHIFTED_INPUTS = false;
static inline I four_more(I sums, int32_t inputs, I weights) {
  const I four = _mm512_set1_epi32(inputs);
  const I even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8),
                                   _mm512_srai_epi16(_mm512_slli_epi16(weights, 8), 8));
  const I odd = _mm512_madd_epi16(_mm512_srai_epi16(four, 8), _mm512_srai_epi16(weights, 8));
  return _mm512_add_epi32(sums, _mm512_add_epi32(even, odd));
}
#endif
