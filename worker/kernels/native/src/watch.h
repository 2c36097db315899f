// Where a step's time goes: nanoseconds of each of its sections, where somebody asked.
#pragma once
#include <chrono>
#include <cstdint>

// Mirrored by worker.model.decoder.native, in this order.
enum Section : int {
  PREPARE,    // memory, and cutting rows into pieces
  EMBED,
  NORM,       // all of the residual stream
  HALVE,      // rows for products of whole numbers
  QKV,
  WRITE,      // rotation and norms of heads, keys and values into pages
  ATTEND,
  OUTPUT,
  GATE_UP,
  DOWN,
  HEAD,
  SECTIONS
};

class Watch {
 public:
  // nanoseconds: [SECTIONS], added to; null: nobody asked.
  explicit Watch(int64_t* nanoseconds = nullptr) : nanoseconds_(nanoseconds), last_(nanoseconds ? now() : 0) {}

  // What has passed since the last section ended was this one.
  void ended(Section section) {
    if (!nanoseconds_) return;
    const int64_t time = now();
    nanoseconds_[section] += time - last_;
    last_ = time;
  }

 private:
  static int64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }

  int64_t* nanoseconds_;
  int64_t last_;
};
