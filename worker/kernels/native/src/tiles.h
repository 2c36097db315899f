// Products by the processor's tiles (AMX): sixteen rows at once, each alone in its row of a tile.
#pragma once
#include <algorithm>

#include "kinds.h"
#include "weights.h"

constexpr int TILE_ROWS = 16;
constexpr int TILE_PAIR = 2 * TILE_ROWS;
constexpr int TILE_INPUTS = 32;  // of bfloat16, in a row of a tile
constexpr int64_t AHEAD = 2048;  // numbers by which weights are fetched from memory before they are needed

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Said anew for each piece of work: other libraries use the tiles of this thread too, and leave them as they like.
static void use_product_tiles() {
  static const TileConfig config;
  _tile_loadconfig(&config);
}

// The weights of the unit that a thread will probably take next are asked for while it still works on this one: a share
// of them in each step of all but its first rows, which have weights of their own to fetch.
class NextUnit {
 public:
  // `together` rows are gone through at once, with so many bytes of weights in each step.
  NextUnit(int64_t rows, int64_t together, int64_t step_bytes) {
    const int64_t turns = (rows + together - 1) / together - 1;
    lines_ = turns > 0 ? (step_bytes / 64 + turns - 1) / turns : 0;
  }

  const char* fetch(const char* from) const {
    for (int64_t line = 0; line < lines_; line++, from += 64) __builtin_prefetch(from, 0, 2);
    return from;
  }

 private:
  int64_t lines_;
};

// Rows whose sums are there, and are used while the next ones' are computed: tiles and what is done with their sums keep
// different parts of a core at work. use(row, the sums that it is among, its place there)
template <class Sum, class Use>
class Behind {
 public:
  // So many rows at most, in a product of so many steps.
  Behind(const Use& use, int64_t most, int64_t steps) : use_(use), at_once_((most + steps - 1) / steps) {}

  void begin(int64_t row, int64_t count, const Sum* sums) {
    row_ = row;
    count_ = count;
    done_ = 0;
    sums_ = sums;
  }

  // So many in each step that all are done when the product ends.
  void step() {
    for (int64_t turn = 0; turn < at_once_ && done_ < count_; turn++) one();
  }

  void finish() {
    while (done_ < count_) one();
  }

 private:
  void one() {
    use_(row_ + done_, sums_, done_);
    done_++;
  }

  const Use& use_;
  int64_t at_once_, row_ = 0, count_ = 0, done_ = 0;
  const Sum* sums_ = nullptr;
};

// Tiles 0 to 3 are sums: of rows 0 to 15 for outputs 0 to 15 and 16 to 31, then of rows 16 to 31.
template <bool both, bool fetch, class Rest>
static void sum_tiles(const uint16_t* rows, int64_t stride, const uint16_t* weights, int64_t inputs, float* sums,
                      const char*& ahead, const NextUnit& next, Rest& behind) {
  const int64_t bytes = stride * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t input = 0; input < inputs; input += TILE_INPUTS, weights += TILE_INPUTS * 32) {
    if (fetch)
      for (int64_t line = 0; line < 32 * 32; line += 32) __builtin_prefetch(weights + AHEAD + line, 0, 2);
    else
      ahead = next.fetch(ahead);
    _tile_loadd(6, weights, 128);
    _tile_loadd(4, rows + input, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 32, 128);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, rows + TILE_ROWS * stride + input, bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    behind.step();
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + LANES, 128);
  if (both) {
    _tile_stored(2, sums + TILE_ROWS * 32, 128);
    _tile_stored(3, sums + TILE_ROWS * 32 + LANES, 128);
  }
}

template <class Use>
static void tiles_of_rows(const uint16_t* rows, int64_t stride, const uint16_t* weights, int64_t inputs, int64_t first,
                          int64_t past, int64_t skip, const Use& use) {
  use_product_tiles();
  const NextUnit next(past - first, TILE_PAIR, 2 * UNIT * TILE_INPUTS);
  const char* ahead = reinterpret_cast<const char*>(weights + skip * UNIT * inputs);
  alignas(64) float sums[2][TILE_PAIR * 32];
  const auto use_sums = [&use](int64_t row, const float* all, int64_t place) {
    use(row, load(all + place * 32), load(all + place * 32 + LANES));
  };
  Behind<float, decltype(use_sums)> behind(use_sums, TILE_PAIR, inputs / TILE_INPUTS);
  for (int64_t row = first, turn = 0; row < past; row += TILE_PAIR, turn ^= 1) {
    const uint16_t* here = rows + row * stride;
    if (past - row > TILE_ROWS)
      row == first ? sum_tiles<true, true>(here, stride, weights, inputs, sums[turn], ahead, next, behind)
                   : sum_tiles<true, false>(here, stride, weights, inputs, sums[turn], ahead, next, behind);
    else
      row == first ? sum_tiles<false, true>(here, stride, weights, inputs, sums[turn], ahead, next, behind)
                   : sum_tiles<false, false>(here, stride, weights, inputs, sums[turn], ahead, next, behind);
    behind.begin(row, std::min<int64_t>(TILE_PAIR, past - row), sums[turn]);
  }
  behind.finish();
}
