// Attention by the processor's tiles: sixteen queries at once. Included by attention.h.
#pragma once
#include "tiles.h"

constexpr int64_t TILES_TOGETHER = 4;

// Tiles 0 to 3 are sums; 4 has queries, 6 keys: thirty-two numbers of sixteen; 5 has likelihoods, 7 values: of sixteen
// positions.
static void use_attention_tiles() {
  static const TileConfig config = [] {
    TileConfig made;
    made.row_bytes[5] = 32;
    made.rows[7] = 8;
    return made;
  }();
  _tile_loadconfig(&config);
}

// Tiles are loaded behind the compiler's back: what was stored for them must be in memory.
static inline void written() { asm volatile("" ::: "memory"); }

static inline void score_tiles(const uint16_t* queries, const uint16_t* const* keys, int tiles, int64_t head,
                               float* scores) {
  written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < head; d += 32) {
    _tile_loadd(4, queries + d, head * 2);
    _tile_loadd(6, keys[0] + d * LANES, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (tiles > 1) {
      _tile_loadd(6, keys[1] + d * LANES, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (tiles > 2) {
      _tile_loadd(6, keys[2] + d * LANES, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (tiles > 3) {
      _tile_loadd(6, keys[3] + d * LANES, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, scores, CHUNK * 4);
  _tile_stored(1, scores + LANES, CHUNK * 4);
  _tile_stored(2, scores + 2 * LANES, CHUNK * 4);
  _tile_stored(3, scores + 3 * LANES, CHUNK * 4);
}

static inline void gather_tiles(const uint16_t* likelihoods, const uint16_t* const* values, int tiles, int64_t head,
                                float* sums) {
  written();
  for (int64_t d = 0; d < head; d += 32) {
    _tile_loadd(0, sums + d, head * 4);
    _tile_loadd(1, sums + d + LANES, head * 4);
    for (int tile = 0; tile < tiles; tile++) {
      _tile_loadd(5, likelihoods + tile * LANES, CHUNK * 2);
      _tile_loadd(7, values[tile] + d * LANES, 64);
      _tile_dpbf16ps(0, 5, 7);
      _tile_loadd(7, values[tile] + (d + LANES) * LANES, 64);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, sums + d, head * 4);
    _tile_stored(1, sums + d + LANES, head * 4);
  }
}

// Turns the scores of sixteen queries, or fewer, into likelihoods.
static inline void weigh_tile(Attending<Bf16>& all, const Chunk<Bf16>& chunk, int tiles, const AttentionShape& shape,
                              int64_t begin, int64_t first, int64_t count, float (*scores)[CHUNK],
                              uint16_t (*likelihoods)[CHUNK]) {
  for (int64_t row = 0; row < LANES; row++) {
    const int64_t position = row < count ? all.rows[first + row].position : 0;
    const int64_t from = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1 - begin) : 0;
    const int64_t to = std::min<int64_t>(CHUNK, position + 1 - begin);
    if (row >= count || from >= to) {
      std::memset(likelihoods[row], 0, CHUNK * sizeof(uint16_t));
      continue;
    }
    const float keep = weigh_scores(scores[row], chunk, tiles, static_cast<int>(from), static_cast<int>(to), shape,
                                    all.maxima[first + row], all.totals[first + row], likelihoods[row]);
    if (keep == 1.0f) continue;
    float* sums = all.sums.data() + (first + row) * shape.head;
    for (int64_t d = 0; d < shape.head; d += LANES) store(sums + d, mul(load(sums + d), splat(keep)));
  }
}

// Some tiles of queries go through each part of the work one after the other: each part waits long for its first
// results, and meanwhile the next tile's are begun.
static void attend_tiles(Attending<Bf16>& all, const Chunk<Bf16>& chunk, int tiles, const AttentionShape& shape,
                         int64_t begin) {
  const int64_t rows = static_cast<int64_t>(all.rows.size());
  use_attention_tiles();
  alignas(64) float scores[TILES_TOGETHER][LANES][CHUNK];
  alignas(64) uint16_t likelihoods[TILES_TOGETHER][LANES][CHUNK];
  const auto sees = [begin](const Query<Bf16>& row) { return row.position >= begin; };
  for (int64_t group = 0; group < rows; group += TILES_TOGETHER * LANES) {
    const auto each_tile = [&](const auto& work) {
      for (int64_t first = group; first < std::min(rows, group + TILES_TOGETHER * LANES); first += LANES) {
        const int64_t count = std::min<int64_t>(LANES, rows - first), place = (first - group) / LANES;
        // Where none of them sees so far, there is nothing to do.
        if (std::any_of(all.rows.begin() + first, all.rows.begin() + first + count, sees)) work(first, count, place);
      }
    };
    each_tile([&](int64_t first, int64_t, int64_t place) {
      score_tiles(all.queries.data() + first * shape.head, chunk.keys, tiles, shape.head, scores[place][0]);
    });
    each_tile([&](int64_t first, int64_t count, int64_t place) {
      weigh_tile(all, chunk, tiles, shape, begin, first, count, scores[place], likelihoods[place]);
    });
    each_tile([&](int64_t first, int64_t, int64_t place) {
      gather_tiles(likelihoods[place][0], chunk.values, tiles, shape.head, all.sums.data() + first * shape.head);
    });
  }
}
