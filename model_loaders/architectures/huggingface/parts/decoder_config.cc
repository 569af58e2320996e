#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"
#include "model_loaders/architectures/huggingface/parts/neutral_keys.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

constexpr KeyRule kDecoderKeys[] = {
    {"position.theta", "rope_theta"},
    {"position.fraction", "partial_rotary_factor"},
    {"attention.num_kv_heads", "num_key_value_heads"},
    {"attention.head_dim", "head_dim"},
    {"attention.window", "sliding_window"},
    {"attention.bias", "attention_bias"},
    {"num_kv_heads", "num_key_value_heads"},
};

constexpr std::string_view kPredictionJoin = "blocks.*.prediction.join.weight";
constexpr TensorRule kNextTokenTensors[] = {
    {"blocks.*.prediction.embed_norm.weight", "model.layers.*.enorm.weight"},
    {"blocks.*.prediction.hidden_norm.weight", "model.layers.*.hnorm.weight"},
    {kPredictionJoin, "model.layers.*.eh_proj.weight"},
    {"blocks.*.prediction.norm.weight", "model.layers.*.shared_head.norm.weight"},
};

}  // namespace

Json WithoutNulls(const Json& json) {
  if (!json.is_object()) return json;
  Json out = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (!value.is_null()) out[key] = value;
  }
  return out;
}

DecoderConfig::DecoderConfig(const Json& json, const StoredNames& stored)
    : original_(json),
      json_(WithoutNulls(json)),
      stored_(stored),
      reader_(json_, stored.key_object, &problems_),
      key_rules_(std::begin(kDecoderKeys), std::end(kDecoderKeys)) {}

void DecoderConfig::Skeleton(const DecoderDefaults& defaults) {
  defaults_ = defaults;
  ReadQuantization(defaults.mxfp4);
  spec_.vocab_size = reader_.Int("vocab_size");
  const SizeKeys& keys = defaults.size_keys;
  spec_.hidden_size = reader_.Int(keys.hidden_size);
  layers_ = reader_.Int(keys.layers);
  spec_.max_position_embeddings = reader_.Int(keys.positions, defaults.max_position_embeddings);
  for (const KeyRule& rule :
       {KeyRule{"hidden_size", keys.hidden_size}, KeyRule{"num_hidden_layers", keys.layers},
        KeyRule{"max_position_embeddings", keys.positions},
        KeyRule{"attention.num_heads", keys.heads}, KeyRule{"num_heads", keys.heads}}) {
    key_rules_.push_back(rule);
  }
  spec_.norm.eps = static_cast<float>(reader_.Real(defaults.norm_eps_key, defaults.rms_norm_eps));
  key_rules_.push_back({"norm.eps", defaults.norm_eps_key});
  spec_.tie_word_embeddings = reader_.Bool("tie_word_embeddings", defaults.tie_word_embeddings);
  if (spec_.tie_word_embeddings) ignored_tensors_.push_back("lm_head.weight");
  ignored_tensors_.push_back("model.layers.*.self_attn.rotary_emb.inv_freq");
  if (defaults.rope) spec_.position = Rope(defaults.rope_theta, defaults.partial_rotary_factor);

  // Unlike other keys, a token id that is null differs from one that is absent.
  const bool has_bos = original_.contains("bos_token_id");
  if (const Json* bos = reader_.Optional("bos_token_id")) {
    spec_.bos_token_id = IntFrom(*bos);
    if (!spec_.bos_token_id.has_value()) {
      reader_.Fault("bos_token_id", "an integer or null", ShowJson(*bos));
    }
  } else if (!has_bos) {
    spec_.bos_token_id = defaults.bos_token_id;
  }
  if (const Json* eos = reader_.Optional("eos_token_id")) {
    spec_.eos_token_ids = ParseTokenIds(*eos, "eos_token_id", &problems_);
  } else if (!original_.contains("eos_token_id")) {
    spec_.eos_token_ids = defaults.eos_token_ids;
  }
  // A default id outside a small vocabulary is never produced.
  if (!has_bos && spec_.bos_token_id.value_or(0) >= spec_.vocab_size) spec_.bos_token_id.reset();
  if (!original_.contains("eos_token_id")) {
    std::erase_if(spec_.eos_token_ids, [&](int32_t id) { return id >= spec_.vocab_size; });
  }
}

