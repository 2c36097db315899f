// Weights of one product, packed for it.
#pragma once
#include <cstdint>

constexpr int UNIT = 32;        // outputs that are computed together: two times sixteen
constexpr int INPUT_STEP = 32;  // inputs are padded with zeros to a multiple of this
constexpr int ROW_STEP = 32;    // memory of rows is there, with anything in it, up to a multiple of this

struct Weight {
  const void* packed;          // [units][inputs / PACK][2][16][PACK]
  const float* bias;           // [units * UNIT], or null
  const float* scales;         // [units * UNIT], of outputs in eight bits; null: of the model's kind
  const int32_t* corrections;  // [units * UNIT]: -128 times the sum of an output's weights; or null
  int64_t inputs;              // padded
  int64_t outputs;             // not padded
};
