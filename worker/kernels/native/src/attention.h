// Attention of some rows over pages, by one key/value head: of one sequence, or of several that begin with the same pages.
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

constexpr int QUERIES = 4;      // taken through the keys together
constexpr float NOTHING = -__builtin_inff();

struct AttentionShape {
  int64_t heads, kv_heads, head;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // keys that a token sees, itself included; 0: all
};

// One query: a head of a position.
template <class Kind>
struct Query {
  const typename Kind::Number* numbers;  // [head]
  typename Kind::Number* out;            // [head]
  int64_t position;
};

// How far some queries of one thread have come. Kept from piece to piece, for its memory.
template <class Kind>
struct Attending {
  std::vector<Query<Kind>> rows;
  std::vector<float> sums, maxima, totals;       // [rows padded to LANES][head], [rows], [rows]
  std::vector<typename Kind::Number> queries;    // [rows padded to LANES][head], where there are tiles

  void begin(int64_t head) {
    const int64_t count = static_cast<int64_t>(rows.size());
    sums.assign(padded(count, LANES) * head, 0.0f);
    maxima.assign(count, NOTHING);
    totals.assign(count, 0.0f);
#if defined(__AMX_BF16__)
    queries.assign(padded(count, LANES) * head, 0);
    for (int64_t row = 0; row < count; row++)
      std::memcpy(queries.data() + row * head, rows[row].numbers, head * sizeof(typename Kind::Number));
#endif
  }

  // Takes over some of another's queries where that has come to. Tiles go over sixteen rows at once: so what one sequence
  // has is parted from the others' before anything is read that is its alone.
  void take(const Attending& other, int64_t first, int64_t past, int64_t head) {
    rows.assign(other.rows.begin() + first, other.rows.begin() + past);
    begin(head);
    std::copy(other.sums.begin() + first * head, other.sums.begin() + past * head, sums.begin());
    std::copy(other.maxima.begin() + first, other.maxima.begin() + past, maxima.begin());
    std::copy(other.totals.begin() + first, other.totals.begin() + past, totals.begin());
  }

  // The first key that a row sees.
  int64_t lowest(const AttentionShape& shape) const {
    int64_t position = rows[0].position;
    for (const auto& row : rows) position = std::min(position, row.position);
    return shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1) : 0;
  }

  int64_t past() const {
    int64_t past = 0;
    for (const auto& row : rows) past = std::max(past, row.position + 1);
    return past;
  }
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
// what the sums so far have to be multiplied. A key's scale is part of its score; a value's, of what multiplies it, and not
// of the likelihoods that are added up. TILES: CHUNK_TILES where there are so many, which then stay in registers; 0 else.
template <class Kind, int TILES>
static inline float weigh_some(const float* scores, const Chunk<Kind>& chunk, int some, int from, int to,
                               const AttentionShape& shape, float& maximum, float& total,
                               typename Kind::Number* likelihoods) {
  const int tiles = TILES ? TILES : some;
  V v[CHUNK_TILES];
  const V scale = splat(shape.scale);
  if (chunk.key_scales[0])
    for (int tile = 0; tile < tiles; tile++)
      v[tile] = mul(mul(load(scores + tile * LANES), load(chunk.key_scales[tile])), scale);
  else
    for (int tile = 0; tile < tiles; tile++) v[tile] = mul(load(scores + tile * LANES), scale);
  if (shape.softcap > 0)
    for (int tile = 0; tile < tiles; tile++)
      v[tile] = mul(tanh_of(div(v[tile], splat(shape.softcap))), splat(shape.softcap));
  if (from > 0 || to < tiles * LANES)
    for (int tile = 0; tile < tiles; tile++)
      v[tile] = lanes_within(v[tile], from - tile * LANES, to - tile * LANES, NOTHING);
  V most = v[0];
  for (int tile = 1; tile < tiles; tile++) most = larger(v[tile], most);
  const float before = maximum;
  maximum = std::max(before, highest(most));
  const V shift = splat(maximum);
  V sums = splat(0.0f);
  for (int tile = 0; tile < tiles; tile++) {
    const V weight = exp_of(sub(v[tile], shift));
    sums = add(sums, weight);
    const float* scales = chunk.value_scales[tile];
    Kind::store16(likelihoods + tile * LANES, scales ? mul(weight, load(scales)) : weight);
  }
  if (before == maximum) {
    total += sum(sums);
    return 1.0f;
  }
  const float keep = before == NOTHING ? 0.0f : lane0(exp_of(splat(before - maximum)));
  total = total * keep + sum(sums);
  return keep;
}

template <class Kind>
static inline float weigh_scores(const float* scores, const Chunk<Kind>& chunk, int tiles, int from, int to,
                                 const AttentionShape& shape, float& maximum, float& total,
                                 typename Kind::Number* likelihoods) {
  if (tiles == CHUNK_TILES)
    return weigh_some<Kind, CHUNK_TILES>(scores, chunk, tiles, from, to, shape, maximum, total, likelihoods);
  return weigh_some<Kind, 0>(scores, chunk, tiles, from, to, shape, maximum, total, likelihoods);
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

template <class Kind, int ROWS>
static void attend_rows(Attending<Kind>& all, const Chunk<Kind>& chunk, const AttentionShape& shape, int64_t begin,
                        int64_t index) {
  const typename Kind::Number* rows[ROWS];
  float* sums[ROWS];
  int64_t past = 0;
  for (int row = 0; row < ROWS; row++) {
    rows[row] = all.rows[index + row].numbers;
    sums[row] = all.sums.data() + (index + row) * shape.head;
    past = std::max(past, all.rows[index + row].position + 1);
  }
  const int keys = static_cast<int>(std::min<int64_t>(past - begin, CHUNK));
  if (keys <= 0) return;
  const int tiles = (keys + LANES - 1) / LANES;
  alignas(64) float scores[ROWS][CHUNK];
  alignas(64) typename Kind::Number likelihoods[ROWS][CHUNK];
  score<Kind, ROWS>(rows, chunk.keys, tiles, shape.head, scores);
  for (int row = 0; row < ROWS; row++) {
    const int64_t position = all.rows[index + row].position;
    const int64_t from = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1 - begin) : 0;
    const int64_t to = std::min<int64_t>(CHUNK, position + 1 - begin);
    if (from >= to) {
      std::memset(likelihoods[row], 0, sizeof likelihoods[row]);
      continue;
    }
    const float keep = weigh_scores(scores[row], chunk, tiles, static_cast<int>(from), static_cast<int>(to), shape,
                                    all.maxima[index + row], all.totals[index + row], likelihoods[row]);
    if (keep != 1.0f)
      for (int64_t d = 0; d < shape.head; d += LANES) store(sums[row] + d, mul(load(sums[row] + d), splat(keep)));
  }
  gather<Kind, ROWS>(likelihoods, chunk.values, tiles, shape.head, sums);
}

