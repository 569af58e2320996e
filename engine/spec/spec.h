// The architecture of a model as plain data. Loaders fill it, Validate() accepts or rejects it,
// and the model is built from it. Names and meanings are those of the native checkpoint format
// (model_loaders/README.md). The models of the four papers (X-MoE, MH-MoE, MoA, HMoE) are settings
// of these structures.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/spec/block.h"
#include "engine/spec/head.h"
#include "kernels/base/relative_bias.h"
#include "kernels/kv_cache_storage.h"
#include "kernels/state_storage.h"

namespace moeserve {

// A decoder generates texts; its tokens attend to earlier ones only. An encoder computes a text as
// a whole, in one step, and keeps nothing of it. With both, the decoder also attends to what the
// encoder computes of another text, the source.
enum class ModelKind : uint8_t { kDecoder, kEncoder, kEncoderDecoder };
constexpr NameTraits Traits(ModelKind k) {
  return NameIn({"routed_decoder", "routed_encoder", "routed_encoder_decoder"}, k);
}

// An input that each layer has for each token, beside the stream (Gemma 3n, Gemma 4 E2B and E4B).
// Of the embedding h of a token, the inputs of all layers together are
//   scale * (token_scale * a row of a table + norm(projection_scale * W h)),
// where the norm is an RMS norm of each layer's part. At its end, before layer_scale, a layer adds
// norm(W2 (act(W1 x) * input)) to the stream x.
struct LayerInputSpec {
  int width = 1;                                          // of the input of one layer
  ActivationKind activation = ActivationKind::kGeluTanh;  // never kNone
  double token_scale = 1.0;
  double projection_scale = 1.0;
  double scale = 1.0;
};

struct ModelSpec {
  ModelKind kind = ModelKind::kDecoder;
  int vocab_size = 0;
  int hidden_size = 0;
  int max_position_embeddings = 0;
  std::optional<int32_t> bos_token_id;
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> pad_token_id = std::nullopt;
  NormSpec norm;
  PositionSpec position;
  // If set, a table [buckets, num_heads] that all layers share has biases of the scaled scores. All
  // layers then have dense attention with the same number of heads, without latents and soft caps.
  std::optional<RelativeBias> relative_bias;
  double embedding_scale = 1.0;
  // Above 0: each token has one of this many types, whose embedding is added to the token's.
  int token_types = 0;
  bool embedding_norm = false;  // a norm of the sum of token and position embeddings
  double residual_scale = 1.0;
  // At its end, each layer multiplies the residual stream by a factor of its own, a tensor [1].
  bool layer_scale = false;
  std::optional<LayerInputSpec> layer_input = std::nullopt;
  double output_scale = 1.0;  // multiplies the rows that reach the head
  double logit_scale = 1.0;
  double logit_soft_cap = 0.0;  // above 0: a scaled logit x becomes cap * tanh(x / cap)
  bool tie_word_embeddings = false;
  bool head_bias = false;  // a bias [vocab_size] of the logits, before logit_scale
  HeadSpec head;
  // If set, the model computes vectors of texts, or with kSequenceClassification logits of texts.
  std::optional<PoolingSpec> pooling;
  std::vector<BlockSpec> blocks;  // in execution order
  Stack stack = Stack::kOnly;     // whose blocks these are
  // With kEncoderDecoder, the other members describe the decoder, and this is the encoder. It has
  // the same width, no head and, if both share their embeddings, the same vocabulary.
  std::shared_ptr<const ModelSpec> encoder;
  bool share_embeddings = true;  // with an encoder: both stacks have the same table of tokens
  std::optional<int32_t> decoder_start_token_id = std::nullopt;  // with an encoder: required
  // Layers that draft tokens (multi-token prediction, DeepSeek-V3, equations 21 to 23). Their input
  // for a token is join [norm(embedding of the token after it); norm(the token's row that reaches
  // the head)], and after a norm of their own the head yields logits of the second token after it.
  // They have the model's width and vocabulary, no embeddings and no head. The model's answers do
  // not depend on them.
  std::shared_ptr<const ModelSpec> prediction;

