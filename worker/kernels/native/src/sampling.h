// The next token of some rows of logits, and what is told of it: all that worker.sampling.native asks for in one call.
#pragma once
#include "choose.h"
#include "philox.h"
#include "threads.h"

// One token that is wanted. Laid out as worker.sampling.native packs it: every field has eight bytes.
struct Pick {
  int64_t row;
  int64_t token;  // one that is given, whose log-probability is wanted; -1: it is to be drawn
  int64_t tops;   // how many of the likeliest are told beside the log-probability; -1: neither is
  int64_t top_start;
  uint64_t seed;
  int64_t choice, position;
  double temperature;  // 0: the likeliest
  int64_t top_k;       // 0, or as many as there are: off
  double top_p, min_p;
  double repetition, presence, frequency;
  int64_t biases;
  const int64_t* biased;
  const double* bias;
  int64_t seen;  // tokens in the prompt or the output, where there are penalties
  const int64_t* seen_ids;
  const int64_t* seen_counts;  // how often the output has each
  int64_t bans;
  const int64_t* banned;
  const uint32_t* allowed;  // a bit for each token of the vocabulary, the lowest of a word first; none: all are
};

enum Outcome : int64_t { FINE = 0, NOT_FINITE = 1, NOTHING_LEFT = 2 };

struct Sampling {
  const float* logits;
  int64_t stride;
  int64_t vocabulary;
  int64_t count;
  const Pick* picks;     // [count]
  int64_t* tokens;       // [count], where the outcome is fine
  int64_t* outcomes;     // [count]
  float* logprobs;       // [count], where wanted
  int64_t* top_counts;   // [count], where wanted: tokens that can't be chosen are never told
  int64_t* top_ids;      // each pick's from its top_start on
  float* top_logprobs;
};

// What float32 has between its infinities: neither a bias nor a penalty makes a token impossible or certain.
static inline float fitting(float old, double changed) {
  const double most = __FLT_MAX__;
  return old == IMPOSSIBLE ? old : static_cast<float>(std::max(-most, std::min(most, changed)));
}

// Bias, then penalties, then what can't be chosen, as in worker.sampling.adjust. Tokens that the vocabulary doesn't
// have are passed over.
static void change(float* logits, int64_t vocabulary, const Pick& pick) {
  const auto is_token = [vocabulary](int64_t id) { return id >= 0 && id < vocabulary; };
  for (int64_t at = 0; at < pick.biases; at++) {
    const int64_t id = pick.biased[at];
    if (is_token(id)) logits[id] = fitting(logits[id], logits[id] + pick.bias[at]);
  }
  for (int64_t at = 0; at < pick.seen; at++) {
    const int64_t id = pick.seen_ids[at], count = pick.seen_counts[at];
    if (!is_token(id)) continue;
    const double old = logits[id];
    const double repeated = old > 0 ? old / pick.repetition : old * pick.repetition;
    logits[id] = fitting(logits[id], repeated - (pick.frequency * count + (count > 0 ? pick.presence : 0.0)));
  }
  for (int64_t at = 0; at < pick.bans; at++)
    if (is_token(pick.banned[at])) logits[pick.banned[at]] = IMPOSSIBLE;
  if (!pick.allowed) return;
  for (int64_t start = 0; start < vocabulary; start += 32) {
    const uint32_t word = pick.allowed[start / 32];
    const int64_t end = std::min<int64_t>(start + 32, vocabulary);
    if (word == 0) std::fill(logits + start, logits + end, IMPOSSIBLE);
    else if (word != UINT32_MAX)
      for (int64_t id = start; id < end; id++)
        if (!(word >> (id - start) & 1)) logits[id] = IMPOSSIBLE;
  }
}

static int64_t drawn_token(const Row& row, const Pick& pick, Scratch& scratch) {
  if (pick.temperature == 0) return row.likeliest();
  const Restriction keep = {pick.top_k < row.vocabulary ? pick.top_k : 0, pick.top_p, pick.min_p};
  const auto uniform = [&pick](int index) {
    return uniform_number(pick.seed, pick.position, pick.choice, static_cast<uint32_t>(index));
  };
  const double most = __FLT_MAX__;
  return random_token(row, static_cast<float>(std::min(pick.temperature, most)), keep, uniform, scratch);
}

// Of the model's own logits.
static void tell(const Sampling& sampling, int64_t index, const Row& row, Scratch& scratch) {
  const Pick& pick = sampling.picks[index];
  Odds odds(row, 1.0f);
  odds.sum_up(scratch.masses);
  const double entropy = std::log(odds.total / row.unit);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(row.highest) - entropy);
  };
  sampling.logprobs[index] = logprob(row.logits[sampling.tokens[index]]);
  int64_t& count = sampling.top_counts[index] = 0;
  if (pick.tops == 0) return;
  const float edge = row.edge_by_count(pick.tops, scratch);
  row.above(edge, pick.tops, scratch.found);
  if (edge != IMPOSSIBLE && static_cast<int64_t>(scratch.found.size()) < pick.tops)
    row.above(IMPOSSIBLE, pick.tops, scratch.found);
  for (const Token& token : scratch.found) {
    sampling.top_ids[pick.top_start + count] = token.id;
    sampling.top_logprobs[pick.top_start + count++] = logprob(token.logit);
  }
}

static Outcome sample_one(const Sampling& sampling, int64_t index, Scratch& scratch) {
  const Pick& pick = sampling.picks[index];
  const float* logits = sampling.logits + pick.row * sampling.stride;
  const Row row(logits, sampling.vocabulary, scratch.maxima);
  if (!std::isfinite(row.highest)) return NOT_FINITE;
  if (pick.token >= 0) {
    sampling.tokens[index] = pick.token;
  } else if (pick.biases || pick.seen || pick.bans || pick.allowed) {
    scratch.changed.assign(logits, logits + sampling.vocabulary);
    change(scratch.changed.data(), sampling.vocabulary, pick);
    const Row changed(scratch.changed.data(), sampling.vocabulary, scratch.changed_maxima);
    if (!std::isfinite(changed.highest)) return NOTHING_LEFT;
    sampling.tokens[index] = drawn_token(changed, pick, scratch);
  } else {
    sampling.tokens[index] = drawn_token(row, pick, scratch);
  }
  if (pick.tops >= 0) tell(sampling, index, row, scratch);
  return FINE;
}

static void sample_piece(void* context, int64_t index) {
  static thread_local Scratch scratch;
  const Sampling& sampling = *static_cast<const Sampling*>(context);
  sampling.outcomes[index] = sample_one(sampling, index, scratch);
}
