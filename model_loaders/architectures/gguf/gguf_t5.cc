// T5 and its encoder alone.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <utility>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_encoders.h"
#include "model_loaders/architectures/gguf/gguf_model_reader.h"
#include "model_loaders/architectures/gguf/gguf_tensors.h"

namespace moeserve {
namespace {

// Relative positions have no limit. Texts of this length are accepted.
constexpr int kLeastT5Positions = 4096;
// No key has it; all published models have this one.
constexpr int kMaxT5Distance = 128;

// clang-format off
#define MOESERVE_GGUF_T5_ATTENTION(BLOCK, FILE)                                     \
    {BLOCK ".q.weight", FILE "_q.weight"}, {BLOCK ".k.weight", FILE "_k.weight"},   \
    {BLOCK ".v.weight", FILE "_v.weight"}, {BLOCK ".o.weight", FILE "_o.weight"},   \
    {BLOCK ".norm.weight", FILE "_norm.weight"}
#define MOESERVE_GGUF_T5_FEED_FORWARD(BLOCK, FILE)                                  \
    {BLOCK ".norm.weight", FILE "_norm.weight"},                                    \
    {BLOCK ".gate.weight", FILE "_gate.weight"},                                    \
    {BLOCK ".up.weight", FILE "_up.weight"},                                        \
    {BLOCK ".down.weight", FILE "_down.weight"}
#define MOESERVE_GGUF_T5_ENCODER(STACK)                                             \
    {STACK "norm.weight", "enc.output_norm.weight"},                                \
    {STACK "relative_bias.weight", "enc.blk.0.attn_rel_b.weight"},                  \
    {STACK "blocks.*.relative_bias.weight", "enc.blk.*.attn_rel_b.weight"},         \
    MOESERVE_GGUF_T5_ATTENTION(STACK "blocks.*.attention", "enc.blk.*.attn"),       \
    MOESERVE_GGUF_T5_FEED_FORWARD(STACK "blocks.*.feed_forward", "enc.blk.*.ffn")
// clang-format on

constexpr TensorRule kGgufPair[] = {
    {"embed.weight", "token_embd.weight"},
    {"head.weight", "output.weight"},
    {"decoder.norm.weight", "dec.output_norm.weight"},
    {"decoder.relative_bias.weight", "dec.blk.0.attn_rel_b.weight"},
    {"decoder.blocks.*.relative_bias.weight", "dec.blk.*.attn_rel_b.weight"},
    MOESERVE_GGUF_T5_ENCODER("encoder."),
    MOESERVE_GGUF_T5_ATTENTION("decoder.blocks.*.attention", "dec.blk.*.attn"),
    MOESERVE_GGUF_T5_ATTENTION("decoder.blocks.*.cross_attention", "dec.blk.*.cross_attn"),
    MOESERVE_GGUF_T5_FEED_FORWARD("decoder.blocks.*.feed_forward", "dec.blk.*.ffn"),
};

constexpr TensorRule kGgufT5Alone[] = {
    {"embed.weight", "token_embd.weight"},
    MOESERVE_GGUF_T5_ENCODER(""),
};
#undef MOESERVE_GGUF_T5_ATTENTION
#undef MOESERVE_GGUF_T5_FEED_FORWARD
#undef MOESERVE_GGUF_T5_ENCODER

constexpr KeyRule kGgufT5Keys[] = {
    {"norm.eps", ".attention.layer_norm_rms_epsilon"},
    {"pad_token_id", "tokenizer.ggml.padding_token_id"},
    {"decoder_start_token_id", ".decoder_start_token_id"},
    {"attention.head_dim", ".attention.key_length"},
    {"relative_bias.buckets", ".attention.relative_buckets_count"},
    {"encoder.relative_bias.buckets", ".attention.relative_buckets_count"},
    {"encoder.norm.eps", ".attention.layer_norm_rms_epsilon"},
    {"encoder.attention.num_heads", ".attention.head_count"},
    {"encoder.attention.num_kv_heads", ".attention.head_count_kv"},
    {"encoder.attention.head_dim", ".attention.key_length"},
    {"encoder.feed_forward.width", ".feed_forward_length"},
    {"encoder.num_hidden_layers", ".block_count"},
};

class GgufT5Reader final : private GgufModelReader {
 public:
  GgufT5Reader(const GgufFile& file, const WeightFiles& weights, std::string_view name,
               const std::vector<std::string>& ignored)
      : GgufModelReader(file, weights, name, ignored), name_(name) {}

  ConfigResult Read();

 private:
  bool pair() const { return name_ == kGgufT5; }
  void ReadStacks();
  int ReadDecoder();
  FeedForwardSpec Network(std::string_view gate, int width) const;

