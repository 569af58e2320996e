#include "model_loaders/architectures/huggingface/decoder_config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/huggingface/model_head.h"
#include "model_loaders/architectures/huggingface/neutral_keys.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

Json WithoutNulls(const Json& json) {
  if (!json.is_object()) return json;
  Json out = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (!value.is_null()) out[key] = value;
  }
  return out;
}

constexpr KeyRule kDecoderKeys[] = {
    {"position.theta", "rope_theta"},
    {"position.fraction", "partial_rotary_factor"},
    {"attention.num_kv_heads", "num_key_value_heads"},
    {"attention.head_dim", "head_dim"},
    {"attention.window", "sliding_window"},
    {"attention.bias", "attention_bias"},
    {"num_kv_heads", "num_key_value_heads"},
};

}  // namespace

DecoderConfig::DecoderConfig(const Json& json, const StoredNames& stored)
    : original_(json),
      json_(WithoutNulls(json)),
      stored_(stored),
      reader_(json_, "", &problems_),
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
                          "dequantize", "use_kernels"}) {
    reader.Optional(key);
  }
  if (*method == Method::kFp8) {
    reader.Pick<int>("fmt", {{"e4m3", 0}}, 0);
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
      {"tanh", ActivationKind::kTanh}};
  const Json* value = reader_.Optional(key);
  const Json name = value == nullptr ? Json(std::string(fallback)) : *value;
  for (const auto& [text, kind] : kNames) {
    if (name == Json(std::string(text))) return kind;
  }
  reader_.Fault(key, "silu, gelu, gelu_pytorch_tanh or relu", ShowJson(name));
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

FeedForwardSpec DecoderConfig::Experts(const ExpertKeys& keys) {
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
  routing.scale = reader_.Real("routed_scaling_factor", defaults.routed_scaling_factor);
  routing.select.bias = true;
  routing.select.groups = reader_.Int("n_group", IsNull("n_group") ? 1 : defaults.n_group);
  routing.select.best_groups =
      reader_.Int("topk_group", IsNull("topk_group") ? 1 : defaults.topk_group);
  routing.select.group_score = GroupScoreKind::kSumOfTwo;
  Require("scoring_func", "sigmoid");
  Require("topk_method", "noaux_tc");
  experts.shared_width = SharedWidth("n_shared_experts", defaults.n_shared_experts);
  for (const KeyRule& rule : {KeyRule{"feed_forward.routing.select.groups", "n_group"},
                              KeyRule{"select.groups", "n_group"},
                              KeyRule{"feed_forward.routing.select.best_groups", "topk_group"},
                              KeyRule{"feed_forward.routing.scale", "routed_scaling_factor"}}) {
    key_rules_.push_back(rule);
  }
  return experts;
}

void DecoderConfig::IgnoreNextTokenLayers(int count) {
  for (int i = 0; i < std::min(count, 8); ++i) {
    ignored_prefixes_.push_back(Concat("model.layers.", int64_t{layers_} + i, '.'));
  }
}

std::optional<int> DecoderConfig::Window(std::optional<int> fallback) {
  constexpr std::string_view key = "sliding_window";
  const Json* value = reader_.Optional(key);
  if (value == nullptr) return original_.contains(key) ? std::nullopt : fallback;
  const std::optional<int> window = IntFrom(*value);
  if (!window.has_value()) reader_.Fault(key, "null or an integer", ShowJson(*value));
  return window;
}

PositionSpec DecoderConfig::Rope(double default_theta, double default_fraction) {
  const double theta = reader_.Real("rope_theta", default_theta);
  const double fraction = reader_.Real("partial_rotary_factor", default_fraction);
  const Json* const old = reader_.Optional("rope_scaling");
  const Json* const parameters = reader_.Optional("rope_parameters");
  if (old != nullptr && parameters != nullptr && *old != *parameters) {
    reader_.Fault("rope_scaling", "the same as rope_parameters, or none", ShowJson(*old));
  }
  const Json* const json = parameters != nullptr ? parameters : old;
  const Json none = Json::object();
  PositionSpec position =
      RopeFrom(json == nullptr ? none : *json,
               parameters != nullptr ? "rope_parameters" : "rope_scaling", theta);
  if (json == nullptr || !json->is_object() || !json->contains("partial_rotary_factor")) {
    position.fraction = fraction;
  }
  return position;
}

