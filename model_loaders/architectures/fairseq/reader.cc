#include "model_loaders/architectures/fairseq/reader.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/spec/spec_limits.h"

namespace moeserve::fairseq {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFairseqEmbedding = "decoder.embed_tokens.weight";
constexpr std::string_view kHead = "decoder.output_projection.weight";
constexpr std::string_view kPositions = "decoder.embed_positions.weight";

// Rows of learned positions before the first: fairseq's positions begin after the id of padding, 1.
constexpr int kFirstPosition = 2;

// How the names of options begin that change a model. fairseq has hundreds of other options, which
// concern training.
constexpr std::string_view kModelPrefixes[] = {
    "activation_fn", "adaptive_",   "attention_", "attn_",  "base_",     "binary_",
    "char_",         "decoder_",    "deepnorm",   "embed_", "expert",    "fc",
    "ffd_",          "ffn_",        "gate_",      "gating", "glu",       "group_",
    "head_",         "kv_",         "layernorm_", "mhmoe_", "moe_",      "n_kv_",
    "norm_",         "num_experts", "partial_",   "pos_",   "position_", "quant_",
    "rel_pos_",      "relu_",       "residual_",  "rms_",   "rope_",     "rotary_",
    "router_",       "scale_",      "shared_",    "sope_",  "subln",     "temperature_",
    "top_k",         "use_quant",   "window_",    "xpos_",
};

constexpr int kUnset = -1;  // what fairseq's options of numbers have if nobody set them

// Options that do not change the answers of any of these models: those of training, of other
// models, and some that the original code replaces by sizes of tensors.
constexpr std::string_view kReaderIgnoredOptions[] = {
    "activation_dropout",
    "adaptive_input_cutoff",
    "adaptive_input_factor",
    "adaptive_softmax_dropout",
    "adaptive_softmax_factor",
    "attention_dropout",
    "base_shuffle",
    "base_sublayers",
    "char_inputs",
    "decoder_embed_path",
    "decoder_final_norm",
    "decoder_input_dim",
    "decoder_layerdrop",
    "decoder_layers_to_keep",
    "decoder_output_dim",
    "moe_batch_prioritized_routing",
    "moe_expert_ffn_dim",
    "moe_gate_loss_combine_method",
    "moe_gate_loss_transform",
    "moe_gate_loss_wt",
    "moe_normalize_expert_grad",
    "quant_noise_pq",
    "quant_noise_pq_block_size",
    "relu_dropout",
};

// What the files of all families have in common; a family's own rules come before these.
constexpr TensorRule kDecoderTensors[] = {
    {"embed.weight", "decoder.embed_tokens.weight"},
    {"embed_position.weight", "decoder.embed_positions.weight"},
    {"embed_norm.weight", "decoder.layernorm_embedding.weight"},
    {"embed_norm.bias", "decoder.layernorm_embedding.bias"},
    {"norm.weight", "decoder.layer_norm.weight"},
    {"norm.bias", "decoder.layer_norm.bias"},
    {"head.weight", "decoder.output_projection.weight"},
    {"blocks.*.attention.norm.weight", "decoder.layers.*.self_attn_layer_norm.weight"},
    {"blocks.*.attention.norm.bias", "decoder.layers.*.self_attn_layer_norm.bias"},
    {"blocks.*.attention.q.weight", "decoder.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.q.bias", "decoder.layers.*.self_attn.q_proj.bias"},
    {"blocks.*.attention.k.weight", "decoder.layers.*.self_attn.k_proj.weight"},
    {"blocks.*.attention.k.bias", "decoder.layers.*.self_attn.k_proj.bias"},
    {"blocks.*.attention.v.weight", "decoder.layers.*.self_attn.v_proj.weight"},
    {"blocks.*.attention.v.bias", "decoder.layers.*.self_attn.v_proj.bias"},
    {"blocks.*.attention.o.weight", "decoder.layers.*.self_attn.out_proj.weight"},
    {"blocks.*.attention.out_bias", "decoder.layers.*.self_attn.out_proj.bias"},
    // The norm before the feed-forward (or after it, in post-norm models), not the last norm.
    {"blocks.*.feed_forward.norm.weight", "decoder.layers.*.final_layer_norm.weight"},
    {"blocks.*.feed_forward.norm.bias", "decoder.layers.*.final_layer_norm.bias"},
};

constexpr KeyRule kDecoderKeys[] = {
    {"vocab_size", "rows of decoder.embed_tokens.weight"},
    {"hidden_size", "decoder_embed_dim"},
    {"num_hidden_layers", "decoder_layers"},
    {"max_position_embeddings", "max_target_positions"},
    {"tie_word_embeddings", "share_decoder_input_output_embed"},
    {"embedding_norm", "layernorm_embedding"},
    {"feed_forward.width", "decoder_ffn_embed_dim"},
};

constexpr std::string_view kDecoderIgnoredTensors[] = {
    "decoder.version",
    "decoder.embed_positions._float_tensor",  // marks sinusoidal positions
    "decoder.embed_positions.weights",        // their values, in old files
};

template <typename Rule>
std::vector<Rule> Joined(std::span<const Rule> own, std::span<const Rule> common) {
  std::vector<Rule> all(own.begin(), own.end());
  all.insert(all.end(), common.begin(), common.end());
  return all;
}

class FairseqConfig final : public NameTableConfig {
 public:
  FairseqConfig(const Tables& tables, const StoredNames& stored)
      : NameTableConfig(Joined<TensorRule>(tables.tensors, kDecoderTensors),
                        Joined<KeyRule>(tables.keys, kDecoderKeys), stored) {
    ignored = Joined<std::string_view>(tables.ignored, kDecoderIgnoredTensors);
  }

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override {
    std::optional<TensorPlace> place = NameTableConfig::Place(tensor);
    if (place.has_value() && place->name == kPositions) {
      place->shape = {tensor.shape[0] + kFirstPosition, tensor.shape[1]};
      place->first_row = kFirstPosition;
      place->follows_from = Concat("[max_position_embeddings + ", kFirstPosition, ", hidden_size]");
    }
    return place;
  }

