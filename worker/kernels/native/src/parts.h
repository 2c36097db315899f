// Which of a step's rows are written, and attended to, together.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "structures.h"

// Some rows of one sequence.
struct Part {
  int64_t sequence, first, past;
};

// Parts that one thread attends to together: of several, the first `shared` chunks are the same blocks.
struct Reading {
  std::vector<Part> parts;
  int64_t shared;
};

class Parts {
 public:
  std::vector<Part> writes;  // rows of a sequence that are in one block are written by one thread
  std::vector<Reading> readings;

  void cut(const Step& step, const Decoder& model) {
    writes.clear();
    readings.clear();
    single_.clear();
    const int64_t together = std::max<int64_t>(1, 64 * model.kv_heads / model.heads);
    for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
      const int64_t first = step.first_rows[sequence], past = step.first_rows[sequence + 1];
      for (int64_t row = first; row < past;) {
        const int64_t next = std::min(past, row + model.block_size - step.positions[row] % model.block_size);
        writes.push_back({sequence, row, next});
        row = next;
      }
      if (past - first == 1)
        single_.push_back({step.tables + step.table_starts[sequence], step.positions[first], {sequence, first, past}});
      else
        for (int64_t row = first; row < past; row += together)
          readings.push_back({{{sequence, row, std::min(past, row + together)}}, 0});
    }
    bundle(model);
    // The longest texts last would leave all but one thread without work at the end.
    std::stable_sort(readings.begin(), readings.end(), [&](const Reading& a, const Reading& b) {
      return work(step, a) > work(step, b);
    });
  }

 private:
  // A sequence that has one row, as those that are decoded have.
  struct Single {
    const int32_t* table;
    int64_t position;
    Part part;
  };

  // Those that begin with the same blocks come one after the other, and are bundled as long as most of what the first two
  // have in common is common to all. There are as many as fill a tile with the queries of one key/value head.
  void bundle(const Decoder& model) {
    const size_t most = std::max<int64_t>(1, LANES * model.kv_heads / model.heads);
    std::sort(single_.begin(), single_.end(), [&](const Single& a, const Single& b) {
      const int64_t same = same_blocks(a, b, model.block_size), in_a = a.position / model.block_size;
      const int64_t in_b = b.position / model.block_size;
      if (same < in_a && same < in_b) return a.table[same] < b.table[same];
      return in_a != in_b ? in_a < in_b : a.part.sequence < b.part.sequence;
    });
    const Single* head = nullptr;
    for (const Single& single : single_) {
      Reading* last = head ? &readings.back() : nullptr;
      const int64_t shared = head ? same_blocks(*head, single, model.block_size) * model.block_size / CHUNK : 0;
      if (shared == 0 || last->parts.size() == most || 2 * shared < last->shared) {
        readings.push_back({{single.part}, 0});
        head = &single;
      } else {
        last->shared = last->parts.size() == 1 ? shared : std::min(shared, last->shared);
        last->parts.push_back(single.part);
      }
    }
  }

  // Full blocks that two have in common, from the first on.
  static int64_t same_blocks(const Single& a, const Single& b, int64_t block_size) {
    const int64_t most = std::min(a.position, b.position) / block_size;
    return std::mismatch(a.table, a.table + most, b.table).first - a.table;
  }

  static int64_t work(const Step& step, const Reading& reading) {
    int64_t keys = reading.shared * CHUNK;
    for (const Part& part : reading.parts) keys += step.positions[part.past - 1] - reading.shared * CHUNK;
    return keys;
  }

  std::vector<Single> single_;
};
