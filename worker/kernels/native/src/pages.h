// Keys and values over a block table, of one layer.
//
// A block holds, for each key/value head, its keys and then its values, in tiles of sixteen positions:
//
//     keys    [block_size / 16][head / PACK][16 positions][PACK]
//     values  [block_size / 16][head / 16][16 / PACK][16 numbers][PACK positions]
//
// so that both a query times the keys and the likelihoods times the values are products as in kinds.h. `head` is the
// size of a head, padded with zeros to a multiple of HEAD_STEP.
//
// Pages of eight bits hold whole numbers, -127 to 127, in the same order, and behind the values
//
//     scales  [2][block_size]  float32
//
// by which a position's key and its value are to be multiplied. That is not done to them, but to what becomes of them: to
// a key's score, and to the likelihood that multiplies a value. Whole numbers of eight bits are the same in all kinds, so
// nothing is lost but what was rounded when they were written.
#pragma once
#include "buffer.h"
#include "kinds.h"

constexpr int HEAD_STEP = 32;
constexpr int MOST_HEAD = 1024;
constexpr int CHUNK = 64;  // positions that are read together
constexpr int CHUNK_TILES = CHUNK / LANES;

// Tiles of a chunk as products take them. Scales: null where there are none.
template <class Kind>
struct Chunk {
  const typename Kind::Number *keys[CHUNK_TILES], *values[CHUNK_TILES];
  const float *key_scales[CHUNK_TILES], *value_scales[CHUNK_TILES];  // [16] each
};

constexpr float LEAST = 1e-30f;  // what is less counts as 0: its 127th part could be less than numbers go

// What numbers are divided by to be -127 to 127: 0 where all are 0 (or as good as), NaN where one is not finite.
static inline float scale_of(const float* numbers, int64_t count) {
  const V zero = splat(0.0f);
  V most = zero, finite = zero;
  for (int64_t at = 0; at < count; at += LANES) {
    const V v = load(numbers + at);
    most = larger(most, larger(v, sub(zero, v)));
    finite = add(finite, sub(v, v));
  }
  const float top = highest(most);
  return any_nan(finite) ? __builtin_nanf("") : top > LEAST ? top / 127.0f : 0.0f;
}

// Rounds to nearest, ties to even. Where a scale tells no more of them than that they are 0, or not finite, they are 0.
static inline void store_scaled(int8_t* to, V v, float scale) {
  alignas(64) float whole[LANES] = {};
  if (scale > 0) store(whole, rounded(div(v, splat(scale))));
  for (int lane = 0; lane < LANES; lane++) to[lane] = static_cast<int8_t>(whole[lane]);
}

template <class Kind>
struct Pages {
  using Number = typename Kind::Number;
  static constexpr int PACK = Kind::PACK;

  char* blocks;  // [blocks][kv_heads][bytes_of_head()]
  int64_t block_size;
  int64_t kv_heads;
  int64_t head;
  bool eight_bits;

  // Writes one position. A tile is written from its first position on, which makes its other values (or their scales)
  // zero: whole tiles can be read, and what has not been written yet counts nothing (but where a step that wrote NaN is
  // done again from the middle of a tile: then the NaN is the sequence's own).
  void write(const int32_t* table, int64_t position, int64_t kv_head, const float* key, const float* value) const {
    const Place to = place(table, position / LANES, kv_head);
    const int64_t lane = position % LANES;
    if (eight_bits) return write_scaled(to, lane, key, value);
    Number *keys = reinterpret_cast<Number*>(to.keys), *values = reinterpret_cast<Number*>(to.values);
    if (lane == 0) std::memset(values, 0, sizeof(Number) * LANES * head);
    alignas(64) Number some[2][LANES];
    for (int64_t d = 0; d < head; d += LANES) {
      Kind::store16(some[0], load(key + d));
      Kind::store16(some[1], load(value + d));
      spread(keys, values, d, lane, some[0], some[1]);
    }
  }

