// Memory that grows, aligned to what the processor reads at once, and zero at first.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>

#include "lanes.h"

template <class T>
class Buffer {
 public:
  ~Buffer() { std::free(memory_); }
  T* at_least(int64_t count) {
    if (count > size_) {
      std::free(memory_);
      const size_t bytes = padded(count * sizeof(T), 64);
      size_ = 0;
      memory_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (!memory_) throw std::bad_alloc();
      std::memset(memory_, 0, bytes);
      size_ = count;
    }
    return memory_;
  }

 private:
  T* memory_ = nullptr;
  int64_t size_ = 0;
};