#if defined(__AMX_BF16__)
#include "tile_attention.h"
#endif

template <class Kind>
static void attend_chunk(Attending<Kind>& all, const int32_t* table, const Pages<Kind>& pages,
                         const AttentionShape& shape, int64_t kv_head, int64_t index) {
  static thread_local Buffer<typename Kind::Number> memory;
  const int64_t begin = index * CHUNK, rows = static_cast<int64_t>(all.rows.size());
  const int tiles = static_cast<int>((std::min<int64_t>(all.past() - begin, CHUNK) + LANES - 1) / LANES);
  const Chunk<Kind> chunk = pages.chunk(table, index, tiles, kv_head, memory);
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Kind, Bf16>) return attend_tiles(all, chunk, tiles, shape, begin);
#endif
  for (int64_t row = 0; row < rows; row += QUERIES) {
    switch (std::min<int64_t>(QUERIES, rows - row)) {
      case 4: attend_rows<Kind, 4>(all, chunk, shape, begin, row); break;
      case 3: attend_rows<Kind, 3>(all, chunk, shape, begin, row); break;
      case 2: attend_rows<Kind, 2>(all, chunk, shape, begin, row); break;
      default: attend_rows<Kind, 1>(all, chunk, shape, begin, row);
    }
  }
}

template <class Kind>
static void fetch_chunk(const int32_t* table, int64_t past, const Pages<Kind>& pages, int64_t kv_head, int64_t chunk) {
  for (int64_t tile = chunk * CHUNK_TILES; tile < (chunk + 1) * CHUNK_TILES && tile * LANES < past; tile++)
    pages.fetch(table, tile, kv_head);
}

// Some queries go on from one chunk of a table to before another, or to the last that they see.
template <class Kind>
static void go_on(Attending<Kind>& all, const int32_t* table, const Pages<Kind>& pages, const AttentionShape& shape,
                  int64_t kv_head, int64_t chunk, int64_t past_chunk) {
  const int64_t past = std::min(all.past(), past_chunk * CHUNK);
  chunk = std::max(chunk, all.lowest(shape) / CHUNK);
  if (chunk * CHUNK < past) fetch_chunk<Kind>(table, past, pages, kv_head, chunk);
  for (; chunk * CHUNK < past; chunk++) {
    fetch_chunk<Kind>(table, past, pages, kv_head, chunk + 1);
    attend_chunk<Kind>(all, table, pages, shape, kv_head, chunk);
  }
}

template <class Kind>
static void put_out(const Attending<Kind>& all, const AttentionShape& shape) {
  for (size_t row = 0; row < all.rows.size(); row++) {
    const V share = splat(1.0f / all.totals[row]);
    for (int64_t d = 0; d < shape.head; d += LANES)
      Kind::store16(all.rows[row].out + d, mul(load(all.sums.data() + row * shape.head + d), share));
  }
}

// Some positions of one sequence.
template <class Kind>
struct Reader {
  const typename Kind::Number* rows;  // [count][heads][head], of the first position
  typename Kind::Number* out;         // the same shape
  int64_t first;                      // position of the first
  int64_t count;
  int64_t stride;                     // of a position, in both
  const int32_t* table;
};

// Attention of all heads that share a key/value head. The tables of several readers are equal in their first `shared`
// chunks, which all have before them. Those are read once for all, with as many queries at once as there are: the more
// there are, the better tiles are filled. A query's numbers are the same as if it were alone: it goes through the same
// chunks in the same order.
template <class Kind>
static void attend(const Reader<Kind>* readers, int64_t count, int64_t shared, const Pages<Kind>& pages,
                   const AttentionShape& shape, int64_t kv_head) {
  static thread_local Attending<Kind> all, own;
  const int64_t group = shape.heads / shape.kv_heads;
  all.rows.clear();
  for (const Reader<Kind>* reader = readers; reader < readers + count; reader++)
    for (int64_t row = 0; row < reader->count * group; row++) {
      const int64_t place = row / group * reader->stride + (kv_head * group + row % group) * shape.head;
      all.rows.push_back({reader->rows + place, reader->out + place, reader->first + row / group});
    }
  all.begin(shape.head);
  go_on(all, readers->table, pages, shape, kv_head, 0, count == 1 ? INT32_MAX : shared);
  if (count == 1) return put_out(all, shape);
  int64_t first = 0;
  for (const Reader<Kind>* reader = readers; reader < readers + count; first += reader->count * group, reader++) {
    own.take(all, first, first + reader->count * group, shape.head);
    go_on(own, reader->table, pages, shape, kv_head, shared, INT32_MAX);
    put_out(own, shape);
  }
}
