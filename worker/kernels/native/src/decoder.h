// One step of a Llama-like decoder, from token ids to logits: every operation between is here.
//
// The residual stream and all that is added up are float32; what products take, and keys and values, are of the weights'
// kind (keys and values perhaps of eight bits). All operations go row by row, so a row's bits depend on its own tokens and
// positions only.
#pragma once
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "parts.h"
#include "products.h"
#include "structures.h"
#include "watch.h"

// Root mean square norm ("Root Mean Square Layer Normalization", Zhang and Sennrich, 2019) of `size` numbers.
static inline float norm_factor(const float* x, int64_t size, float eps) {
  V squares = splat(0.0f);
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) squares = madd(load(x + at), load(x + at), squares);
  if (at < size) {
    const V rest = load_some(x + at, static_cast<int>(size - at), 0.0f);
    squares = madd(rest, rest, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

// use(place, sixteen or fewer numbers, how many)
template <class Use>
static inline void normed(const float* x, const float* weight, int64_t size, float eps, const Use& use) {
  const V factor = splat(norm_factor(x, size, eps));
  for (int64_t at = 0; at < size; at += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, size - at));
    const V numbers = count == LANES ? load(x + at) : load_some(x + at, count, 0.0f);
    const V weights = count == LANES ? load(weight + at) : load_some(weight + at, count, 0.0f);
    use(at, mul(mul(numbers, factor), weights), count);
  }
}

// A sum of a product, with its bias.
static inline V biased(const Weight& weight, int64_t output, V v) {
  return weight.bias ? add(v, load(weight.bias + output)) : v;
}

static inline void put(float* to, V v, int64_t left) {
  if (left >= LANES)
    store(to, v);
  else if (left > 0)
    store_some(to, v, static_cast<int>(left));
}

static inline void add_to(float* to, V v, int64_t left) {
  if (left >= LANES)
    store(to, add(load(to), v));
  else if (left > 0)
    store_some(to, add(load_some(to, static_cast<int>(left), 0.0f), v), static_cast<int>(left));
}

template <class Kind>
class Run {
  using Number = typename Kind::Number;

 public:
  // Throws std::bad_alloc if there is no memory for it.
  void step(Team& team, const Step& step) {
    const Decoder& model = *step.decoder;
    watch_ = Watch(step.nanoseconds);
    head_ = padded(model.head_dim, HEAD_STEP);
    const int64_t rows = padded(step.rows, ROW_STEP);
    qkv_stride_ = padded((model.heads + 2 * model.kv_heads) * model.head_dim, LANES);
    normed_stride_ = padded(model.hidden, INPUT_STEP);
    heads_stride_ = padded(model.heads * head_, INPUT_STEP);
    inner_stride_ = padded(model.intermediate, INPUT_STEP);
    x_ = x_memory_.at_least(rows * model.hidden);
    more_ = more_memory_.at_least(rows * model.hidden);
    normed_ = normed_memory_.at_least(rows * normed_stride_);
    qkv_ = qkv_memory_.at_least(rows * qkv_stride_);
    queries_ = query_memory_.at_least(rows * heads_stride_);
    attended_ = attended_memory_.at_least(rows * heads_stride_);
    inner_ = inner_memory_.at_least(rows * inner_stride_);
    const int64_t widest = padded(std::max({model.hidden, heads_stride_, model.intermediate}), INT8_STEP);
    high_ = high_memory_.at_least(rows * widest);
    low_ = low_memory_.at_least(rows * widest);
    scales_ = scale_memory_.at_least(rows);
    parts_.cut(step, model);
    if (step.readings) *step.readings = static_cast<int64_t>(parts_.readings.size());
    watch_.ended(PREPARE);
    embed(team, step, model);
    watch_.ended(EMBED);
    for (int64_t layer = 0; layer < model.layer_count; layer++) run(team, step, model, model.layers[layer]);
    finish(team, step, model);
  }

 private:
  void embed(Team& team, const Step& step, const Decoder& model) {
    const Number* table = static_cast<const Number*>(model.embedding);
    each(team, (step.rows + 15) / 16, [&](int64_t piece) {
      for (int64_t row = piece * 16; row < std::min(step.rows, piece * 16 + 16); row++) {
        const Number* from = table + step.token_ids[row] * model.hidden;
        for (int64_t d = 0; d < model.hidden; d++) x_[row * model.hidden + d] = Kind::widened(from[d]) * model.embed_scale;
      }
    });
  }

