// What a decoder is, and what a step is asked: mirrored by worker.model.decoder.native. Null: the model has none.
#pragma once
#include "weights.h"

enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };

struct Layer {
  const float* input_norm;
  Weight qkv;
  const float* q_norm;
  const float* k_norm;
  Weight output;
  const float* post_attention_norm;
  const float* mlp_norm;
  Weight gate_up;  // a unit is sixteen gates and the sixteen ups that they multiply
  Weight down;
  const float* post_mlp_norm;
  const float* cosines;  // [positions, rotary_dim / 2]; null: not rotated
  const float* sines;
  int64_t window;
  void* pages;
};

struct Decoder {
  int64_t is_float32;
  int64_t hidden, heads, kv_heads, head_dim, intermediate, rotary_dim;
  int64_t activation;
  float norm_eps, embed_scale, attention_scale, attention_softcap, logit_softcap;
  int32_t eight_bit_pages;  // 1: keys and values in eight bits, see pages.h; 0: of the kind of the weights
  int64_t block_size;
  const void* embedding;  // [vocab, hidden], not packed
  const Layer* layers;
  int64_t layer_count;
  const float* final_norm;
  Weight head;
};

struct Step {
  void* run;  // of run_new()
  const Decoder* decoder;
  int64_t rows;
  const int32_t* token_ids;  // [rows]
  const int32_t* positions;  // [rows]: within a sequence, each is one more than the one before
  int64_t sequences;
  const int64_t* first_rows;  // [sequences + 1]
  const int32_t* tables;      // of all sequences, one after the other
  const int64_t* table_starts;  // [sequences]
  int64_t wanted;
  const int64_t* wanted_rows;  // [wanted]: whose logits
  float* logits;               // [wanted, stride]
  int64_t logits_stride;
  uint8_t* damaged;  // [sequences]: set to 1 where a key or value is not finite
  int64_t* nanoseconds;  // [SECTIONS], see watch.h; null: not measured
  int64_t* readings;     // set to how many readings attention took in each layer, see parts.h; null: not told
};
