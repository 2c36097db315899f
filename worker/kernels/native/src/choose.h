// Choosing one token of a row. The rules are those of worker.sampling.choose, to the bit.
#pragma once
#include "logits.h"

constexpr double BELOW_ONE = 1 - 0x1p-53;
constexpr int TRIES = 4;            // how often a token is drawn from all before the distribution is cut
constexpr double ABOUT = 1 + 1e-5;  // by how much the mass of a block may be less than its tokens', from rounding
constexpr double LARGE_SHARE = 0.5;  // from which top_p on tokens are drawn from all until one is within it

// What is kept of a distribution, see worker.params.
struct Restriction {
  int64_t top_k;  // 0 where it is off
  double top_p;
  double min_p;

  bool none() const { return top_k == 0 && top_p == 1 && min_p == 0; }
  // Where top_p is a share of all, and not of what top_k leaves.
  bool of_all() const { return top_k == 0 && top_p < 1; }
};

// Inverts the cumulative distribution over all tokens, in order of their ids: first the block, then the token. A random
// number's share of the last running total is below it, even rounded; what has no weight doesn't raise the total, and is
// never first above anything.
static int64_t from_all(const Odds& odds, double uniform) {
  const double target = uniform * odds.total;
  int64_t block = 0;
  double up_to = odds.masses[0];
  while (up_to <= target) up_to += odds.masses[++block];
  const double mass = odds.masses[block];
  const double share = std::min((target - (up_to - mass)) / mass, BELOW_ONE);
  float weights[TOKENS_PER_BLOCK];
  odds.block_weights(block, weights);
  double all = 0;
  for (float weight : weights) all += weight;
  const double inside = share * all;
  int64_t token = 0;
  for (double running = weights[0]; running <= inside; running += weights[++token]) continue;
  return block * TOKENS_PER_BLOCK + token;
}

// The mass of all that is likelier than a token.
static double mass_before(const Odds& odds, int64_t token) {
  const Row& row = odds.row;
  const float logit = row.logits[token];
  double before = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    if (row.maxima[block] < logit) continue;
    float weights[TOKENS_PER_BLOCK];
    odds.block_weights(block, weights);
    const int64_t first = block * TOKENS_PER_BLOCK, past = std::min(first + TOKENS_PER_BLOCK, row.vocabulary);
    for (int64_t id = first; id < past; id++)
      if (row.logits[id] > logit || (row.logits[id] == logit && id < token))
        before += std::floor(static_cast<double>(weights[id - first]) * row.unit);
  }
  return before;
}

// Whether one token is: top_p keeps those that have less than its share before them. top_k must be off.
static bool is_kept(const Odds& odds, const Restriction& keep, int64_t token) {
  const Row& row = odds.row;
  const float logit = row.logits[token];
  if (odds.mass(logit) < keep.min_p * row.unit) return false;
  // Blocks that have nothing as likely don't count. Mostly all of the others' mass is still within the share.
  double at_most = 0;
  for (int64_t block = 0; block < row.blocks; block++)
    if (row.maxima[block] >= logit) at_most += odds.masses[block];
  const double limit = keep.top_p * odds.total;
  return at_most * ABOUT < limit || mass_before(odds, token) < limit;
}

// Above which of the logits all is that is kept, probably.
static float guessed_edge(const Odds& odds, const Restriction& keep, Scratch& scratch) {
  float edge = IMPOSSIBLE;
  if (keep.top_k) edge = odds.row.edge_by_count(keep.top_k, scratch);
  if (keep.of_all()) edge = odds.edge_by_share(1 - keep.top_p, scratch);
  if (keep.min_p > 0 && (keep.top_k == 0 || keep.top_p == 1)) {
    const double least = odds.row.highest + (std::log(keep.min_p) - 1e-5) * odds.temperature;
    edge = std::max(edge, static_cast<float>(std::max(least, -static_cast<double>(__FLT_MAX__))));
  }
  return edge;
}

// What of the tokens above an edge is kept: so many, of this mass. `enough`: nothing else is.
struct Kept {
  size_t count;
  double mass;
  bool enough;
};

// That is known if what was found reaches beyond the edge of any one restriction; but top_p's isn't known before top_k's,
// for it is a share of what that leaves.
static Kept kept_of(const std::vector<Token>& found, float edge, const Odds& odds, const Restriction& keep) {
  double all = 0;
  for (const Token& token : found) all += odds.mass(token.logit);
  const double least = keep.min_p * odds.row.unit;
  const double limit = keep.top_p < 1 ? keep.top_p * (keep.top_k ? all : odds.total) : __builtin_inf();
  Kept kept = {0, 0, false};
  for (; kept.count < found.size() && kept.mass < limit; kept.count++) {
    const double mass = odds.mass(found[kept.count].logit);
    if (mass < least) break;
    kept.mass += mass;
  }
  // The likeliest token is always kept. An edge that is as high was no use.
  const bool beyond = keep.top_k ? static_cast<int64_t>(found.size()) == keep.top_k : all >= limit;
  const bool below = !(keep.top_k && keep.top_p < 1) && odds.weight(edge) * odds.row.unit < least;
  kept.enough = edge == IMPOSSIBLE || (kept.count > 0 && (beyond || below));
  return kept;
}

// Inverts the cumulative distribution over what the restrictions leave, in order of likelihood.
static int64_t from_likeliest(const Odds& odds, const Restriction& keep, double uniform, Scratch& scratch) {
  const int64_t most = keep.top_k ? keep.top_k : odds.row.vocabulary;
  float edge = guessed_edge(odds, keep, scratch);
  odds.row.above(edge, most, scratch.found);
  Kept kept = kept_of(scratch.found, edge, odds, keep);
  if (!kept.enough) {
    odds.row.above(IMPOSSIBLE, most, scratch.found);
    kept = kept_of(scratch.found, IMPOSSIBLE, odds, keep);
  }
  const double target = std::floor(uniform * kept.mass);
  size_t place = 0;
  for (double up_to = odds.mass(scratch.found[0].logit); up_to <= target && place + 1 < kept.count;)
    up_to += odds.mass(scratch.found[++place].logit);
  return scratch.found[place].id;
}

// Draws from all, until what is drawn is among what top_p and min_p keep; top_k must be off. For shares that aren't small
// that takes few tries, and to see whether one token is kept is far less work than to find all that are.
template <typename Uniform>
static int64_t from_nucleus(const Odds& odds, const Restriction& keep, const Uniform& uniform, Scratch& scratch) {
  for (int attempt = 0; attempt < TRIES; attempt++) {
    const int64_t token = from_all(odds, uniform(attempt));
    if (is_kept(odds, keep, token)) return token;
  }
  return from_likeliest(odds, keep, uniform(TRIES), scratch);
}

// `uniform(index)` are the random numbers for this token.
template <typename Uniform>
static int64_t random_token(const Row& row, float temperature, const Restriction& keep, const Uniform& uniform,
                            Scratch& scratch) {
  Odds odds(row, temperature);
  if (keep.of_all() || keep.none()) odds.sum_up(scratch.masses);
  if (keep.none()) return from_all(odds, uniform(0));
  if (keep.of_all() && keep.top_p >= LARGE_SHARE) return from_nucleus(odds, keep, uniform, scratch);
  return from_likeliest(odds, keep, uniform(0), scratch);
}