  std::optional<std::string> LeftOverReason(std::string_view name) const override {
    // Limits of quantizers, which 32 bits do not use.
    if (name.ends_with(".weight_clip_val") || name.ends_with(".input_clip_val")) {
      return std::nullopt;
    }
    return NameTableConfig::LeftOverReason(name);
  }

  // Reader::ReadHead() has looked at the data.
  std::unique_ptr<const CheckpointConfig> WithOwnHead() const override { return nullptr; }
};

}  // namespace

std::string MessagePrefix(const FairseqSource& source) {
  const std::string place(source.options.place);
  return place == kConfigFile ? place : Concat(Printable(source.file), ": ", place);
}

Reader::Reader(const FairseqSource& source)
    : source_(source),
      prefix_(MessagePrefix(source)),
      keys_(source.options.values, "", &problems_),
      decisions_(source.options.decisions) {
  for (const WeightFiles::Location& tensor : source.files.tensors()) {
    stored_.insert(tensor.entry->name);
  }
  Ignore(kReaderIgnoredOptions);
  Require("quant_noise_scalar", 0, "models with quantizers are not supported");
}

bool Reader::RequiredBool(std::string_view key) {
  keys_.Required(key, "true or false");
  return keys_.Bool(key, false);
}

void Reader::Require(std::string_view key, const Json& value, std::string_view why) {
  const Json* const found = keys_.Optional(key);
  if (found == nullptr || *found == value) return;
  Fault(key, Concat(ShowJson(value), " (", why, ')'), ShowJson(*found));
}

void Reader::Ignore(std::span<const std::string_view> keys) {
  for (const std::string_view key : keys) keys_.Optional(key);
}

const TensorEntry* Reader::Find(std::string_view tensor) const {
  const WeightFiles::Location* found = source_.files.Find(tensor);
  return found == nullptr ? nullptr : found->entry;
}

bool Reader::HasAny(std::string_view prefix) const {
  const auto it = stored_.lower_bound(prefix);
  return it != stored_.end() && it->starts_with(prefix);
}

void Reader::ReadSizes() {
  layers_ = keys_.Int("decoder_layers");
  // Every layer has tensors, so a small file cannot demand long lists of them.
  const int64_t most = std::min<int64_t>(kMaxLayers, static_cast<int64_t>(stored_.size()));
  if (ok() && (layers_ < 1 || layers_ > most)) {
    Fault("decoder_layers",
          Concat("an integer in [1, ", most, "] (the files have ", stored_.size(),
                 stored_.size() == 1 ? " tensor)" : " tensors)"),
          std::to_string(layers_));
  }
  spec_.hidden_size = keys_.Int("decoder_embed_dim");
  const bool target = keys_.Optional("max_target_positions") != nullptr;
  keys_.Optional("tokens_per_sample");
  spec_.max_position_embeddings = keys_.Int(target ? "max_target_positions" : "tokens_per_sample");

  const TensorEntry* const embedding = Find(kFairseqEmbedding);
  if (embedding == nullptr || embedding->shape.size() != 2 ||
      embedding->shape[0] > kMaxVocabulary) {
    problems_.Add(Concat("tensor ", Quoted(kFairseqEmbedding),
                         ": expected a matrix with one row per token, at most ", kMaxVocabulary,
                         ", found ",
                         embedding == nullptr ? "no such tensor" : ShapeText(embedding->shape)));
  } else {
    spec_.vocab_size = static_cast<int>(embedding->shape[0]);
  }
  spec_.bos_token_id = 0;
  spec_.eos_token_ids = {2};
  const bool scaled = !RequiredBool("no_scale_embedding");
  spec_.embedding_scale = scaled && spec_.hidden_size > 0 ? std::sqrt(spec_.hidden_size) : 1.0;
  spec_.embedding_norm = keys_.Bool("layernorm_embedding", false);
  Decide(
      "padding: the original code hides the token <pad> (id 1) from attention; here it is a token "
      "like others, so texts must not contain it");
}