  const std::string_view name_;
};

void GgufT5Reader::ReadStacks() {
  spec_.max_position_embeddings = std::max(spec_.max_position_embeddings, kLeastT5Positions);
  spec_.position.kind = PositionKind::kNone;
  spec_.pad_token_id = keys_.OptionalInt("tokenizer.ggml.padding_token_id");
  spec_.relative_bias = RelativeBias{.buckets = keys_.Int(".attention.relative_buckets_count"),
                                     .max_distance = kMaxT5Distance,
                                     .bidirectional = false,
                                     .per_layer = Has("enc.blk.1.attn_rel_b.weight")};
  keys_.Ignore(".attention.layer_norm_epsilon");  // repeats that of RMS norms
}

// Returns the number of the decoder's layers.
int GgufT5Reader::ReadDecoder() {
  constexpr std::string_view kLayers = ".decoder_block_count";
  const int layers = keys_.Int(kLayers, layers_);
  const int64_t most = std::min<int64_t>(kMaxLayers, std::ssize(stored_.names));
  if (problems_.empty() && (layers < 1 || layers > most)) {
    keys_.Fault(kLayers, Concat("an integer in [1, ", most, ']'), std::to_string(layers));
  }
  spec_.decoder_start_token_id = keys_.Int(".decoder_start_token_id", 0);
  spec_.tie_word_embeddings = !Has("output.weight");
  // The first models, which have no gates, scale what the head reads; later ones have a head of
  // their own and do not.
  const bool gated = Has("dec.blk.0.ffn_gate.weight");
  if ((spec_.tie_word_embeddings || !gated) && spec_.hidden_size > 0) {
    spec_.output_scale = 1.0 / std::sqrt(static_cast<double>(spec_.hidden_size));
  }
  keys_.Require(".pooling_type", 0);
  return layers;
}

// Networks without a gate use ReLU; those with one, the approximation of GELU by tanh.
FeedForwardSpec GgufT5Reader::Network(std::string_view gate, int width) const {
  FeedForwardSpec dense;
  const bool gated = Has(gate);
  dense.width = width;
  dense.expert.form = gated ? ExpertForm::kGated : ExpertForm::kPlain;
  dense.expert.activation = gated ? ActivationKind::kGeluTanh : ActivationKind::kRelu;
  return dense;
}

void AddStack(ModelSpec& spec, int layers, const std::vector<BlockSpec>& layer) {
  for (int i = 0; i < layers; ++i) {
    for (BlockSpec block : layer) {
      block.layer = i;
      block.stack = spec.stack;
      spec.blocks.push_back(std::move(block));
    }
  }
}

ConfigResult GgufT5Reader::Read() {
  ReadSizes(".attention.layer_norm_rms_epsilon");
  ReadTokenIds();
  ReadStacks();
  AttentionSpec attention = ReadHeads({});
  attention.scale = 1.0;
  const int width = keys_.Int(".feed_forward_length");
  const int decoder_layers = pair() ? ReadDecoder() : 0;
  if (!pair()) ReadTextHead({.generates = false, .scored = PoolingKind::kMean, .layer = {}});
  keys_.Ignore(".tensor_data_layout");
  keys_.Require(".attention.causal", 0);
  keys_.RefuseOthers();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(Prefix()));

  const std::vector<BlockSpec> encoder_layer = {
      {.mixer = attention}, {.mixer = Network("enc.blk.0.ffn_gate.weight", width)}};
  const std::span<const TensorRule> rules =
      pair() ? std::span<const TensorRule>(kGgufPair) : kGgufT5Alone;
  auto config = std::make_unique<GgufTableConfig>(name_, rules, kGgufT5Keys, stored_);
  config->spec = spec_;
  ModelSpec& spec = config->spec;
  if (!pair()) {
    spec.kind = ModelKind::kEncoder;
    spec.relative_bias->bidirectional = true;
    AddStack(spec, layers_, encoder_layer);
    return Finish(std::move(config));
  }
  config->ignored.push_back("dec.blk.*.cross_attn_rel_b.weight");  // no code uses it
  ModelSpec encoder;
  encoder.kind = ModelKind::kEncoder;
  encoder.stack = Stack::kEncoder;
  encoder.head.kind = HeadKind::kNone;
  encoder.vocab_size = spec.vocab_size;
  encoder.hidden_size = spec.hidden_size;
  encoder.max_position_embeddings = spec.max_position_embeddings;
  encoder.norm = spec.norm;
  encoder.position = spec.position;
  encoder.relative_bias = spec.relative_bias;
  encoder.relative_bias->bidirectional = true;
  AddStack(encoder, layers_, encoder_layer);
  spec.kind = ModelKind::kEncoderDecoder;
  spec.stack = Stack::kDecoder;
  spec.encoder = std::make_shared<const ModelSpec>(std::move(encoder));
  AddStack(spec, decoder_layers,
           {{.mixer = attention},
            {.mixer = CrossAttentionSpec{attention}},
            {.mixer = Network("dec.blk.0.ffn_gate.weight", width)}});
  return Finish(std::move(config));
}

}  // namespace

ConfigResult ReadGgufT5(const GgufFile& file, const WeightFiles& weights, std::string_view name,
                        const std::vector<std::string>& ignored) {
  return GgufT5Reader(file, weights, name, ignored).Read();
}

}  // namespace moeserve
