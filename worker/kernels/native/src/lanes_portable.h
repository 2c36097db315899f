// Sixteen float32 numbers as a vector of the compiler's own, which it cuts to what the processor has.
#pragma once

typedef float V __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

static inline V splat(float value) { return V{} + value; }
static inline V load(const float* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
static inline void store(float* to, V v) { std::memcpy(to, &v, sizeof v); }
static inline V add(V a, V b) { return a + b; }
static inline V sub(V a, V b) { return a - b; }
static inline V mul(V a, V b) { return a * b; }
static inline V div(V a, V b) { return a / b; }
// a * b + c, rounded twice.
static inline V madd(V a, V b, V c) { return a * b + c; }
// Where one is no number, b.
static inline V larger(V a, V b) { return a > b ? a : b; }
static inline V smaller(V a, V b) { return a < b ? a : b; }
// To the nearest whole number, ties to even; for less than 2^22.
static inline V rounded(V v) { return (v + 12582912.0f) - 12582912.0f; }
static inline V times_power_of_two(V v, V n) { return v * (V)((__builtin_convertvector(n, Bits) + 127) << 23); }
static inline V zero_below(V x, V limit, V v) { return x < limit ? V{} : v; }
static inline V nan_if_nan(V x, V v) { return x != x ? x : v; }
static inline bool any_nan(V v) {
  const Bits nan = v != v;
  int found = 0;
  for (int i = 0; i < 16; i++) found |= nan[i];
  return found != 0;
}

static inline float lane0(V v) { return v[0]; }

static inline float sum(V v) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] + v[i + width];
  return v[0];
}
static inline float highest(V v) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
}

static inline V load_bf16(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (V)(__builtin_convertvector(halves, Bits) << 16);
}
// Rounds to nearest, ties to even.
static inline void store_bf16(uint16_t* to, V v) {
  const Bits bits = (Bits)v;
  const Bits up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  const Halves halves = __builtin_convertvector(v != v ? nan : up, Halves);
  std::memcpy(to, &halves, sizeof halves);
}
// The upper halves, which is all there is of numbers that bfloat16 has.
static inline void store_upper(uint16_t* to, V v) {
  const Halves halves = __builtin_convertvector((Bits)v >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}
// Sixteen pairs: their first and their second numbers. Little-endian.
static inline void unpacked_pairs(const uint16_t* from, V& first, V& second) {
  Bits pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  first = (V)(pairs << 16);
  second = (V)(pairs & static_cast<int32_t>(0xffff0000u));
}

// Sixteen whole numbers.
using I = Bits;

static inline I load_whole(const void* from) {
  I whole;
  std::memcpy(&whole, from, sizeof whole);
  return whole;
}
static inline V as_floats(I whole) { return __builtin_convertvector(whole, V); }
static inline V load_int8(const int8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, V);
}

constexpr bool SHIFTED_INPUTS = false;
static inline I four_more(I sums, int32_t inputs, I weights) {
  for (int byte = 0; byte < 4; byte++)
    sums += (weights << (24 - 8 * byte) >> 24) * static_cast<int8_t>(static_cast<uint32_t>(inputs) >> 8 * byte);
  return sums;
}
