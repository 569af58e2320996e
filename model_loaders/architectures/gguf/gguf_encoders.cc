// BERT, nomic-embed-text and ModernBERT.

#include "model_loaders/architectures/gguf/gguf_encoders.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_model_reader.h"
#include "model_loaders/architectures/gguf/gguf_tensors.h"

namespace moeserve {
namespace {

using Kind = GgufEncoderKind;

constexpr std::string_view kEncoderWidth = ".feed_forward_length";
constexpr std::string_view kEncoderExperts = ".expert_count";
constexpr std::string_view kEncoderPeriod = ".moe_every_n_layers";
constexpr std::string_view kEncoderWindow = ".attention.sliding_window";

constexpr TensorRule GgufQkv(std::string_view model, std::string_view file, int part) {
  return {.model = model, .file = file, .part = part, .parts = 3, .order = RowOrder::kQkv};
}

constexpr TensorRule kGgufEncoder[] = {
    {"embed.weight", "token_embd.weight"},
    {"embed_position.weight", "position_embd.weight"},
    {"embed_type.weight", "token_types.weight"},
    {"embed_norm.weight", "token_embd_norm.weight"},
    {"embed_norm.bias", "token_embd_norm.bias"},
    {"norm.weight", "output_norm.weight"},
    {"blocks.*.attention.q.weight", "blk.*.attn_q.weight"},
    {"blocks.*.attention.k.weight", "blk.*.attn_k.weight"},
    {"blocks.*.attention.v.weight", "blk.*.attn_v.weight"},
    {"blocks.*.attention.q.bias", "blk.*.attn_q.bias"},
    {"blocks.*.attention.k.bias", "blk.*.attn_k.bias"},
    {"blocks.*.attention.v.bias", "blk.*.attn_v.bias"},
    GgufQkv("blocks.*.attention.q.weight", "blk.*.attn_qkv.weight", 0),
    GgufQkv("blocks.*.attention.k.weight", "blk.*.attn_qkv.weight", 1),
    GgufQkv("blocks.*.attention.v.weight", "blk.*.attn_qkv.weight", 2),
    GgufQkv("blocks.*.attention.q.bias", "blk.*.attn_qkv.bias", 0),
    GgufQkv("blocks.*.attention.k.bias", "blk.*.attn_qkv.bias", 1),
    GgufQkv("blocks.*.attention.v.bias", "blk.*.attn_qkv.bias", 2),
    {"blocks.*.attention.o.weight", "blk.*.attn_output.weight"},
    {"blocks.*.attention.out_bias", "blk.*.attn_output.bias"},
    {"blocks.*.feed_forward.down.weight", "blk.*.ffn_down.weight"},
    {"blocks.*.feed_forward.down.bias", "blk.*.ffn_down.bias"},
    {"blocks.*.feed_forward.router.weight", "blk.*.ffn_gate_inp.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_up_exps.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "blk.*.ffn_down_exps.weight"},
    {"head.layer.weight", "cls.weight"},
    {"head.layer.bias", "cls.bias"},
    {"head.layer_norm.weight", "cls.norm.weight"},
    {"classifier.weight", "cls.output.weight"},
    {"classifier.bias", "cls.output.bias"},
};

constexpr TensorRule kGgufPostNorm[] = {
    {"blocks.*.attention.norm.weight", "blk.*.attn_output_norm.weight"},
    {"blocks.*.attention.norm.bias", "blk.*.attn_output_norm.bias"},
    {"blocks.*.feed_forward.norm.weight", "blk.*.layer_output_norm.weight"},
    {"blocks.*.feed_forward.norm.bias", "blk.*.layer_output_norm.bias"},
    {"blocks.*.feed_forward.gate.weight", "blk.*.ffn_gate.weight"},
    {"blocks.*.feed_forward.up.weight", "blk.*.ffn_up.weight"},
    {"blocks.*.feed_forward.up.bias", "blk.*.ffn_up.bias"},
};

constexpr TensorRule kGgufModern[] = {
    {"blocks.*.attention.norm.weight", "blk.*.attn_norm.weight"},
    {"blocks.*.feed_forward.norm.weight", "blk.*.ffn_norm.weight"},
    {"blocks.*.feed_forward.gate.weight", "blk.*.ffn_up.weight", 0, 2},
    {"blocks.*.feed_forward.up.weight", "blk.*.ffn_up.weight", 1, 2},
};

constexpr KeyRule kGgufEncoderKeys[] = {
    {"norm.eps", ".attention.layer_norm_epsilon"},
    {"pad_token_id", "tokenizer.ggml.padding_token_id"},
    {"token_types", "tokenizer.ggml.token_type_count"},
    {"attention.head_dim", ".attention.key_length"},
    {"feed_forward.routing.widths", kEncoderWidth},
    {"head.labels", ".classifier.output_labels"},
};

class GgufEncoderReader final : private GgufModelReader {
 public:
  GgufEncoderReader(const GgufFile& file, const WeightFiles& weights, Kind kind,
                    std::string_view name, const std::vector<std::string>& ignored)
      : GgufModelReader(file, weights, name, ignored), kind_(kind), name_(name) {}

  ConfigResult Read();

 private:
  void ReadEmbeddings();
  void ReadRope();
  void ReadLocalLayers();
  FeedForwardSpec ReadNetwork();
  FeedForwardSpec ReadExperts(const FeedForwardSpec& dense);
  std::vector<BlockSpec> Layer(int layer) const;

  const Kind kind_;
  const std::string_view name_;
  AttentionSpec attention_, local_;
  FeedForwardSpec dense_, experts_;
  int period_ = 0;  // kNomicMoe: of layers with experts; kModern: of those that see the whole text
};

// The rows of padding that RoBERTa's tables have in front of those of positions are not in the
// file. Its tokenizers are those of GPT-2 and XLM-R.
void GgufEncoderReader::ReadEmbeddings() {
  spec_.token_types =
      static_cast<int>(std::min<int64_t>(RowsOf("token_types.weight"), kMaxTokenTypes + 1));
  constexpr std::string_view kTypes = "tokenizer.ggml.token_type_count";
  if (spec_.token_types > 0) {
    const int types = keys_.Int(kTypes, spec_.token_types);
    if (types != spec_.token_types) {
      keys_.Fault(kTypes, Concat(spec_.token_types, " (the rows of token_types.weight)"),
                  std::to_string(types));
    }
  }
  spec_.pad_token_id = keys_.OptionalInt("tokenizer.ggml.padding_token_id");
  if (kind_ != Kind::kBert) return;
  spec_.position.kind = PositionKind::kLearned;
  const std::string_view model = keys_.Text("tokenizer.ggml.model").value_or("bert");
  if ((model == "gpt2" || model == "t5") && spec_.pad_token_id.has_value()) {
    spec_.position.count_padding = false;
  }
}

void GgufEncoderReader::ReadRope() {
  if (kind_ == Kind::kBert) return;
  const bool modern = kind_ == Kind::kModern;
  spec_.position.theta = keys_.Real(".rope.freq_base", modern ? 160000.0 : 10000.0);
  keys_.Require(".rope.dimension_count", attention_.head_dim);
  constexpr std::string_view kType = ".rope.scaling.type";
  const std::string_view type = keys_.Text(kType).value_or("none");
  if (type != "none") keys_.Fault(kType, "\"none\"", Quoted(type));
  keys_.Ignore(".rope.scaling.finetuned");
}

// Layers of ModernBERT see half of the window on each side, except every n-th, the first included.
void GgufEncoderReader::ReadLocalLayers() {
  local_ = attention_;
  if (kind_ != Kind::kModern) return;
  const int window = keys_.Int(kEncoderWindow, 0);
  if (window < 0) keys_.Fault(kEncoderWindow, "an integer of at least 0", std::to_string(window));
  constexpr std::string_view kPeriod = ".attention.sliding_window_pattern";
  period_ = keys_.Int(kPeriod, 3);
  if (period_ < 1) keys_.Fault(kPeriod, "an integer of at least 1", std::to_string(period_));
  PositionSpec position = spec_.position;
  position.theta = keys_.Real(".rope.freq_base_swa", 10000.0);
  if (window == 0) return;
  local_.window = window / 2 + 1;
  local_.position = position;
}

FeedForwardSpec GgufEncoderReader::ReadNetwork() {
  FeedForwardSpec dense;
  dense.width = keys_.Int(kEncoderWidth);
  ExpertSpec& expert = dense.expert;
  const bool gated = kind_ == Kind::kNomic || kind_ == Kind::kModern;
  expert.form = gated ? ExpertForm::kGated : ExpertForm::kPlain;
  expert.activation = kind_ == Kind::kNomic ? ActivationKind::kSilu : ActivationKind::kGelu;
  expert.bias = Has("blk.0.ffn_up.bias");
  if (kind_ != Kind::kModern) return dense;
  constexpr std::pair<std::string_view, ActivationKind> kActivations[] = {
      {"gelu", ActivationKind::kGelu},
      {"gelu_new", ActivationKind::kGeluTanh},
      {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
      {"relu", ActivationKind::kRelu},
      {"silu", ActivationKind::kSilu},
      {"swish", ActivationKind::kSilu}};
  constexpr std::string_view kKey = ".hidden_activation";
  const std::string_view name = keys_.Text(kKey).value_or("gelu");
  const auto* const found =
      std::ranges::find(kActivations, name, [](const auto& a) { return a.first; });
  if (found == std::end(kActivations)) {
    keys_.Fault(kKey, "gelu, gelu_new, gelu_pytorch_tanh, relu, silu or swish", Quoted(name));
  } else {
    expert.activation = found->second;
  }
  return dense;
}

// The weights of the selected experts are their softmax values as they are. The authors add a bias
// to the experts' sum, which converters drop.
FeedForwardSpec GgufEncoderReader::ReadExperts(const FeedForwardSpec& dense) {
  FeedForwardSpec block;
  block.expert = dense.expert;
  block.expert.bias = false;
  RoutedLayerSpec& routing = block.routing.emplace();
  routing.num_experts = keys_.Int(kEncoderExperts);
  routing.select.k = keys_.Int(".expert_used_count");
  routing.widths = ExpertWidths(kEncoderExperts, routing.num_experts, dense.width);
  keys_.Require(".expert_weights_norm", 0);
  keys_.Require(".expert_gating_func", 1);
  period_ = keys_.Int(kEncoderPeriod);
  if (period_ < 1) keys_.Fault(kEncoderPeriod, "an integer of at least 1", std::to_string(period_));
  decisions_.push_back("the file has no bias of the experts' sum, which the original model adds");
  return block;
}

std::vector<BlockSpec> GgufEncoderReader::Layer(int layer) const {
  const bool local = kind_ == Kind::kModern && layer % period_ != 0;
  const bool routed = kind_ == Kind::kNomicMoe && layer % period_ == (period_ > 1 ? 1 : 0);
  std::vector<BlockSpec> blocks = {{.mixer = local ? local_ : attention_},
                                   {.mixer = routed ? experts_ : dense_}};
  // The norm of the embeddings takes the place of ModernBERT's first.
  if (kind_ == Kind::kModern && layer == 0 && !Has("blk.0.attn_norm.weight")) {
    blocks[0].residual.norm_placement = NormPlacement::kNone;
  }
  for (BlockSpec& block : blocks) block.layer = layer;
  return blocks;
}

ConfigResult GgufEncoderReader::Read() {
  const bool modern = kind_ == Kind::kModern;
  ReadSizes(".attention.layer_norm_epsilon");
  ReadTokenIds();
  spec_.kind = ModelKind::kEncoder;
  spec_.norm.kind = NormKind::kLayer;
  spec_.norm.placement = modern ? NormPlacement::kPre : NormPlacement::kPost;
  if (modern) spec_.norm.bias = false;
  spec_.embedding_norm = true;
  attention_ = ReadHeads({});
  attention_.bias = Has("blk.0.attn_q.bias") || Has("blk.0.attn_qkv.bias");
  attention_.out_bias = Has("blk.0.attn_output.bias");
  ReadEmbeddings();
  ReadRope();
  ReadLocalLayers();
  dense_ = ReadNetwork();
  if (kind_ == Kind::kNomicMoe) experts_ = ReadExperts(dense_);
  // Older files of ModernBERT do not name the pooling in front of a classifier.
  constexpr std::string_view kScored = ".classifier.pooling_type";
  const int scored = keys_.Int(kScored, modern ? 1 : 2);
  if (scored != 1 && scored != 2) {
    keys_.Fault(kScored, "1 (mean) or 2 (cls)", std::to_string(scored));
  }
  ReadTextHead({.generates = false,
                .scored = scored == 1 ? PoolingKind::kMean : PoolingKind::kFirst,
                .layer = {.activation = modern ? ActivationKind::kGelu : ActivationKind::kTanh,
                          .bias = true,
                          .norm = modern}});
  keys_.Require(".attention.causal", 0);
  keys_.Ignore(".tensor_data_layout");
  keys_.Ignore(".attention.layer_norm_rms_epsilon");  // repeats that of ModernBERT's norms
  for (const char* key : {".attention.max_alibi_bias", ".attention.clamp_kqv"}) {
    keys_.Require(key, 0);
  }
  keys_.RefuseOthers();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(Prefix()));

  std::vector<TensorRule> rules(std::begin(kGgufEncoder), std::end(kGgufEncoder));
  const std::span<const TensorRule> own =
      modern ? std::span<const TensorRule>(kGgufModern) : kGgufPostNorm;
  rules.insert(rules.end(), own.begin(), own.end());
  auto config = std::make_unique<GgufTableConfig>(name_, rules, kGgufEncoderKeys, stored_);
  for (const char* name : {"cls.output.weight", "token_types.weight"}) {
    const WeightFiles::Location* const found = weights_.Find(name);
    if (found != nullptr && found->entry->shape.size() == 1) config->vectors.push_back(name);
  }
  config->spec = spec_;
  for (int i = 0; i < layers_; ++i)
    std::ranges::move(Layer(i), std::back_inserter(config->spec.blocks));
  return Finish(std::move(config));
}

}  // namespace

ConfigResult ReadGgufEncoder(const GgufFile& file, const WeightFiles& weights,
                             std::string_view name, const std::vector<std::string>& ignored) {
  const auto index = std::ranges::find(kGgufEncoderNames, name) - std::begin(kGgufEncoderNames);
  return GgufEncoderReader(file, weights, static_cast<Kind>(index), name, ignored).Read();
}

}  // namespace moeserve
