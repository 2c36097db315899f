// Attention of some rows of one sequence over its pages, by one key/value head.
//
// Keys are taken sixty-four at a time, from position 0 on, with the running maximum and sum of "Online normalizer
// calculation for softmax" (Milakov and Gimelshein, 2018). Where these sixty-four begin depends on nothing but the
// position, and what a row may not see counts exactly nothing: so a row's bits are the same when it is decoded alone,
// in any chunk of a prompt, and after any prefix found in the cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "pages.h"

constexpr int CHUNK = 64;
constexpr int CHUNK_TILES = CHUNK / LANES;
constexpr int QUERIES = 4;      // taken through the keys together
constexpr float NOTHING = -__builtin_inff();

struct AttentionShape {
  int64_t heads, kv_heads, head;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // keys that a token sees, itself included; 0: all
};

// Numbers that one thread works with. Kept from piece to piece.
struct AttentionScratch {
  std::vector<float> sums, maxima, totals;
  std::vector<uint16_t> queries;  // one after the other; for tiles
};

// tanh by exp, within a few units in the last place of 1.
static inline V tanh_of(V x) {
  const V e = exp_of(smaller(larger(add(x, x), splat(-87.0f)), splat(87.0f)));
  return nan_if_nan(x, sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f)))));
}

// Scores of ROWS queries with `tiles` times sixteen keys, into [ROWS][CHUNK].
template <class Kind, int ROWS>
static inline void score(const typename Kind::Number* const* queries, const typename Kind::Number* const* keys,
                         int tiles, int64_t head, float (*scores)[CHUNK]) {
  for (int tile = 0; tile < tiles; tile += 2) {
    const typename Kind::Number* left = keys[tile];
    const typename Kind::Number* right = keys[std::min(tile + 1, tiles - 1)];
    V sums[ROWS][2];
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = splat(0.0f);
    for (int64_t d = 0; d < head; d += Kind::PACK, left += LANES * Kind::PACK, right += LANES * Kind::PACK) {
      const auto one = Kind::sixteen(left), other = Kind::sixteen(right);
      for (int row = 0; row < ROWS; row++) {
        sums[row][0] = Kind::go_on(sums[row][0], queries[row] + d, one);
        sums[row][1] = Kind::go_on(sums[row][1], queries[row] + d, other);
      }
    }
    for (int row = 0; row < ROWS; row++) {
      store(scores[row] + tile * LANES, sums[row][0]);
      if (tile + 1 < tiles) store(scores[row] + (tile + 1) * LANES, sums[row][1]);
    }
  }
}

// Turns one row's scores into likelihoods; those before `from` and from `to` on, within this chunk, are none. Returns by
// what the sums so far have to be multiplied.
template <class Kind>
static inline float weigh_scores(float* scores, int tiles, int from, int to, const AttentionShape& shape, float& maximum,
                                 float& total, typename Kind::Number* likelihoods) {
  V v[CHUNK_TILES];
  const V scale = splat(shape.scale);
  for (int tile = 0; tile < tiles; tile++) {
    v[tile] = mul(load(scores + tile * LANES), scale);
    if (shape.softcap > 0) v[tile] = mul(tanh_of(div(v[tile], splat(shape.softcap))), splat(shape.softcap));
    const int first = from - tile * LANES, past = to - tile * LANES;
    if (first > 0 || past < LANES) {
      alignas(64) float some[LANES];
      store(some, v[tile]);
      for (int lane = 0; lane < LANES; lane++)
        if (lane < first || lane >= past) some[lane] = NOTHING;
      v[tile] = load(some);
    }
  }
  V most = v[0];
  for (int tile = 1; tile < tiles; tile++) most = larger(v[tile], most);
  const float before = maximum;
  maximum = std::max(before, highest(most));
  const V shift = splat(maximum);
  V sums = splat(0.0f);
  for (int tile = 0; tile < tiles; tile++) {
    const V weight = exp_of(sub(v[tile], shift));
    sums = add(sums, weight);
    Kind::store16(likelihoods + tile * LANES, weight);
  }
  if (before == maximum) {
    total += sum(sums);
    return 1.0f;
  }
  const float keep = before == NOTHING ? 0.0f : lane0(exp_of(splat(before - maximum)));
  total = total * keep + sum(sums);
  return keep;
}