PositionSpec Reader::AddedPositions() {
  PositionSpec position;
  position.kind = PositionKind::kNone;
  const bool none = RequiredBool("no_token_positional_embeddings");
  const bool learned =
      none ? keys_.Bool("decoder_learned_pos", false) : RequiredBool("decoder_learned_pos");
  if (none) return position;
  position.kind = learned ? PositionKind::kLearned : PositionKind::kSinusoidal;
  if (!learned) position.first = kFirstPosition;
  return position;
}

AttentionSpec Reader::Heads() {
  AttentionSpec attention;
  const int heads = keys_.Int("decoder_attention_heads");
  attention.num_heads = attention.num_kv_heads = heads;
  if (heads < 1 || spec_.hidden_size % heads != 0) {
    if (ok()) {
      Fault("decoder_attention_heads",
            Concat("a divisor of decoder_embed_dim, which is ", spec_.hidden_size),
            std::to_string(heads));
    }
    return attention;
  }
  attention.head_dim = spec_.hidden_size / heads;
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  return attention;
}

int Reader::IntOrUnset(std::string_view key, int fallback) {
  const int number = keys_.Int(key, fallback);
  return number == kUnset ? fallback : number;
}

void Reader::ReadHead(bool shared) {
  spec_.tie_word_embeddings = shared;
  if (!shared || !Has(kHead) || !Has(kFairseqEmbedding)) return;
  // Both are one tensor for the original code, which stores it under both names.
  const Result<bool> same =
      SameData(*source_.files.Find(kFairseqEmbedding), *source_.files.Find(kHead));
  if (!same.ok()) {
    problems_.Add(std::string(same.status().message()));
    return;
  }
  if (*same) {
    ignore_head_ = true;
    return;
  }
  spec_.tie_word_embeddings = false;
  Decide(Concat("LM head: the embedding matrix according to the options, but ", kHead,
                " has other data; the LM head is that tensor"));
}

bool Reader::CheckExperts(std::string_view key, int experts, int64_t routed) {
  int64_t most = std::min<int64_t>(kMaxExperts, kMaxExpertsOfModel / std::max<int64_t>(routed, 1));
  // Every expert is a part of a tensor, so a small file cannot demand long lists of them.
  int64_t rows = static_cast<int64_t>(stored_.size());
  for (const WeightFiles::Location& tensor : source_.files.tensors()) {
    if (tensor.entry->shape.size() == 3) rows = std::max(rows, tensor.entry->shape[0]);
  }
  most = std::min(most, rows);
  if (experts >= 1 && experts <= most) return true;
  if (ok()) {
    Fault(key, Concat("an integer in [1, ", most, "], for which the files have tensors"),
          std::to_string(experts));
  }
  return false;
}

void Reader::RefuseUnknown() {
  for (const std::string& key : keys_.Unread()) {
    const bool of_model =
        std::any_of(std::begin(kModelPrefixes), std::end(kModelPrefixes),
                    [&](std::string_view prefix) { return key.starts_with(prefix); });
    const Json& value = source_.options.values[key];
    if (!of_model || value == false || value == "" || value == kUnset) continue;
    problems_.Add(UnknownKey(key, ShowJson(value), "option"));
  }
}

ActivationKind Reader::Activation() {
  return keys_
      .Pick<ActivationKind>("activation_fn", {{"relu", ActivationKind::kRelu},
                                              {"gelu", ActivationKind::kGelu},
                                              {"gelu_accurate", ActivationKind::kGeluTanh},
                                              {"gelu_fast", ActivationKind::kGeluTanh},
                                              {"swish", ActivationKind::kSilu}})
      .value_or(ActivationKind::kRelu);
}

ConfigResult Reader::Finish(const Tables& tables, const LayerSpec& layer) {
  return Finish(tables, std::vector<LayerSpec>(ok() ? static_cast<size_t>(layers_) : 0, layer));
}

ConfigResult Reader::Finish(const Tables& tables, std::vector<LayerSpec> layers) {
  RefuseUnknown();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(prefix_));
  auto config = std::make_unique<FairseqConfig>(tables, stored_);
  if (ignore_head_) config->ignored.push_back(kHead);
  config->key_place = source_.options.place;
  config->spec = std::move(spec_);
  for (LayerSpec& layer : layers) config->spec.AddLayer(std::move(layer));
  config->decisions = std::move(decisions_);
  const absl::Status valid = Validate(config->spec);
  if (!valid.ok()) {
    const std::string message(valid.message());
    return absl::Status(valid.code(), Concat(prefix_, ": ", config->AsInFile(message)));
  }
  return config;
}

}  // namespace moeserve::fairseq
