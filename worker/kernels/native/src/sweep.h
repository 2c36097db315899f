// Reads memory and does nothing with it: what a machine can read in a second is the ceiling of most kernels here.
#pragma once
#include "lanes.h"
#include "threads.h"

struct Sweep {
  const float* numbers;  // [pieces, piece]
  int64_t pieces;
  int64_t piece;  // a multiple of 64
  float* sums;    // [pieces]: the work can't be left out, since it is told
};

static void sweep_piece(void* context, int64_t index) {
  const Sweep& sweep = *static_cast<const Sweep*>(context);
  const float* from = sweep.numbers + index * sweep.piece;
  V sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  for (int64_t at = 0; at < sweep.piece; at += 4 * LANES)
    for (int part = 0; part < 4; part++) sums[part] = add(sums[part], load(from + at + part * LANES));
  sweep.sums[index] = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}