// The tensors tell what the configuration does not: without a head, the embedding matrix is it, and
// the other way around.
void DecoderConfig::TieByTensors() {
  constexpr std::string_view head = "lm_head.weight";
  const bool says = json_.contains("tie_word_embeddings") || json_.contains("tie_embedding");
  if (spec_.head.kind != HeadKind::kLanguageModel || (says && !spec_.tie_word_embeddings)) return;
  const bool has_embedding = std::ranges::any_of(stored_.names, [](const std::string& name) {
    return name.find("embed") != name.npos || name.find("wte") != name.npos;
  });
  if (Stores(head) == has_embedding) return;
  spec_.tie_word_embeddings = true;
  if (has_embedding) return;
  constexpr TensorRule kHeadIsEmbedding[] = {{"embed.weight", head}};
  Tensors(kHeadIsEmbedding);
}

void DecoderConfig::ReadQuantization(bool mxfp4) {
  const Json* const json = reader_.Optional("quantization_config");
  if (json == nullptr) return;
  const Json cleaned = WithoutNulls(*json);
  ObjectReader reader(cleaned, "quantization_config", &problems_);
  if (!reader.valid()) return;
  enum class Method { kFp8, kMxfp4 };
  const auto method = mxfp4 ? reader.Pick<Method>("quant_method", {{"mxfp4", Method::kMxfp4}})
                            : reader.Pick<Method>("quant_method", {{"fp8", Method::kFp8}});
  if (!method.has_value()) return;
  // The files themselves show which tensors are in blocks. Activations are never rounded.
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "activation_scheme",
                          "dequantize", "use_kernels", "scale_fmt"}) {
    reader.Optional(key);
  }
  if (*method == Method::kFp8) {
    reader.Pick<int>("fmt", {{"e4m3", 0}, {"float8_e4m3fn", 0}}, 0);
    const Json* const block = reader.Required("weight_block_size", "a list of two integers");
    if (block == nullptr) return;
    const auto dim = [&](size_t i) {
      return block->is_array() && block->size() == 2 ? IntFrom((*block)[i]) : std::nullopt;
    };
    const std::optional<int> rows = dim(0), columns = dim(1);
    if (rows.value_or(0) < 1 || columns.value_or(0) < 1) {
      reader.Fault("weight_block_size", "a list of two integers above 0", ShowJson(*block));
      return;
    }
    fp8_ = BlockFormat{.kind = BlockFormatKind::kFp8, .rows = *rows, .columns = *columns};
  }
  reader.RefuseOthers();
}

AttentionSpec DecoderConfig::Attention(std::optional<int> head_dim) {
  AttentionSpec attention;
  attention.num_heads = reader_.Int(defaults_.size_keys.heads);
  attention.num_kv_heads = KvHeads(attention.num_heads);
  const int derived = attention.num_heads > 0 ? spec_.hidden_size / attention.num_heads : 0;
  if (IsNull("head_dim")) head_dim.reset();
  attention.head_dim = reader_.Int("head_dim", head_dim.value_or(derived));
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  return attention;
}

int DecoderConfig::KvHeads(int heads) {
  constexpr std::string_view key = "num_key_value_heads";
  return reader_.Int(key, IsNull(key) ? heads : defaults_.num_key_value_heads.value_or(heads));
}

