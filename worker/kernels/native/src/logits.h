// A row of logits, cut into blocks of tokens: the highest logit of each, how likely each is, and the tokens at the top.
//
// All that is here depends on the row alone, bit for bit: maxima are exact, a block's weights are summed on their own
// in one order, and masses are whole units, whose sums are exact in float64 whichever way they are added up.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

constexpr int64_t TOKENS_PER_BLOCK = 64;
constexpr float IMPOSSIBLE = -__builtin_inff();  // the logit of what can't be chosen

struct Token {
  float logit;
  int32_t id;
};

static inline bool likelier(Token a, Token b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// What a thread works in, kept from row to row: fresh memory costs more than what is done in it.
struct Scratch {
  std::vector<float> changed, maxima, changed_maxima, ordered;
  std::vector<double> masses;
  std::vector<std::pair<float, double>> blocks;
  std::vector<Token> found;
};

static inline void sixty_four(const float* from, int64_t left, V out[4]) {
  for (int part = 0; part < 4; part++, left -= LANES) {
    const float* here = from + part * LANES;
    out[part] = left >= LANES ? load(here) : load_some(here, static_cast<int>(std::max<int64_t>(left, 0)), IMPOSSIBLE);
  }
}

static inline float block_maximum(const float* from, int64_t left) {
  V v[4];
  sixty_four(from, left, v);
  // larger() gives its second argument where one is NaN, so that a NaN could be lost: it is looked for by adding up.
  V any = add(add(sub(v[0], v[0]), sub(v[1], v[1])), add(sub(v[2], v[2]), sub(v[3], v[3])));
  float found = highest(larger(larger(v[0], v[1]), larger(v[2], v[3])));
  if (!any_nan(any)) return found;  // infinities are NaN here too
  for (V part : v)
    if (any_nan(part)) return __builtin_nanf("");
  return found;
}

class Row {
 public:
  // Goes over the row once. `maxima` is where those of the blocks are kept.
  Row(const float* logits, int64_t vocabulary, std::vector<float>& maxima)
      : logits(logits),
        vocabulary(vocabulary),
        blocks((vocabulary + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK),
        unit(std::ldexp(1.0, 53 - bit_length(blocks * TOKENS_PER_BLOCK))) {
    maxima.resize(blocks);
    bool nan = false;
    for (int64_t block = 0; block < blocks; block++) {
      const float found = maxima[block] = block_maximum(logits + block * TOKENS_PER_BLOCK, left_at(block));
      nan |= found != found;
      highest = found > highest ? found : highest;
    }
    if (nan) highest = __builtin_nanf("");
    this->maxima = maxima.data();
  }

  const float* logits;
  int64_t vocabulary;
  int64_t blocks;
  double unit;          // of a mass: the likeliest token has so many, and all together have less than 2^53
  const float* maxima;  // [blocks]; NaN where there is one
  float highest = IMPOSSIBLE;

  int64_t left_at(int64_t block) const { return vocabulary - block * TOKENS_PER_BLOCK; }

  int64_t likeliest() const {
    int64_t block = 0;
    while (maxima[block] != highest) block++;
    int64_t id = block * TOKENS_PER_BLOCK;
    while (logits[id] != highest) id++;
    return id;
  }

  // All tokens above an edge, the likeliest first; only the `most` likeliest of them.
  void above(float edge, int64_t most, std::vector<Token>& found) const {
    found.clear();
    for (int64_t block = 0; block < blocks; block++) {
      if (!(maxima[block] > edge)) continue;
      const int64_t first = block * TOKENS_PER_BLOCK, past = std::min(first + TOKENS_PER_BLOCK, vocabulary);
      for (int64_t id = first; id < past; id++)
        if (logits[id] > edge) found.push_back({logits[id], static_cast<int32_t>(id)});
    }
    if (static_cast<int64_t>(found.size()) > most) {
      std::nth_element(found.begin(), found.begin() + most, found.end(), likelier);
      found.resize(most);
    }
    std::sort(found.begin(), found.end(), likelier);
  }

  // An edge above which there probably are so many tokens: so many blocks have one each. Some more allow for equals, for
  // of those at an edge none is above it.
  float edge_by_count(int64_t count, Scratch& scratch) const {
    if (count > blocks) return IMPOSSIBLE;
    const int64_t place = blocks - (count + count / 4 + 8);
    if (place < 0) return IMPOSSIBLE;
    std::vector<float>& ordered = scratch.ordered;
    ordered.assign(maxima, maxima + blocks);
    std::nth_element(ordered.begin(), ordered.begin() + place, ordered.end());
    return ordered[place];
  }

 private:
  static int bit_length(int64_t number) {
    int bits = 0;
    for (; number; number >>= 1) bits++;
    return bits;
  }
};

// How likely a row's tokens are at a temperature: as a share of the likeliest's, and that in whole units.
class Odds {
 public:
  Odds(const Row& row, float temperature)
      : row(row), temperature(temperature), shift_(splat(row.highest)), divisor_(splat(temperature)) {}

  const Row& row;
  const float temperature;
  const double* masses = nullptr;  // [blocks], once they are summed
  double total = 0;

  // Of sixteen logits. At temperature 1 there is no division, which would change nothing and takes longer than all else.
  V weights(V logits) const {
    const V shifted = sub(logits, shift_);
    return exp_of(temperature == 1.0f ? shifted : div(shifted, divisor_));
  }

  double weight(float logit) const { return lane0(weights(splat(logit))); }
  double mass(float logit) const { return std::floor(weight(logit) * row.unit); }

  // Of one block's tokens, each by itself.
  void block_weights(int64_t block, float out[TOKENS_PER_BLOCK]) const {
    V v[4];
    sixty_four(row.logits + block * TOKENS_PER_BLOCK, row.left_at(block), v);
    for (int part = 0; part < 4; part++) store(out + part * LANES, weights(v[part]));
  }

  // Goes over the row, which mostly still is in the core's cache. `into` is where the masses are kept.
  void sum_up(std::vector<double>& into) {
    into.resize(row.blocks);
    total = 0;
    for (int64_t block = 0; block < row.blocks; block++) {
      V v[4];
      sixty_four(row.logits + block * TOKENS_PER_BLOCK, row.left_at(block), v);
      for (V& part : v) part = weights(part);
      const double weight = sum(add(add(v[0], v[1]), add(v[2], v[3])));
      total += into[block] = std::floor(weight * row.unit);
    }
    masses = into.data();
  }

  // An edge below which there probably is less than a share of the weight. Blocks whose maximum is below an edge show how
  // much of a block is; half of what may be left out is guessed to be, which in real logits is nearly always enough.
  float edge_by_share(double share, Scratch& scratch) const {
    auto& blocks = scratch.blocks;
    blocks.clear();
    for (int64_t block = 0; block < row.blocks; block++) blocks.emplace_back(row.maxima[block], masses[block]);
    std::sort(blocks.begin(), blocks.end());
    double below = 0;
    float edge = IMPOSSIBLE;
    for (int64_t rank = 0; rank < row.blocks; rank++) {
      below += blocks[rank].second;
      if (below * row.blocks / (rank + 1) > total * share * 0.5) break;
      edge = blocks[rank].first;
    }
    return edge;
  }

 private:
  V shift_, divisor_;
};
