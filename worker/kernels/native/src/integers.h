// Products of whole numbers: weights of eight bits with a scale for each output, rows of sixteen with a scale for each row.
//
// A row's number is scale * (256 * high + low), both of eight bits. Each half is multiplied by the weights in integers,
// which is exact in whatever order; only then do scales and float32 come in. So a product's bits are the same on all levels.
// Weights take half the memory of bfloat16, and rows lose little of what bfloat16 holds.
//
//     weights  [units][inputs / 4][2][16][4]
#pragma once
#include <algorithm>

#include "kinds.h"
#include "threads.h"
#include "weights.h"
#if defined(__AMX_INT8__)
#include "tiles.h"
#endif

constexpr int INT8_PACK = 4;
constexpr int INT8_STEP = 64;  // inputs are padded with zeros to a multiple of this

// Rows in two halves.
struct HalvedRows {
  int8_t* high;   // [rows, stride]
  int8_t* low;
  float* scales;  // [rows]
  int64_t stride;
};

// Rounds to the nearest of 32,639 steps on either side of zero: 256 * 127 + 127. `size`: a multiple of LANES.
template <class Kind>
static inline void halve_row(const typename Kind::Number* from, int64_t size, const HalvedRows& to, int64_t row) {
  V most = splat(0.0f);
  bool nan = false;
  for (int64_t at = 0; at < size; at += LANES) {
    const V v = Kind::sixteen_numbers(from + at);
    nan |= any_nan(v);
    most = larger(larger(v, sub(splat(0.0f), v)), most);
  }
  const float top = highest(most);
  nan |= top == __builtin_inff();
  // So little counts nothing: its inverse would be infinite.
  const bool some = top > 1e-30f && !nan;
  to.scales[row] = nan ? __builtin_nanf("") : some ? top / 32639.0f : 0.0f;
  int8_t *high = to.high + row * to.stride, *low = to.low + row * to.stride;
  std::memset(high, 0, to.stride);
  std::memset(low, 0, to.stride);
  if (!some) return;
  const V steps = splat(32639.0f / top);
  for (int64_t at = 0; at < size; at += LANES) {
    const V whole = rounded(mul(Kind::sixteen_numbers(from + at), steps));
    // Half a unit between two: what is nearest is (whole + 128) / 256, rounded down.
    const V upper = rounded(madd(whole, splat(1.0f / 256), splat(1.0f / 512)));
    store_bytes(high + at, upper);
    store_bytes(low + at, madd(upper, splat(-256.0f), whole));
  }
}

static inline int32_t four_at(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return four;
}

// What sums begin with: without the 128 that are added to each input, where they are.
static inline I first_sums(const Weight& weight, int64_t output) {
  static const int32_t none[LANES] = {};
  return load_whole(SHIFTED_INPUTS ? weight.corrections + output : none);
}

static inline V scaled(I high, I low, V scale) {
  return mul(madd(splat(256.0f), as_floats(high), as_floats(low)), scale);
}

