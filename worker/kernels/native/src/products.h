// Rows times weights. A row's results have the same bits whatever rows are beside it, and however many threads work.
#pragma once
#include <algorithm>

#include "integers.h"
#include "kinds.h"
#include "threads.h"
#include "weights.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

// How many rows go through the weights together: their sums fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS_TOGETHER = 12;
#elif defined(__AVX2__)
constexpr int ROWS_TOGETHER = 3;
#else
constexpr int ROWS_TOGETHER = 2;
#endif

template <class Kind, int ROWS, class Use>
static inline void some_rows(const typename Kind::Number* rows, int64_t stride, const typename Kind::Number* weights,
                             int64_t inputs, int64_t first, const Use& use) {
  V sums[ROWS][2];
  for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = splat(0.0f);
  for (int64_t input = 0; input < inputs; input += Kind::PACK, weights += UNIT * Kind::PACK) {
    const auto low = Kind::sixteen(weights), high = Kind::sixteen(weights + LANES * Kind::PACK);
    for (int row = 0; row < ROWS; row++) {
      sums[row][0] = Kind::go_on(sums[row][0], rows + row * stride + input, low);
      sums[row][1] = Kind::go_on(sums[row][1], rows + row * stride + input, high);
    }
  }
  for (int row = 0; row < ROWS; row++) use(first + row, sums[row][0], sums[row][1]);
}

template <class Kind, int ROWS, class Use>
static void at_most(int64_t count, const typename Kind::Number* rows, int64_t stride,
                    const typename Kind::Number* weights, int64_t inputs, int64_t first, const Use& use) {
  if constexpr (ROWS > 1) {
    if (count < ROWS) return at_most<Kind, ROWS - 1>(count, rows, stride, weights, inputs, first, use);
  }
  some_rows<Kind, ROWS>(rows, stride, weights, inputs, first, use);
}

// use(row, sums of outputs 0 to 15, sums of outputs 16 to 31) for each row from `first` on and before `past`. `skip`: how
// many units further on this thread's next one probably is.
template <class Kind, class Use>
static void unit_of_rows(const typename Kind::Number* rows, int64_t stride, const typename Kind::Number* weights,
                         int64_t inputs, int64_t first, int64_t past, int64_t skip, const Use& use) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Kind, Bf16>) return tiles_of_rows(rows, stride, weights, inputs, first, past, skip, use);
#endif
  for (int64_t row = first; row < past; row += ROWS_TOGETHER)
    at_most<Kind, ROWS_TOGETHER>(std::min<int64_t>(past - row, ROWS_TOGETHER), rows + row * stride, stride, weights,
                                 inputs, row, use);
}

// So many numbers of rows are gone through with all weights, before the next ones.
constexpr int64_t ROW_NUMBERS = 192 * 1024;

// work(unit, first row, past) for all units and rows, from all threads.
template <class Work>
static void each_unit(Team& team, int64_t count, const Weight& weight, const Work& work) {
  const int64_t units = (weight.outputs + UNIT - 1) / UNIT;
  // Few units are shared out evenly only if each is taken for some of the rows at a time; and rows that don't fit into a
  // core's second cache would be read from memory again for each unit.
  const int64_t even = std::min((count + 63) / 64, 6 * team.size() / units);
  const int64_t parts = std::max<int64_t>({1, even, count * weight.inputs / ROW_NUMBERS});
  const int64_t part = padded((count + parts - 1) / parts, ROW_STEP);
  each(team, units * parts, [&](int64_t piece) {
    const int64_t first = piece / units * part;
    work(piece % units, first, std::min(count, first + part));
  });
}

// All rows times all weights: use(unit, row, sums of 16 outputs, sums of the 16 after them).
template <class Kind, class Use>
static void product(Team& team, const typename Kind::Number* rows, int64_t stride, int64_t count, const Weight& weight,
                    const Use& use) {
  each_unit(team, count, weight, [&](int64_t unit, int64_t first, int64_t past) {
    const auto* weights = static_cast<const typename Kind::Number*>(weight.packed) + unit * UNIT * weight.inputs;
    unit_of_rows<Kind>(rows, stride, weights, weight.inputs, first, past, team.size(),
                       [&](int64_t row, V low, V high) { use(unit, row, low, high); });
  });
}

template <class Use>
static void whole_product(Team& team, const HalvedRows& rows, int64_t count, const Weight& weight, const Use& use) {
  each_unit(team, count, weight, [&](int64_t unit, int64_t first, int64_t past) {
    unit_of_whole_rows(rows, first, past, weight, unit, team.size(), use);
  });
}