PositionSpec DecoderConfig::RopeFrom(const Json& json, const std::string& path,
                                     double default_theta) {
  const Json cleaned = WithoutNulls(json);
  ObjectReader reader(cleaned, path, &problems_);
  PositionSpec position;
  position.theta = reader.Real("rope_theta", default_theta);
  position.fraction = reader.Real("partial_rotary_factor", 1.0);
  std::string type = "default";
  for (const std::string_view key : {"type", "rope_type"}) {  // old and new name
    const Json* value = reader.Optional(key);
    if (value == nullptr) continue;
    if (value->is_string()) {
      type = value->get<std::string>();
    } else {
      reader.Fault(key, "a string", ShowJson(*value));
    }
  }
  position.scaling = ScalingOf(reader, type);
  reader.RefuseOthers(Concat(" (rope_type is ", Quoted(type), ')'));
  return position;
}

bool DecoderConfig::IsRopeOfLayers(const Json& json) {
  return json.is_object() &&
         (json.contains("full_attention") || json.contains("sliding_attention"));
}

RopeScaling DecoderConfig::ScalingOf(ObjectReader& reader, std::string_view type) {
  RopeScaling s;
  if (type == "default") return s;
  if (type == "linear") {
    s.kind = RopeScalingKind::kLinear;
    s.factor = reader.Real("factor");
    return s;
  }
  if (type == "llama3") {
    s.kind = RopeScalingKind::kLlama3;
    s.factor = reader.Real("factor");
    s.original_positions = OriginalPositions(reader);
    s.low_freq_factor = reader.Real("low_freq_factor");
    s.high_freq_factor = reader.Real("high_freq_factor");
    return s;
  }
  if (type == "yarn") {
    s.kind = RopeScalingKind::kYarn;
    s.original_positions = OriginalPositions(reader);
    s.factor = reader.Real("factor", s.original_positions > 0
                                         ? spec_.max_position_embeddings / s.original_positions
                                         : 1.0);
    s.beta_fast = reader.Real("beta_fast", 32.0);
    s.beta_slow = reader.Real("beta_slow", 1.0);
    s.truncate = reader.Bool("truncate", true);
    const auto magnitude = [&](double scale) {
      return s.factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(s.factor) + 1.0;
    };
    const double mscale = reader.Real("mscale", 0.0);
    const double mscale_all = reader.Real("mscale_all_dim", 0.0);
    const double derived = mscale != 0.0 && mscale_all != 0.0
                               ? magnitude(mscale) / magnitude(mscale_all)
                               : magnitude(1.0);
    s.magnitude = reader.Real("attention_factor", derived);
    return s;
  }
  if (type == "longrope" || type == "su") return LongRope(reader);
  reader.Fault("rope_type", "default, linear, llama3, longrope or yarn", Quoted(type));
  return s;
}

double DecoderConfig::OriginalPositions(ObjectReader& reader) {
  constexpr std::string_view key = "original_max_position_embeddings";
  const double inside = reader.Real(key, spec_.max_position_embeddings);
  const std::optional<int>& outside = defaults_.original_max_position_embeddings;
  return outside.has_value() ? reader_.Real(key, *outside) : inside;
}

RopeScaling DecoderConfig::LongRope(ObjectReader& reader) {
  RopeScaling s;
  s.kind = RopeScalingKind::kLong;
  s.original_positions = OriginalPositions(reader);
  s.factors = reader.Reals("short_factor");
  s.long_factors = reader.Reals("long_factor");
  const double factor = reader.Real(
      "factor",
      s.original_positions > 0 ? spec_.max_position_embeddings / s.original_positions : 1.0);
  const double derived = factor > 1.0 && s.original_positions > 1.0
                             ? std::sqrt(1.0 + std::log(factor) / std::log(s.original_positions))
                             : 1.0;
  const double both = reader.Real("attention_factor", derived);
  s.magnitude = reader.Real("short_mscale", both);
  s.long_magnitude = reader.Real("long_mscale", both);
  return s;
}

