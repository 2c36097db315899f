// What numbers weights, keys and values are kept as, and how sixteen sums over them go on.
//
// Numbers that are multiplied together lie in packs: of PACK successive inputs, for sixteen outputs,
//
//     [inputs / PACK][16 outputs][PACK]
//
// so that one step of sixteen sums takes one run of memory and PACK inputs, the same for all. Each sum goes over its
// inputs in their order, alone in its lane: its bits depend on nothing that is computed beside it.
#pragma once
#include "lanes.h"

// Sums take products of float32 numbers.
struct F32 {
  using Number = float;
  static constexpr int PACK = 1;
  static float widened(Number value) { return value; }
  static V sixteen_numbers(const Number* from) { return load(from); }
  static V kept(V v) { return v; }
  static void store16(Number* to, V v) { store(to, v); }
  static void store_same16(Number* to, V v) { store(to, v); }  // numbers that this kind has

  struct Sixteen {
    V numbers;
  };
  static Sixteen sixteen(const Number* from) { return {load(from)}; }
  static V go_on(V sums, const Number* inputs, const Sixteen& weights) {
    return madd(splat(*inputs), weights.numbers, sums);
  }
};

// Sums are float32, products those of bfloat16 numbers, by pairs.
struct Bf16 {
  using Number = uint16_t;
  static constexpr int PACK = 2;
  static float widened(Number value) { return from_bf16(value); }
  static V sixteen_numbers(const Number* from) { return load_bf16(from); }

  // What becomes of numbers that are stored: the largest of them become infinite.
  static V kept(V v) {
    alignas(64) Number sixteen[LANES];
    store16(sixteen, v);
    return load_bf16(sixteen);
  }

#if defined(__AVX512BF16__)
  static void store16(Number* to, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(v));
  }
  static void store_same16(Number* to, V v) { store16(to, v); }

  struct Sixteen {
    __m512i pairs;
  };
  static Sixteen sixteen(const Number* from) { return {_mm512_loadu_si512(from)}; }
  static V go_on(V sums, const Number* inputs, const Sixteen& weights) {
    int32_t pair;
    std::memcpy(&pair, inputs, 4);
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights.pairs);
  }
#else
  static void store16(Number* to, V v) { store_bf16(to, v); }
  static void store_same16(Number* to, V v) { store_upper(to, v); }

  struct Sixteen {
    V first, second;
  };
  static Sixteen sixteen(const Number* from) {
    Sixteen result;
    unpacked_pairs(from, result.first, result.second);
    return result;
  }
  static V go_on(V sums, const Number* inputs, const Sixteen& weights) {
    return madd(splat(from_bf16(inputs[1])), weights.second, madd(splat(from_bf16(inputs[0])), weights.first, sums));
  }
#endif
};