  // The first tiles of a chunk, for as long as `memory` is not used for others: that is where eight bits are unpacked.
  Chunk<Kind> chunk(const int32_t* table, int64_t index, int tiles, int64_t kv_head, Buffer<Number>& memory) const {
    Chunk<Kind> made{};
    Number* room = eight_bits ? memory.at_least(2 * CHUNK * head) : nullptr;
    for (int tile = 0; tile < tiles; tile++) {
      const Place at = place(table, index * CHUNK_TILES + tile, kv_head);
      made.keys[tile] = eight_bits ? unpacked(at.keys, room) : reinterpret_cast<const Number*>(at.keys);
      made.values[tile] = eight_bits ? unpacked(at.values, room) : reinterpret_cast<const Number*>(at.values);
      made.key_scales[tile] = at.key_scales;
      made.value_scales[tile] = at.value_scales;
    }
    return made;
  }

  // Asks for a tile before it is needed: blocks lie anywhere, so the processor can't guess.
  void fetch(const int32_t* table, int64_t tile, int64_t kv_head) const {
    const Place at = place(table, tile, kv_head);
    for (int64_t line = 0; line < LANES * head * size(); line += 64) {
      __builtin_prefetch(at.keys + line, 0, 2);
      __builtin_prefetch(at.values + line, 0, 2);
    }
    if (!eight_bits) return;
    __builtin_prefetch(at.key_scales, 0, 2);
    __builtin_prefetch(at.value_scales, 0, 2);
  }

 private:
  // Where sixteen positions lie.
  struct Place {
    char *keys, *values;
    float *key_scales, *value_scales;  // null: none
  };

  int64_t size() const { return eight_bits ? 1 : static_cast<int64_t>(sizeof(Number)); }
  int64_t bytes_of_head() const {
    return 2 * block_size * (head * size() + (eight_bits ? static_cast<int64_t>(sizeof(float)) : 0));
  }

  // Of those from position 16 * tile on.
  Place place(const int32_t* table, int64_t tile, int64_t kv_head) const {
    const int64_t per_block = block_size / LANES, slot = tile % per_block * LANES;
    char* start = blocks + (table[tile / per_block] * kv_heads + kv_head) * bytes_of_head();
    char *values = start + block_size * head * size(), *scales = values + block_size * head * size();
    Place at{start + slot * head * size(), values + slot * head * size(), nullptr, nullptr};
    if (eight_bits) {
      at.key_scales = reinterpret_cast<float*>(scales) + slot;
      at.value_scales = at.key_scales + block_size;
    }
    return at;
  }

  // Whatever a scale multiplies is finite, so that zero scales are enough for what has not been written.
  void write_scaled(const Place& to, int64_t lane, const float* key, const float* value) const {
    if (lane == 0) {
      std::memset(to.key_scales, 0, sizeof(float) * LANES);
      std::memset(to.value_scales, 0, sizeof(float) * LANES);
    }
    to.key_scales[lane] = scale_of(key, head);
    to.value_scales[lane] = scale_of(value, head);
    int8_t *keys = reinterpret_cast<int8_t*>(to.keys), *values = reinterpret_cast<int8_t*>(to.values);
    int8_t some[2][LANES];
    for (int64_t d = 0; d < head; d += LANES) {
      store_scaled(some[0], load(key + d), to.key_scales[lane]);
      store_scaled(some[1], load(value + d), to.value_scales[lane]);
      spread(keys, values, d, lane, some[0], some[1]);
    }
  }

  // Puts sixteen numbers of a key and of a value, those from d on, where they belong in their tiles.
  template <class T>
  static void spread(T* keys, T* values, int64_t d, int64_t lane, const T* key, const T* value) {
    for (int64_t pack = 0; pack < LANES / PACK; pack++)
      std::memcpy(keys + (d / PACK + pack) * LANES * PACK + lane * PACK, key + pack * PACK, sizeof(T) * PACK);
    T* to = values + d * LANES + lane / PACK * LANES * PACK + lane % PACK;
    for (int64_t number = 0; number < LANES; number++) to[number * PACK] = value[number];
  }

  // A tile of eight bits, in the first free of `room`.
  const Number* unpacked(const char* tile, Number*& room) const {
    const int8_t* from = reinterpret_cast<const int8_t*>(tile);
    Number* to = room;
    room += LANES * head;
    for (const int8_t* past = from + LANES * head; from < past; from += LANES, to += LANES)
      Kind::store_same16(to, load_int8(from));
    return room - LANES * head;
  }
};
