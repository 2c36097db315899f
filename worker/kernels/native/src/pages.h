// Keys and values over a block table, of one layer.
//
// A block holds, for each key/value head, its keys and then its values, in tiles of sixteen positions:
//
//     keys    [block_size / 16][head / PACK][16 positions][PACK]
//     values  [block_size / 16][head / 16][16 / PACK][16 numbers][PACK positions]
//
// so that both a query times the keys and the likelihoods times the values are products as in kinds.h. `head` is the
// size of a head, padded with zeros to a multiple of HEAD_STEP.
#pragma once
#include "kinds.h"

constexpr int HEAD_STEP = 32;
constexpr int MOST_HEAD = 1024;

template <class Kind>
struct Pages {
  using Number = typename Kind::Number;
  Number* blocks;  // [blocks][kv_heads][2][block_size * head]
  int64_t block_size;
  int64_t kv_heads;
  int64_t head;

  Number* keys_of(int64_t block, int64_t kv_head) const {
    return blocks + (block * kv_heads + kv_head) * 2 * block_size * head;
  }
  // Of sixteen positions, the first of which is 16 * tile.
  const Number* key_tile(const int32_t* table, int64_t tile, int64_t kv_head) const {
    const int64_t per_block = block_size / LANES;
    return keys_of(table[tile / per_block], kv_head) + tile % per_block * LANES * head;
  }
  const Number* value_tile(const int32_t* table, int64_t tile, int64_t kv_head) const {
    return key_tile(table, tile, kv_head) + block_size * head;
  }

  // Writes one position. A tile is written from its first position on, which makes its other values zero: whole tiles
  // can be read, and what has not been written yet counts nothing (but where a step that wrote NaN is done again from the
  // middle of a tile: then the NaN is the sequence's own).
  void write(const int32_t* table, int64_t position, int64_t kv_head, const float* key, const float* value) const {
    constexpr int PACK = Kind::PACK;
    const int64_t slot = position % block_size, lane = slot % LANES;
    Number* keys = keys_of(table[position / block_size], kv_head) + slot / LANES * LANES * head;
    Number* values = keys + block_size * head;
    if (lane == 0) std::memset(values, 0, sizeof(Number) * LANES * head);
    alignas(64) Number some[2][LANES];
    for (int64_t d = 0; d < head; d += LANES) {
      Kind::store16(some[0], load(key + d));
      Kind::store16(some[1], load(value + d));
      for (int64_t pack = 0; pack < LANES / PACK; pack++)
        std::memcpy(keys + (d / PACK + pack) * LANES * PACK + lane * PACK, some[0] + pack * PACK, sizeof(Number) * PACK);
      Number* place = values + d * LANES + lane / PACK * LANES * PACK + lane % PACK;
      for (int64_t number = 0; number < LANES; number++) place[number * PACK] = some[1][number];
    }
  }
};
