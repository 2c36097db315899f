// Which of the levels that setup.py builds this processor, and its operating system, can run.
#pragma once
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline bool has_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// Tiles must be asked for, once per process: their state is larger than what a thread is given to keep.
static inline bool has_amx() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool found = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
  return found && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

static inline bool runs(const char* level) {
  __builtin_cpu_init();
  if (!std::strcmp(level, "portable")) return true;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(level, "avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(level, "avx512")) return avx512;
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512vnni") && has_bf16();
  if (!std::strcmp(level, "avx512_bf16")) return bf16;
  if (!std::strcmp(level, "amx")) return bf16 && has_amx();
  return false;
}
#else
static inline bool runs(const char* level) { return !std::strcmp(level, "portable"); }
#endif