template <int ROWS, class Use>
static inline void some_whole_rows(const HalvedRows& rows, int64_t first, const Weight& weight, int64_t unit,
                                   const Use& use) {
  const int8_t* weights = static_cast<const int8_t*>(weight.packed) + unit * UNIT * weight.inputs;
  const int64_t output = unit * UNIT;
  I high[ROWS][2], low[ROWS][2];
  for (int row = 0; row < ROWS; row++)
    for (int half = 0; half < 2; half++)
      high[row][half] = low[row][half] = first_sums(weight, output + half * LANES);
  for (int64_t input = 0; input < weight.inputs; input += INT8_PACK, weights += UNIT * INT8_PACK) {
    const I left = load_whole(weights), right = load_whole(weights + LANES * INT8_PACK);
    for (int row = 0; row < ROWS; row++) {
      const int64_t place = (first + row) * rows.stride + input;
      const int32_t upper = four_at(rows.high + place), lower = four_at(rows.low + place);
      high[row][0] = four_more(high[row][0], upper, left);
      high[row][1] = four_more(high[row][1], upper, right);
      low[row][0] = four_more(low[row][0], lower, left);
      low[row][1] = four_more(low[row][1], lower, right);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    const V scale = splat(rows.scales[first + row]);
    use(unit, first + row, scaled(high[row][0], low[row][0], mul(scale, load(weight.scales + output))),
        scaled(high[row][1], low[row][1], mul(scale, load(weight.scales + output + LANES))));
  }
}

#if defined(__AVX512F__)
constexpr int WHOLE_ROWS = 6;
#else
constexpr int WHOLE_ROWS = 2;
#endif

template <int ROWS, class Use>
static void whole_rows(int64_t count, const HalvedRows& rows, int64_t first, const Weight& weight, int64_t unit,
                       const Use& use) {
  if constexpr (ROWS > 1) {
    if (count < ROWS) return whole_rows<ROWS - 1>(count, rows, first, weight, unit, use);
  }
  some_whole_rows<ROWS>(rows, first, weight, unit, use);
}

#if defined(__AMX_INT8__)
// Tiles 0 and 1 are sums of the high halves, for the first and the second sixteen outputs; 2 and 3 those of the low ones.
template <class Use>
static void whole_tiles(const HalvedRows& rows, int64_t first, int64_t past, const Weight& weight, int64_t unit,
                        int64_t skip, const Use& use) {
  use_product_tiles();
  const NextUnit next(past - first, TILE_ROWS, UNIT * INT8_STEP);
  const char* ahead = static_cast<const char*>(weight.packed) + (unit + skip) * UNIT * weight.inputs;
  alignas(64) int32_t sums[2][4 * TILE_ROWS * LANES];
  constexpr int64_t PART = TILE_ROWS * LANES;
  const int64_t output = unit * UNIT;
  const V left = load(weight.scales + output), right = load(weight.scales + output + LANES);
  const auto use_sums = [&](int64_t row, const int32_t* all, int64_t place) {
    const V scale = splat(rows.scales[row]);
    const int32_t* own = all + place * LANES;
    use(unit, row, scaled(load_whole(own), load_whole(own + 2 * PART), mul(scale, left)),
        scaled(load_whole(own + PART), load_whole(own + 3 * PART), mul(scale, right)));
  };
  Behind<int32_t, decltype(use_sums)> behind(use_sums, TILE_ROWS, weight.inputs / INT8_STEP);
  for (int64_t row = first, turn = 0; row < past; row += TILE_ROWS, turn ^= 1) {
    const int8_t* weights = static_cast<const int8_t*>(weight.packed) + unit * UNIT * weight.inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t input = 0; input < weight.inputs; input += INT8_STEP, weights += UNIT * INT8_STEP) {
      if (row == first)
        for (int64_t line = 0; line < UNIT * INT8_STEP; line += 64) __builtin_prefetch(weights + 2 * AHEAD + line, 0, 2);
      else
        ahead = next.fetch(ahead);
      const int64_t place = row * rows.stride + input;
      _tile_loadd(6, weights, 128);
      _tile_loadd(4, rows.high + place, rows.stride);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, weights + 64, 128);
      _tile_dpbssd(1, 4, 7);
      _tile_loadd(5, rows.low + place, rows.stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      behind.step();
    }
    _tile_stored(0, sums[turn], 64);
    _tile_stored(1, sums[turn] + PART, 64);
    _tile_stored(2, sums[turn] + 2 * PART, 64);
    _tile_stored(3, sums[turn] + 3 * PART, 64);
    behind.begin(row, std::min<int64_t>(TILE_ROWS, past - row), sums[turn]);
  }
  behind.finish();
}
#endif

template <class Use>
static void unit_of_whole_rows(const HalvedRows& rows, int64_t first, int64_t past, const Weight& weight, int64_t unit,
                               int64_t skip, const Use& use) {
#if defined(__AMX_INT8__)
  whole_tiles(rows, first, past, weight, unit, skip, use);
#else
  for (int64_t row = first; row < past; row += WHOLE_ROWS)
    whole_rows<WHOLE_ROWS>(std::min<int64_t>(past - row, WHOLE_ROWS), rows, row, weight, unit, use);
#endif
}