ActivationKind DecoderConfig::Activation(std::string_view key, std::string_view fallback) {
  constexpr std::pair<std::string_view, ActivationKind> kNames[] = {
      {"silu", ActivationKind::kSilu},
      {"swish", ActivationKind::kSilu},
      {"gelu", ActivationKind::kGelu},
      {"gelu_new", ActivationKind::kGeluTanh},
      {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
      {"relu", ActivationKind::kRelu},
      {"tanh", ActivationKind::kTanh},
      {"relu2", ActivationKind::kRelu2}};
  const Json* value = reader_.Optional(key);
  const Json name = value == nullptr ? Json(std::string(fallback)) : *value;
  for (const auto& [text, kind] : kNames) {
    if (name == Json(std::string(text))) return kind;
  }
  reader_.Fault(key, "silu, gelu, gelu_pytorch_tanh, relu or relu2", ShowJson(name));
  return ActivationKind::kSilu;
}

FeedForwardSpec DecoderConfig::WithActivation(FeedForwardSpec block) {
  block.expert.activation = Activation();
  return block;
}

FeedForwardSpec DecoderConfig::Dense(std::string_view width_key) {
  FeedForwardSpec dense;
  dense.width = reader_.Int(width_key);
  key_rules_.push_back({"feed_forward.width", width_key});
  return dense;
}

std::string_view DecoderConfig::ExpertCountKey(std::string_view own) {
  constexpr std::string_view kNames[] = {"num_experts", "num_local_experts", "n_routed_experts"};
  if (std::ranges::find(kNames, own) == std::end(kNames)) return own;
  std::string_view found = own;
  for (const std::string_view name : kNames) {
    if (name == own || !json_.contains(name)) continue;
    if (!json_.contains(found)) {
      found = name;
    } else {
      Require(name, json_[found]);
    }
  }
  return found;
}

FeedForwardSpec DecoderConfig::Experts(const ExpertKeys& family_keys) {
  ExpertKeys keys = family_keys;
  keys.count = ExpertCountKey(keys.count);
  RoutedLayerSpec routing;
  routing.num_experts = reader_.Int(keys.count);
  const int width = reader_.Int(keys.width);
  routing.select.k = reader_.Int(keys.selected);
  expert_width_ = width;
  for (const KeyRule& rule :
       {KeyRule{"feed_forward.routing.num_experts", keys.count},
        KeyRule{"feed_forward.routing.widths", keys.width},
        KeyRule{"feed_forward.routing.select.k", keys.selected}, KeyRule{"num_experts", keys.count},
        KeyRule{"routing.num_experts", keys.count}}) {
    key_rules_.push_back(rule);
  }
  if (ok()) {
    const absl::Status lengths =
        CheckListLengths({"num_hidden_layers", layers_}, {keys.count, routing.num_experts});
    if (lengths.ok()) {
      routing.widths.assign(static_cast<size_t>(routing.num_experts), width);
    } else {
      reader_.Fault(keys.count,
                    Concat("at most ", kMaxExperts, " experts in a layer and ", kMaxExpertsOfModel,
                           " in all layers"),
                    Concat(routing.num_experts, " (num_hidden_layers is ", layers_, ')'));
    }
  }
  FeedForwardSpec feed_forward;
  feed_forward.routing = std::move(routing);
  return feed_forward;
}

int DecoderConfig::SharedWidth(std::string_view count, int fallback) {
  const int shared = reader_.Int(count, IsNull(count) ? 0 : fallback);
  const int64_t width = int64_t{shared} * expert_width_;
  if (shared < 0 || width > kMaxWidth) {
    reader_.Fault(count, Concat("a number of shared experts with at most ", kMaxWidth, " in width"),
                  Concat(shared, " of width ", expert_width_));
    return 0;
  }
  key_rules_.push_back({"feed_forward.shared_width", count});
  return static_cast<int>(width);
}

FeedForwardSpec DecoderConfig::DeepSeekExperts(const ExpertKeys& keys,
                                               const DeepSeekDefaults& defaults) {
  FeedForwardSpec experts = Experts(keys);
  RoutedLayerSpec& routing = *experts.routing;
  experts.expert.activation = Activation();
  routing.gate = GateKind::kSigmoid;
  routing.renormalize = reader_.Bool("norm_topk_prob", defaults.norm_topk_prob);
  routing.scale = reader_.Real(defaults.factor_key, defaults.routed_scaling_factor);
  routing.select.bias = true;
  routing.select.groups = reader_.Int("n_group", IsNull("n_group") ? 1 : defaults.n_group);
  routing.select.best_groups =
      reader_.Int("topk_group", IsNull("topk_group") ? 1 : defaults.topk_group);
  routing.select.group_score = GroupScoreKind::kSumOfTwo;
  Require("scoring_func", "sigmoid");
  Require("topk_method", "noaux_tc");
  experts.shared_width = SharedWidth(defaults.shared_key, defaults.n_shared_experts);
  for (const KeyRule& rule : {KeyRule{"feed_forward.routing.select.groups", "n_group"},
                              KeyRule{"select.groups", "n_group"},
                              KeyRule{"feed_forward.routing.select.best_groups", "topk_group"},
                              KeyRule{"feed_forward.routing.scale", defaults.factor_key}}) {
    key_rules_.push_back(rule);
  }
  return experts;
}

void DecoderConfig::IgnoreNextTokenLayers(int count) {
  for (int i = 0; i < std::min(count, 8); ++i) {
    ignored_prefixes_.push_back(Concat("model.layers.", int64_t{layers_} + i, '.'));
  }
}

void DecoderConfig::Prediction(const LayerSpec& layer, std::span<const TensorRule> rules,
                               std::string_view prefix) {
  if (!prefix.empty()) IgnorePrefix(prefix);
  Tensors(rules);
  // Only the names of the first layer are mapped, so its number stands for the prefix.
  const std::string number = std::to_string(layers_);
  const std::string own = Concat("model.layers.", number, '.');
  const auto join = std::ranges::find(rules, kPredictionJoin, &TensorRule::model);
  MOESERVE_CHECK(join != rules.end(), "a rule for the joining matrix");
  std::string name(join->file);
  name.replace(name.find('*'), 1, number);
  if (!prefix.empty()) name = Concat(prefix, name.substr(own.size()));
  if (!Stores(name)) return;
  IgnorePrefix(own);
  prediction_prefix_ = prefix.empty() ? own : prefix;
  if (!stored_.predictions) {
    Decide(kPredictionsLeft);
    return;
  }
  prediction_ = layer;
  prediction_names_ = {.layer = layers_, .prefix = prefix};
}

void DecoderConfig::NextTokenLayers(int count, const LayerSpec& layer) {
  IgnoreNextTokenLayers(count);
  if (count > 0) Prediction(layer, kNextTokenTensors);
}

std::optional<int> DecoderConfig::Window(std::optional<int> fallback) {
  constexpr std::string_view key = "sliding_window";
  const Json* value = reader_.Optional(key);
  if (value == nullptr) return original_.contains(key) ? std::nullopt : fallback;
  const std::optional<int> window = IntFrom(*value);
  if (!window.has_value()) reader_.Fault(key, "null or an integer", ShowJson(*value));
  return window;
}

bool DecoderConfig::IsNull(std::string_view key) const {
  const auto found = original_.find(key);
  return original_.is_object() && found != original_.end() && found->is_null();
}

double DecoderConfig::Cap(std::string_view key, double fallback) {
  return reader_.Real(key, IsNull(key) ? 0.0 : fallback);
}

std::string_view DecoderConfig::FirstOf(std::initializer_list<std::string_view> keys) const {
  for (const std::string_view key : keys) {
    if (json_.contains(key)) return key;
  }
  return *keys.begin();
}

void DecoderConfig::Ignore(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) IgnoreKey(key);
}