std::vector<bool> DecoderConfig::SlidingLayers(const std::function<bool(int)>& fallback) {
  std::vector<bool> sliding;
  const Json* types = reader_.Optional("layer_types");
  if (layers_ < 1 || layers_ > kMaxLayers) return sliding;
  if (types == nullptr) {
    for (int i = 0; i < layers_; ++i) sliding.push_back(fallback(i));
    return sliding;
  }
  const std::string expected = Concat("a list of ", layers_, " strings");
  if (!types->is_array() || types->size() != static_cast<size_t>(layers_)) {
    reader_.Fault("layer_types", expected, ShowJson(*types));
    return std::vector<bool>(static_cast<size_t>(layers_), false);
  }
  for (const Json& type : *types) {
    const bool is_sliding = type == "sliding_attention";
    if (!is_sliding && type != "full_attention") {
      reader_.Fault(Concat("layer_types[", sliding.size(), ']'),
                    "\"full_attention\" or \"sliding_attention\"", ShowJson(type));
    }
    sliding.push_back(is_sliding);
  }
  return sliding;
}

bool DecoderConfig::IsNull(std::string_view key) const {
  const auto found = original_.find(key);
  return original_.is_object() && found != original_.end() && found->is_null();
}

double DecoderConfig::Cap(std::string_view key, double fallback) {
  return reader_.Real(key, IsNull(key) ? 0.0 : fallback);
}

void DecoderConfig::Ignore(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) IgnoreKey(key);
}

void DecoderConfig::IgnoreKey(std::string_view key) {
  constexpr std::string_view kNames[] = {"architectures", "model_type", "transformers_version"};
  const bool is_name = std::find(std::begin(kNames), std::end(kNames), key) != std::end(kNames);
  if (reader_.Optional(key) != nullptr && !is_name) ignored_keys_.emplace_back(key);
}

void DecoderConfig::JudgeUnread() {
  for (const std::string& key : reader_.Unread()) {
    const Json& value = json_[key];
    switch (EffectOf(key, value)) {
      case KeyEffect::kNone:
        IgnoreKey(key);
        break;
      case KeyEffect::kChanges:
        reader_.Fault(key, HarmlessValue(key), ShowJson(value) + IgnoreHint(key));
        break;
      case KeyEffect::kUnknown:
        problems_.Add(UnknownKey(key, ShowJson(value)));
        break;
    }
  }
}

void DecoderConfig::Require(std::string_view key, const Json& value) {
  const Json* const found = reader_.Optional(key);
  if (found == nullptr || *found == value) return;
  reader_.Fault(key, value.is_null() ? "null" : ShowJson(value), ShowJson(*found));
}

void DecoderConfig::Prefix(std::string_view rule, std::initializer_list<std::string_view> files) {
  for (const std::string_view file : files) {
    const auto first = stored_.lower_bound(file);
    if (!file.empty() && (first == stored_.end() || !first->starts_with(file))) continue;
    prefix_ = {rule, file};
    return;
  }
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

absl::Status DecoderConfig::Judge() {
  JudgeUnread();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(kConfigFile));
  return CheckListLengths({defaults_.size_keys.layers, layers_}, {"num_experts", 0});
}

ConfigResult DecoderConfig::Finish(const std::function<LayerSpec(int)>& layer) {
  if (spec_.kind == ModelKind::kDecoder) ReadDecoderHead(*this);
  // Files of models without a head have no prefix.
  if (prefix_.rule.empty()) Prefix("model.", {"model.", ""});
  MOESERVE_RETURN_IF_ERROR(Judge());
  for (int i = 0; i < layers_; ++i) spec_.AddLayer(layer(i));
  return Build();
}

ConfigResult DecoderConfig::FinishBlocks(const BlocksOfLayer& layer) {
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
  auto config = std::make_unique<NameTableConfig>(tensors_, key_rules_, stored_, prefix_, mapping_);
  config->spec = std::move(spec_);
  config->ignored = std::move(ignored_tensors_);
  config->ignored_prefixes = std::move(ignored_prefixes_);
  config->fp8 = fp8_;
  config->positions_from = positions_from_;
  config->ignored_keys = std::move(ignored_keys_);
  config->decisions = std::move(decisions_);
  MOESERVE_RETURN_IF_ERROR(ValidateConfig(*config));
  return config;
}

}  // namespace moeserve::huggingface
