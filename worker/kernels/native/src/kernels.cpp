// What Python calls: plain C functions over memory that the caller owns. Built once per level, see setup.py.
#include "decoder.h"
#include "levels.h"
#include "sampling.h"
#include "sweep.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// What this was built from, see setup.py. An older build would take other structures.
EXPORT const char* built_from() { return OCTAVO_SOURCES; }

// Asked of the portable build only, which every processor can run.
EXPORT int runs_level(const char* level) { return runs(level); }

// These return null if there is no memory for it.
EXPORT void* team_new(int threads) { return new (std::nothrow) Team(threads); }
EXPORT int team_size(void* team) { return static_cast<Team*>(team)->size(); }
EXPORT void team_delete(void* team) { delete static_cast<Team*>(team); }

// The kernels: a team, and what is to be done. They return 0, or 1 if there is no memory for it.
template <typename Work>
static int run(const Work& work) {
  const NoDenormals flushed;
  try {
    work();
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

EXPORT int sample(void* team, Sampling* sampling) {
  return run([&] { static_cast<Team*>(team)->each(sampling->count, sample_piece, sampling); });
}

// For measurements.
EXPORT int sweep(void* team, Sweep* sweep) {
  return run([&] { static_cast<Team*>(team)->each(sweep->pieces, sweep_piece, sweep); });
}

// What a decoder's steps work in, kept from step to step.
struct Runs {
  Run<Bf16> bf16;
  Run<F32> f32;
};

EXPORT void* run_new() { return new (std::nothrow) Runs; }
EXPORT void run_delete(void* run) { delete static_cast<Runs*>(run); }

EXPORT int decode(void* team, Step* step) {
  return run([&] {
    Runs& runs = *static_cast<Runs*>(step->run);
    Team& threads = *static_cast<Team*>(team);
    if (step->decoder->is_float32)
      runs.f32.step(threads, *step);
    else
      runs.bf16.step(threads, *step);
  });
}