  void norm(Team& team, int64_t rows, const Decoder& model, const float* weight) {
    each(team, (rows + 7) / 8, [&](int64_t piece) {
      for (int64_t row = piece * 8; row < std::min(rows, piece * 8 + 8); row++) {
        Number* out = normed_ + row * normed_stride_;
        normed(x_ + row * model.hidden, weight, model.hidden, model.norm_eps, [&](int64_t at, V v, int count) {
          alignas(64) Number sixteen[LANES];
          Kind::store16(sixteen, v);
          std::memcpy(out + at, sixteen, sizeof(Number) * count);
        });
      }
    });
    watch_.ended(NORM);
  }

  // The residual stream gets a product's results, by way of a norm if there is one.
  void add_product(Team& team, int64_t rows, const Decoder& model, const Number* from, int64_t stride,
                   const Weight& weight, const float* norm_weight, Section section) {
    float* to = norm_weight ? more_ : x_;
    times(team, from, stride, rows, weight, [&](int64_t unit, int64_t row, V low, V high) {
      const int64_t output = unit * UNIT, left = model.hidden - output;
      float* here = to + row * model.hidden + output;
      low = biased(weight, output, low);
      high = biased(weight, output + LANES, high);
      if (norm_weight) {
        put(here, low, left);
        put(here + LANES, high, left - LANES);
      } else {
        add_to(here, low, left);
        add_to(here + LANES, high, left - LANES);
      }
    });
    watch_.ended(section);
    if (!norm_weight) return;
    each(team, (rows + 7) / 8, [&](int64_t piece) {
      for (int64_t row = piece * 8; row < std::min(rows, piece * 8 + 8); row++)
        normed(more_ + row * model.hidden, norm_weight, model.hidden, model.norm_eps,
               [&](int64_t at, V v, int count) { add_to(x_ + row * model.hidden + at, v, count); });
    });
    watch_.ended(NORM);
  }

  // A product, in whole numbers where the weights are.
  template <class Use>
  void times(Team& team, const Number* rows, int64_t stride, int64_t count, const Weight& weight, const Use& use) {
    if (!weight.scales) return product<Kind>(team, rows, stride, count, weight, use);
    const HalvedRows halved{high_, low_, scales_, weight.inputs};
    each(team, (count + 7) / 8, [&](int64_t piece) {
      for (int64_t row = piece * 8; row < std::min(count, piece * 8 + 8); row++)
        halve_row<Kind>(rows + row * stride, std::min(stride, weight.inputs), halved, row);
    });
    watch_.ended(HALVE);
    whole_product(team, halved, count, weight, use);
  }

  void run(Team& team, const Step& step, const Decoder& model, const Layer& layer) {
    norm(team, step.rows, model, layer.input_norm);
    times(team, normed_, normed_stride_, step.rows, layer.qkv, [&](int64_t unit, int64_t row, V low, V high) {
      const int64_t output = unit * UNIT, left = qkv_stride_ - output;
      put(qkv_ + row * qkv_stride_ + output, biased(layer.qkv, output, low), left);
      put(qkv_ + row * qkv_stride_ + output + LANES, biased(layer.qkv, output + LANES, high), left - LANES);
    });
    watch_.ended(QKV);
    const Pages<Kind> pages{static_cast<char*>(layer.pages), model.block_size, model.kv_heads, head_,
                            model.eight_bit_pages != 0};
    each(team, parts_.writes.size(), [&](int64_t piece) {
      const Part& part = parts_.writes[piece];
      for (int64_t row = part.first; row < part.past; row++) place(step, model, layer, pages, part.sequence, row);
    });
    watch_.ended(WRITE);
    attend_all(team, step, model, layer, pages);
    watch_.ended(ATTEND);
    add_product(team, step.rows, model, attended_, heads_stride_, layer.output, layer.post_attention_norm, OUTPUT);
    norm(team, step.rows, model, layer.mlp_norm);
    multiply_gated(team, step.rows, model, layer.gate_up);
    watch_.ended(GATE_UP);
    add_product(team, step.rows, model, inner_, inner_stride_, layer.down, layer.post_mlp_norm, DOWN);
  }

  // Norms and rotates a row's queries and keys, and writes keys and values into its page.
  void place(const Step& step, const Decoder& model, const Layer& layer, const Pages<Kind>& pages, int64_t sequence,
             int64_t row) {
    alignas(64) float key[MOST_HEAD] = {}, value[MOST_HEAD] = {};
    const int64_t position = step.positions[row], size = model.head_dim;
    const int32_t* table = step.tables + step.table_starts[sequence];
    const float* from = qkv_ + row * qkv_stride_;
    for (int64_t head = 0; head < model.heads; head++, from += size) {
      turn(model, layer, position, from, layer.q_norm, key);
      Number* to = queries_ + row * heads_stride_ + head * head_;
      for (int64_t d = 0; d < head_; d += LANES) Kind::store16(to + d, load(key + d));
    }
    V finite = splat(0.0f);  // NaN if anything is not that pages of numbers would hold
    for (int64_t head = 0; head < model.kv_heads; head++, from += size) {
      turn(model, layer, position, from, layer.k_norm, key);
      const float* values = from + model.kv_heads * size;
      for (int64_t d = 0; d < size; d++) value[d] = values[d];
      for (int64_t d = 0; d < head_; d += LANES) {
        const V kept = Kind::kept(load(key + d)), other = Kind::kept(load(value + d));
        finite = add(finite, add(sub(kept, kept), sub(other, other)));
      }
      pages.write(table, position, head, key, value);
    }
    if (any_nan(finite)) step.damaged[sequence] = 1;
  }