// sums[ROWS][head] += likelihoods times values, of `tiles` times sixteen positions.
template <class Kind, int ROWS>
static inline void gather(const typename Kind::Number (*likelihoods)[CHUNK], const typename Kind::Number* const* values,
                          int tiles, int64_t head, float* const* sums) {
  constexpr int PACKS = LANES / Kind::PACK;
  for (int64_t d = 0; d < head; d += 2 * LANES) {
    V one[ROWS], other[ROWS];
    for (int row = 0; row < ROWS; row++) {
      one[row] = load(sums[row] + d);
      other[row] = load(sums[row] + d + LANES);
    }
    for (int pack = 0; pack < tiles * PACKS; pack++) {
      const typename Kind::Number* tile = values[pack / PACKS] + d * LANES + pack % PACKS * LANES * Kind::PACK;
      const auto low = Kind::sixteen(tile), high = Kind::sixteen(tile + LANES * LANES);
      for (int row = 0; row < ROWS; row++) {
        one[row] = Kind::go_on(one[row], likelihoods[row] + pack * Kind::PACK, low);
        other[row] = Kind::go_on(other[row], likelihoods[row] + pack * Kind::PACK, high);
      }
    }
    for (int row = 0; row < ROWS; row++) {
      store(sums[row] + d, one[row]);
      store(sums[row] + d + LANES, other[row]);
    }
  }
}

// Some queries of one sequence, of all heads that share a key/value head.
template <class Kind>
struct Queries {
  const typename Kind::Number* rows;  // [count][heads][head], of the first position
  typename Kind::Number* out;         // the same shape
  int64_t first;                      // position of the first
  int64_t count;
  int64_t stride;                     // of a position, in both
  const int32_t* table;
};

template <class Kind, int ROWS>
static void attend_rows(const Queries<Kind>& queries, const Pages<Kind>& pages, const AttentionShape& shape,
                        int64_t kv_head, int64_t index, int64_t chunk, AttentionScratch& scratch) {
  const int64_t group = shape.heads / shape.kv_heads, begin = chunk * CHUNK;
  const typename Kind::Number* rows[ROWS];
  float* sums[ROWS];
  int64_t past_all = 0;
  for (int row = 0; row < ROWS; row++) {
    const int64_t position = (index + row) / group, head = kv_head * group + (index + row) % group;
    rows[row] = queries.rows + position * queries.stride + head * shape.head;
    sums[row] = scratch.sums.data() + (index + row) * shape.head;
    past_all = std::max(past_all, queries.first + position + 1);
  }
  const int keys = static_cast<int>(std::min<int64_t>(past_all - begin, CHUNK));
  if (keys <= 0) return;
  const int tiles = (keys + LANES - 1) / LANES;
  const typename Kind::Number *key_tiles[CHUNK_TILES], *value_tiles[CHUNK_TILES];
  for (int tile = 0; tile < tiles; tile++) {
    key_tiles[tile] = pages.key_tile(queries.table, chunk * CHUNK_TILES + tile, kv_head);
    value_tiles[tile] = pages.value_tile(queries.table, chunk * CHUNK_TILES + tile, kv_head);
  }
  alignas(64) float scores[ROWS][CHUNK];
  alignas(64) typename Kind::Number likelihoods[ROWS][CHUNK];
  score<Kind, ROWS>(rows, key_tiles, tiles, shape.head, scores);
  for (int row = 0; row < ROWS; row++) {
    const int64_t position = queries.first + (index + row) / group;
    const int64_t from = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1 - begin) : 0;
    const int64_t to = std::min<int64_t>(CHUNK, position + 1 - begin);
    if (from >= to) {
      std::memset(likelihoods[row], 0, sizeof likelihoods[row]);
      continue;
    }
    const float keep = weigh_scores<Kind>(scores[row], tiles, static_cast<int>(from), static_cast<int>(to), shape,
                                          scratch.maxima[index + row], scratch.totals[index + row], likelihoods[row]);
    if (keep != 1.0f)
      for (int64_t d = 0; d < shape.head; d += LANES) store(sums[row] + d, mul(load(sums[row] + d), splat(keep)));
  }
  gather<Kind, ROWS>(likelihoods, value_tiles, tiles, shape.head, sums);
}

