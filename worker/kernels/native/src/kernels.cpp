// What Python calls: plain C functions over memory that the caller owns. Built once per level, see setup.py.
#include "levels.h"
#include "logits.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Asked of the portable build only, which every processor can run.
EXPORT int runs_level(const char* level) { return runs(level); }

EXPORT void* team_new(int threads) { return new Team(threads); }
EXPORT void team_delete(void* team) { delete static_cast<Team*>(team); }

EXPORT void scan_logits(void* team, LogitScan* scan) {
  static_cast<Team*>(team)->each(scan->rows, scan_row, scan);
}

EXPORT void weigh_logits(void*, LogitWeights* given) { weigh(*given); }

EXPORT void copy_rows(void* team, RowCopy* copy) { static_cast<Team*>(team)->each(copy->rows, copy_row, copy); }