  // Rotates a head ("RoFormer", Su et al., 2021), its first half against its second.
  void turn(const Decoder& model, const Layer& layer, int64_t position, const float* from, const float* weight,
            float* to) {
    const int64_t size = model.head_dim, half = model.rotary_dim / 2;
    if (weight)
      normed(from, weight, size, model.norm_eps, [&](int64_t at, V v, int count) { put(to + at, v, count); });
    else
      std::memcpy(to, from, sizeof(float) * size);
    if (!layer.cosines) return;
    const float *cosines = layer.cosines + position * half, *sines = layer.sines + position * half;
    for (int64_t d = 0; d < half; d++) {
      const float one = to[d], other = to[half + d];
      to[d] = one * cosines[d] - other * sines[d];
      to[half + d] = other * cosines[d] + one * sines[d];
    }
  }

  void attend_all(Team& team, const Step& step, const Decoder& model, const Layer& layer, const Pages<Kind>& pages) {
    const AttentionShape shape{model.heads, model.kv_heads,          head_,
                               model.attention_scale, model.attention_softcap, layer.window};
    each(team, parts_.readings.size() * model.kv_heads, [&](int64_t piece) {
      static thread_local std::vector<Reader<Kind>> readers;
      const Reading& reading = parts_.readings[piece / model.kv_heads];
      readers.clear();
      for (const Part& part : reading.parts)
        readers.push_back({queries_ + part.first * heads_stride_, attended_ + part.first * heads_stride_,
                           step.positions[part.first], part.past - part.first, heads_stride_,
                           step.tables + step.table_starts[part.sequence]});
      attend<Kind>(readers.data(), readers.size(), reading.shared, pages, shape, piece % model.kv_heads);
    });
  }

  void multiply_gated(Team& team, int64_t rows, const Decoder& model, const Weight& weight) {
    const V one = splat(1.0f), half = splat(0.5f), root = splat(0.7978845608028654f), cubic = splat(0.044715f);
    times(team, normed_, normed_stride_, rows, weight, [&](int64_t unit, int64_t row, V gate, V up) {
      gate = biased(weight, unit * UNIT, gate);
      up = biased(weight, unit * UNIT + LANES, up);
      V active;
      if (model.activation == SILU) {
        active = div(gate, add(one, exp_of(sub(splat(0.0f), gate))));
      } else {
        const V cube = mul(mul(gate, gate), gate);
        active = mul(mul(half, gate), add(one, tanh_of(mul(root, madd(cubic, cube, gate)))));
      }
      Kind::store16(inner_ + row * inner_stride_ + unit * LANES, mul(active, up));
    });
  }

  void finish(Team& team, const Step& step, const Decoder& model) {
    if (!step.wanted) return;
    for (int64_t index = 0; index < step.wanted; index++)  // rising, so none is overwritten before it is moved
      std::memmove(x_ + index * model.hidden, x_ + step.wanted_rows[index] * model.hidden, sizeof(float) * model.hidden);
    norm(team, step.wanted, model, model.final_norm);
    times(team, normed_, normed_stride_, step.wanted, model.head, [&](int64_t unit, int64_t row, V low, V high) {
      const int64_t output = unit * UNIT, left = model.head.outputs - output;
      float* to = step.logits + row * step.logits_stride + output;
      put(to, capped(model, biased(model.head, output, low)), left);
      put(to + LANES, capped(model, biased(model.head, output + LANES, high)), left - LANES);
    });
    watch_.ended(HEAD);
  }

  static V capped(const Decoder& model, V v) {
    if (model.logit_softcap <= 0) return v;
    return mul(tanh_of(div(v, splat(model.logit_softcap))), splat(model.logit_softcap));
  }

  Buffer<float> x_memory_, more_memory_, qkv_memory_, scale_memory_;
  Buffer<int8_t> high_memory_, low_memory_;
  Buffer<Number> normed_memory_, query_memory_, attended_memory_, inner_memory_;
  float *x_, *more_, *qkv_, *scales_;
  int8_t *high_, *low_;
  Number *normed_, *queries_, *attended_, *inner_;
  int64_t head_, qkv_stride_, normed_stride_, heads_stride_, inner_stride_;
  Parts parts_;
  Watch watch_;
};