#if defined(__AMX_BF16__)
#include "tile_attention.h"
#endif

template <class Kind>
static void attend_chunk(const Queries<Kind>& queries, const Pages<Kind>& pages, const AttentionShape& shape,
                         int64_t kv_head, int64_t rows, int64_t chunk, AttentionScratch& scratch) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Kind, Bf16>) return attend_tiles(queries, pages, shape, kv_head, rows, chunk, scratch);
#endif
  for (int64_t index = 0; index < rows; index += QUERIES) {
    switch (std::min<int64_t>(QUERIES, rows - index)) {
      case 4: attend_rows<Kind, 4>(queries, pages, shape, kv_head, index, chunk, scratch); break;
      case 3: attend_rows<Kind, 3>(queries, pages, shape, kv_head, index, chunk, scratch); break;
      case 2: attend_rows<Kind, 2>(queries, pages, shape, kv_head, index, chunk, scratch); break;
      default: attend_rows<Kind, 1>(queries, pages, shape, kv_head, index, chunk, scratch);
    }
  }
}

// Asks for a chunk's keys and values before they are needed: blocks lie anywhere, so the processor can't guess.
template <class Kind>
static void fetch_chunk(const Queries<Kind>& queries, const Pages<Kind>& pages, int64_t kv_head, int64_t chunk) {
  const int64_t past = queries.first + queries.count;
  const int64_t size = LANES * pages.head * static_cast<int64_t>(sizeof(typename Kind::Number));
  for (int64_t tile = chunk * CHUNK_TILES; tile < (chunk + 1) * CHUNK_TILES && tile * LANES < past; tile++) {
    const char* keys = reinterpret_cast<const char*>(pages.key_tile(queries.table, tile, kv_head));
    const char* values = reinterpret_cast<const char*>(pages.value_tile(queries.table, tile, kv_head));
    for (int64_t line = 0; line < size; line += 64) {
      __builtin_prefetch(keys + line, 0, 2);
      __builtin_prefetch(values + line, 0, 2);
    }
  }
}

template <class Kind>
static void attend(const Queries<Kind>& queries, const Pages<Kind>& pages, const AttentionShape& shape, int64_t kv_head,
                   AttentionScratch& scratch) {
  const int64_t group = shape.heads / shape.kv_heads, rows = queries.count * group;
  scratch.sums.assign(padded(rows, LANES) * shape.head, 0.0f);
  scratch.queries.clear();
  scratch.maxima.assign(rows, NOTHING);
  scratch.totals.assign(rows, 0.0f);
  const int64_t lowest = shape.window > 0 ? std::max<int64_t>(0, queries.first - shape.window + 1) : 0;
  const int64_t chunks = (queries.first + queries.count + CHUNK - 1) / CHUNK;
  fetch_chunk<Kind>(queries, pages, kv_head, lowest / CHUNK);
  for (int64_t chunk = lowest / CHUNK; chunk < chunks; chunk++) {
    fetch_chunk<Kind>(queries, pages, kv_head, chunk + 1);
    attend_chunk<Kind>(queries, pages, shape, kv_head, rows, chunk, scratch);
  }
  for (int64_t row = 0; row < rows; row++) {
    const V share = splat(1.0f / scratch.totals[row]);
    auto* out = queries.out + row / group * queries.stride + (kv_head * group + row % group) * shape.head;
    for (int64_t d = 0; d < shape.head; d += LANES)
      Kind::store16(out + d, mul(load(scratch.sums.data() + row * shape.head + d), share));
  }
}