void DecoderConfig::IgnoreKey(std::string_view key) {
  constexpr std::string_view kNames[] = {"architectures", "model_type", "transformers_version"};
  const bool is_name = std::find(std::begin(kNames), std::end(kNames), key) != std::end(kNames);
  if (reader_.Optional(key) != nullptr && !is_name) ignored_keys_.push_back(reader_.PathOf(key));
}

void DecoderConfig::JudgeUnread() {
  for (const std::string& key : reader_.Unread()) {
    const Json& value = json_[key];
    switch (EffectOf(key, value)) {
      case KeyEffect::kNone:
        IgnoreKey(key);
        break;
      case KeyEffect::kChanges:
        reader_.Fault(key, HarmlessValue(key), ShowJson(value) + IgnoreHint(reader_.PathOf(key)));
        break;
      case KeyEffect::kUnknown:
        problems_.Add(UnknownKey(reader_.PathOf(key), ShowJson(value)));
        break;
    }
  }
}

void DecoderConfig::LimitContext(int64_t tokens, std::string_view why) {
  if (tokens < 1 || tokens >= spec_.max_position_embeddings) return;
  spec_.max_position_embeddings = static_cast<int>(tokens);
  context_reason_ = why;
}

void DecoderConfig::Require(std::string_view key, const Json& value) {
  const Json* const found = reader_.Optional(key);
  if (found == nullptr || *found == value) return;
  reader_.Fault(key, value.is_null() ? "null" : ShowJson(value), ShowJson(*found));
}