  int num_layers() const { return blocks.empty() ? 0 : blocks.back().layer + 1; }
  int num_blocks() const { return static_cast<int>(blocks.size()); }
  // Returns the index in `blocks` of the block of this kind in a layer; -1 if there is none.
  int Find(int layer, BlockKind kind) const;
  // Return the block of a layer that mixes its tokens, and one of some kind; null if there is none.
  const BlockSpec* token_mixer(int layer) const;
  const BlockSpec* FindBlock(int layer, BlockKind kind) const;
  // Return the settings of a layer's block. The layer must have a block of this kind.
  AttentionSpec& attention(int layer);
  const AttentionSpec& attention(int layer) const;
  FeedForwardSpec& feed_forward(int layer);
  const FeedForwardSpec& feed_forward(int layer) const;

  // Append a layer of one block, a layer of two, or `count` equal ones.
  void AddLayer(Mixer only);
  void AddLayer(Mixer token_mixer, FeedForwardSpec feed_forward);
  void AddLayer(LayerSpec layer);
  void AddLayers(int count, const LayerSpec& layer = {});
};

// Returns the specification of prediction layers for a model, without the layers. Norm and
// positions are the model's.
ModelSpec PredictionOf(const ModelSpec& spec);

// Returns the size of the vocabulary of prompts, which are the encoder's if there is one, and the
// size that holds the ids of all stacks.
int PromptVocabulary(const ModelSpec& spec);
int LargestVocabulary(const ModelSpec& spec);

// Returns the position settings of a layer: its own, or else the model's.
const PositionSpec& PositionOf(const ModelSpec& spec, const AttentionSpec& attention);

// Return how a block's output joins the residual stream: its own settings, or else the model's.
NormPlacement NormPlacementOf(const ModelSpec& spec, const BlockSpec& block);
double ResidualScaleOf(const ModelSpec& spec, const BlockSpec& block);

// Returns the settings of the first attention layer; null if there is none.
const AttentionSpec* FirstAttention(const ModelSpec& spec);

// Returns whether the tokens of an attention layer attend to positions up to their own only.
bool IsCausal(const ModelSpec& spec, const AttentionSpec& attention);

// Returns the shapes of the KV cache's layers: one for each attention block with keys of its own,
// in execution order. An encoder's layers of equal shapes share one, which only the step that
// writes it reads. With an encoder beside the decoder, layers of attention to the source follow
// those of the decoder, and then those of the encoder, each with a page table of their own.
std::vector<KvLayerShape> CacheShapes(const ModelSpec& spec);
inline constexpr int kSourceTable = 1;
inline constexpr int kEncoderTable = 2;
// Returns the index in the KV cache of the first layer of an encoder beside a decoder.
int FirstEncoderLayer(const ModelSpec& spec);
// Returns the index of an attention block's keys and values in the KV cache, counted from the first
// layer of its stack.
int CacheLayer(const ModelSpec& spec, int block);
// Returns the shapes of the states that blocks keep of a sequence, in execution order.
std::vector<StateShape> StateShapes(const ModelSpec& spec);
// Returns the index of a block's state among them.
int StateIndex(const ModelSpec& spec, int block);

// Returns the number of tokens from which on a sequence is long for rope scaling of the kind kLong:
// a sequence with more tokens is. nullopt if no layer has such a scaling. All layers of a valid
// spec have the same number.
std::optional<double> LongSequencesFrom(const ModelSpec& spec);

// Returns whether a layer has rotary positions with XPOS.
bool HasXpos(const ModelSpec& spec);

// Returns how many dimensions of a head are rotated by rope; in a valid spec, an even number.
int RopeDimensions(const PositionSpec& position, int head_dim);

// Returns the rope settings of an attention layer's queries; dimensions is 0 if the layer has no
// rope.
RopeSettings RopeOf(const ModelSpec& model, const AttentionSpec& attention);

// Checks every relation between the fields (ranges, divisibility, list lengths). The error message
// names the configuration key as a path ("attention[2].routing.select.k"), what was expected and
// what was found.
absl::Status Validate(const ModelSpec& spec);

}  // namespace moeserve
