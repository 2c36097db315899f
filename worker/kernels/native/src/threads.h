// A team of threads that take pieces of work from one counter, and wait without starving whoever else needs the cores.
//
// A piece's result does not depend on who computes it, so pieces go to whoever is free: a thread that lost its core to
// another process delays the one piece that it holds, not a fixed share of all. Waiting is a short spin, since the next
// work mostly follows within microseconds, and then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#define OCTAVO_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define OCTAVO_PAUSE() asm volatile("yield")
#else
#define OCTAVO_PAUSE() ((void)0)
#endif

// While one lives, its thread takes what is denormal for zero, as products of bfloat16 do: what is added to a sum in vain
// then never changes it.
class NoDenormals {
 public:
#if defined(__x86_64__)
  NoDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~NoDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#else
  NoDenormals() {}
  ~NoDenormals() {}
#endif
};

class Team {
 public:
  // Of fewer threads, where the system gives no more; see size().
  explicit Team(int threads) {
    others_.reserve(threads);
    try {
      for (int index = 1; index < threads; index++) others_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
    }
  }

  ~Team() {
    stopping_.store(true);
    open();
    for (std::thread& other : others_) other.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(others_.size()) + 1; }

  // Calls work(context, piece) for each piece below `pieces`, from all threads, and returns when all are done. Throws
  // std::bad_alloc if one of them did.
  void each(int64_t pieces, void (*work)(void*, int64_t), void* context) {
    if (pieces <= 1 || others_.empty()) {
      for (int64_t piece = 0; piece < pieces; piece++) work(context, piece);
      return;
    }
    work_ = work;
    context_ = context;
    pieces_ = pieces;
    next_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
    open();
    take();
    const uint32_t entered = static_cast<uint32_t>(gate_.fetch_and(~OPEN, std::memory_order_seq_cst)) & COUNT;
    wait([this, entered] { return left_.load(std::memory_order_seq_cst) == entered; }, done_);
    if (short_of_memory_.exchange(false)) throw std::bad_alloc();
  }

 private:
  static constexpr int SPINS = 2000;  // some tens of microseconds

  // Someone who sleeps has said so under the lock before looking a last time, so that no news is missed.
  struct Sleepers {
    std::condition_variable changed;
    std::atomic<int> count{0};
  };

  // The gate: round << 32 | OPEN | how many have entered. Who comes when all pieces are taken finds it closed and is not
  // waited for: a thread that sleeps, or has no core yet, holds nobody up.
  static constexpr uint64_t OPEN = 1u << 31;
  static constexpr uint32_t COUNT = OPEN - 1;

  void open() {
    gate_.store(((gate_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | OPEN, std::memory_order_seq_cst);
    wake(started_);
  }

  void wake(Sleepers& sleepers) {
    if (sleepers.count.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> guard(lock_);
    sleepers.changed.notify_all();
  }

  template <typename Condition>
  void wait(Condition holds, Sleepers& sleepers) {
    for (int spin = 0; spin < SPINS; spin++) {
      if (holds()) return;
      OCTAVO_PAUSE();
    }
    std::unique_lock<std::mutex> guard(lock_);
    sleepers.count.fetch_add(1, std::memory_order_seq_cst);
    while (!holds()) sleepers.changed.wait(guard);
    sleepers.count.fetch_sub(1, std::memory_order_seq_cst);
  }

  void take() {
    for (;;) {
      int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces_) return;
      try {
        work_(context_, piece);
      } catch (const std::bad_alloc&) {
        short_of_memory_.store(true);
      }
    }
  }

  void serve() {
    const NoDenormals flushed;
    for (uint64_t seen = 0;;) {
      wait([this, seen] { return gate_.load(std::memory_order_seq_cst) >> 32 != seen; }, started_);
      uint64_t gate = gate_.load(std::memory_order_seq_cst);
      seen = gate >> 32;
      if (stopping_.load()) return;  // after the gate: it is told before the last round begins
      while ((gate & OPEN) && gate >> 32 == seen && !gate_.compare_exchange_weak(gate, gate + 1)) continue;
      if (!(gate & OPEN) || gate >> 32 != seen) continue;
      take();
      left_.fetch_add(1, std::memory_order_seq_cst);
      wake(done_);
    }
  }

  std::vector<std::thread> others_;
  std::mutex lock_;
  Sleepers started_, done_;
  std::atomic<uint64_t> gate_{0};
  std::atomic<uint32_t> left_{0};
  std::atomic<bool> stopping_{false}, short_of_memory_{false};
  std::atomic<int64_t> next_{0};
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t pieces_ = 0;
};

// work(piece) for each piece below `pieces`, from all threads of the team.
template <typename Work>
static void each(Team& team, int64_t pieces, const Work& work) {
  team.each(pieces, [](void* context, int64_t piece) { (*static_cast<const Work*>(context))(piece); },
            const_cast<Work*>(&work));
}