void DecoderConfig::Prefix(std::string_view rule, std::initializer_list<std::string_view> files) {
  for (const std::string_view file : files) {
    const auto first = stored_.names.lower_bound(file);
    if (!file.empty() && (first == stored_.names.end() || !first->starts_with(file))) continue;
    prefix_ = {rule, file};
    return;
  }
}

bool DecoderConfig::StoresAny(std::string_view pattern) const {
  return std::ranges::any_of(stored_.names,
                             [&](const std::string& name) { return MatchesName(pattern, name); });
}

void DecoderConfig::StoredPositionsFrom(int rows) {
  positions_from_ = std::clamp(rows, 0, kMaxPositions);
}

void DecoderConfig::SkipPositions(int rows) {
  StoredPositionsFrom(rows);
  spec_.max_position_embeddings -= positions_from_;
}

void DecoderConfig::Tensors(std::span<const TensorRule> rules) {
  tensors_.insert(tensors_.end(), rules.begin(), rules.end());
}

void DecoderConfig::Tensors(std::initializer_list<std::span<const TensorRule>> tables) {
  for (const auto& table : tables) Tensors(table);
}

void DecoderConfig::MixerTensors(BlockKind mixer,
                                 std::initializer_list<std::span<const TensorRule>> tables) {
  for (const auto& table : tables) {
    for (TensorRule rule : table) {
      rule.mixer = mixer;
      tensors_.push_back(rule);
    }
  }
}

void DecoderConfig::Keys(std::span<const KeyRule> rules) {
  key_rules_.insert(key_rules_.end(), rules.begin(), rules.end());
}

void ReadGraniteFactors(DecoderConfig& config) {
  ObjectReader& keys = config.keys();
  ModelSpec& spec = config.spec();
  spec.embedding_scale = keys.Real("embedding_multiplier", 1.0);
  spec.residual_scale = keys.Real("residual_multiplier", 1.0);
  const double divisor = keys.Real("logits_scaling", 1.0);
  if (divisor == 0.0) {
    keys.Fault("logits_scaling", "a number other than 0", "0");
  } else {
    spec.logit_scale = 1.0 / divisor;
  }
  constexpr KeyRule kRules[] = {{"embedding_scale", "embedding_multiplier"},
                                {"residual_scale", "residual_multiplier"},
                                {"logit_scale", "logits_scaling"},
                                {"attention.scale", "attention_multiplier"}};
  config.Keys(kRules);
}

ConfigResult DecoderConfig::Finish(const AttentionSpec& attention,
                                   const FeedForwardSpec& feed_forward) {
  return Finish([&](int) { return LayerSpec{attention, feed_forward}; });
}

ConfigResult DecoderConfig::Finish(const AttentionSpec& attention, const FeedForwardSpec& dense,
                                   const FeedForwardSpec& experts, int first) {
  return Finish([&](int layer) { return LayerSpec{attention, layer >= first ? experts : dense}; });
}

ConfigResult DecoderConfig::Finish(const AttentionSpec& attention, const FeedForwardSpec& dense,
                                   const FeedForwardSpec& experts,
                                   const std::vector<bool>& sparse) {
  return Finish([&](int layer) {
    return LayerSpec{attention, sparse[static_cast<size_t>(layer)] ? experts : dense};
  });
}

absl::Status DecoderConfig::Judge() {
  JudgeUnread();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(kConfigFile));
  return CheckListLengths({defaults_.size_keys.layers, layers_}, {"num_experts", 0});
}

void DecoderConfig::ReadReplaced() {
  replaced_experts_ = ReadReplacedExperts(reader_, problems_);
  if (replaced_experts_.empty()) return;
  Tensors(ReplacedExpertTensors());
  Keys(ReplacedExpertKeys());
}

ConfigResult DecoderConfig::Finish(const std::function<LayerSpec(int)>& layer) {
  ReadReplaced();
  if (spec_.kind == ModelKind::kDecoder) {
    ReadDecoderHead(*this);
    TieByTensors();
  }
  // Files of models without a head have no prefix.
  if (prefix_.rule.empty()) Prefix("model.", {"model.", ""});
  MOESERVE_RETURN_IF_ERROR(Judge());
  for (int i = 0; i < layers_; ++i) spec_.AddLayer(layer(i));
  return Build();
}

ConfigResult DecoderConfig::FinishBlocks(const BlocksOfLayer& layer) {
  ReadReplaced();
  if (spec_.kind == ModelKind::kDecoder) {
    ReadDecoderHead(*this);
    TieByTensors();
    if (prefix_.rule.empty()) Prefix("model.", {"model.", ""});
  }
  MOESERVE_RETURN_IF_ERROR(Judge());
  for (int i = 0; i < layers_; ++i) {
    for (BlockSpec& block : layer(i)) {
      block.layer = i;
      spec_.blocks.push_back(std::move(block));
    }
  }
  return Build();
}

ConfigResult DecoderConfig::FinishPair(ModelSpec encoder, int encoder_layers,
                                       const BlocksOfLayer& encoder_layer,
                                       const BlocksOfLayer& decoder_layer) {
  MOESERVE_RETURN_IF_ERROR(Judge());
  MOESERVE_RETURN_IF_ERROR(
      CheckListLengths({"encoder layers", encoder_layers}, {"num_experts", 0}));
  const auto add = [](ModelSpec& spec, int layers, const BlocksOfLayer& layer) {
    for (int i = 0; i < layers; ++i) {
      for (BlockSpec& block : layer(i)) {
        block.layer = i;
        block.stack = spec.stack;
        spec.blocks.push_back(std::move(block));
      }
    }
  };
  encoder.kind = ModelKind::kEncoder;
  encoder.stack = Stack::kEncoder;
  encoder.head.kind = HeadKind::kNone;
  encoder.vocab_size = spec_.vocab_size;
  encoder.hidden_size = spec_.hidden_size;
  if (!encoder.position.count_padding) encoder.pad_token_id = spec_.pad_token_id;
  encoder.share_embeddings = spec_.share_embeddings;
  add(encoder, encoder_layers, encoder_layer);
  spec_.kind = ModelKind::kEncoderDecoder;
  spec_.stack = Stack::kDecoder;
  add(spec_, layers_, decoder_layer);
  spec_.encoder = std::make_shared<const ModelSpec>(std::move(encoder));
  return Build();
}

ConfigResult DecoderConfig::Build() {
  MOESERVE_RETURN_IF_ERROR(CheckSections());
  std::map<std::string, std::string> named;
  MOESERVE_RETURN_IF_ERROR(ReplaceExperts(replaced_experts_, mapping_, spec_, named));
  if (prediction_.has_value()) {
    ModelSpec prediction = PredictionOf(spec_);
    prediction.AddLayer(*prediction_);
    for (BlockSpec& block : prediction.blocks) block.stack = Stack::kPrediction;
    spec_.prediction = std::make_shared<const ModelSpec>(std::move(prediction));
  }
  auto config = std::make_unique<NameTableConfig>(tensors_, key_rules_, stored_, prefix_, mapping_,
                                                  prediction_names_);
  config->spec = std::move(spec_);
  config->ignored = std::move(ignored_tensors_);
  config->ignored_prefixes = std::move(ignored_prefixes_);
  config->ignored_ranges = std::move(ignored_ranges_);
  config->named = std::move(named);
  config->fp8 = fp8_;
  config->positions_from = positions_from_;
  config->ignored_keys = std::move(ignored_keys_);
  config->prediction_prefix = std::move(prediction_prefix_);
  config->decisions = std::move(decisions_);
  config->context_reason = std::move(context_reason_);
  MOESERVE_RETURN_IF_ERROR(ValidateConfig(*config));
  return config;
}

}  // namespace moeserve::huggingface
