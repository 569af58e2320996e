#include "model_loaders/architectures/fairseq/reader.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/spec/spec_limits.h"

namespace moeserve::fairseq {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kEmbedding = "embed_tokens.weight";
constexpr std::string_view kHead = "output_projection.weight";
constexpr std::string_view kHeads = "classification_heads.";

// fairseq's positions begin after the id of padding.
constexpr int kPadId = 1;
constexpr int kFirstPosition = 2;
// The length of texts where no option states it.
constexpr int kDefaultPositions = 1024;
// The head of masked tokens does not read "layernorm_eps".
constexpr float kHeadEps = 1e-5f;

// How the names of options begin that change a model. fairseq has hundreds of other options, which
// concern training.
constexpr std::string_view kModelPrefixes[] = {
    "activation_fn", "adaptive_",  "attention_", "attn_",     "base_",        "binary_",
    "char_",         "deepnorm",   "embed_",     "expert",    "fc",           "ffd_",
    "ffn_",          "gate_",      "gating",     "glu",       "group_",       "head_",
    "kv_",           "layernorm_", "mhmoe_",     "moe_",      "n_kv_",        "norm_",
    "num_experts",   "partial_",   "pos_",       "position_", "quant_",       "rel_pos_",
    "relu_",         "residual_",  "rms_",       "rope_",     "rotary_",      "router_",
    "scale_",        "shared_",    "sope_",      "subln",     "temperature_", "top_k",
    "use_quant",     "window_",    "xpos_",
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
    "encoder_embed_path",
    "encoder_final_norm",
    "encoder_input_dim",
    "encoder_layerdrop",
    "encoder_layers_to_keep",
    "encoder_output_dim",
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
    stored_.names.insert(tensor.entry->name);
  }
  set_.encoder = HasAny("encoder.");
  set_.decoder = HasAny("decoder.") || !set_.encoder;
  current_ = set_.decoder ? &decoder_ : &encoder_;
  Ignore(kReaderIgnoredOptions);
  Require("quant_noise_scalar", 0, "models with quantizers are not supported");
}

std::vector<std::string_view> Reader::stacks() const {
  std::vector<std::string_view> names;
  if (set_.encoder) names.push_back(kEncoderName);
  if (set_.decoder) names.push_back(kDecoderName);
  return names;
}

void Reader::Use(std::string_view stack) {
  current_ = stack == kEncoderName ? &encoder_ : &decoder_;
}

void Reader::SetLayers(const std::vector<BlockSpec>& layer) {
  current_->blocks.assign(ok() ? static_cast<size_t>(layers()) : 0, layer);
}

void Reader::Decide(std::string_view sentence) {
  if (std::ranges::find(decisions_, sentence) == decisions_.end())
    decisions_.emplace_back(sentence);
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
  const auto it = stored_.names.lower_bound(prefix);
  return it != stored_.names.end() && it->starts_with(prefix);
}

void Reader::ReadSizes() {
  for (const std::string_view stack : stacks()) {
    Use(stack);
    ReadStackSizes();
  }
  Use(set_.decoder ? kDecoderName : kEncoderName);
  ModelSpec& spec = current_->spec;
  if (set_.decoder) {
    spec.bos_token_id = 0;
    spec.eos_token_ids = {2};
  }
  if (set_.encoder) {
    // A text of padding has no sense for an encoder, so requests with it are refused.
    for (StackOptions* const stack : {&encoder_, &decoder_}) stack->spec.pad_token_id = kPadId;
  } else {
    Decide(
        "padding: the original code hides the token <pad> (id 1) from attention; here it is a "
        "token like others, so texts must not contain it");
  }
  if (!pair()) return;
  spec.decoder_start_token_id = 2;
  if (ok() && encoder_.spec.hidden_size != decoder_.spec.hidden_size) {
    Fault("encoder_embed_dim",
          Concat(decoder_.spec.hidden_size, " (decoder_embed_dim; attention to rows of another ",
                 "width is not supported)"),
          std::to_string(encoder_.spec.hidden_size));
  }
  ReadSharedTables();
}

void Reader::ReadStackSizes() {
  ModelSpec& spec = current_->spec;
  const std::string layers_key = Key("layers");
  int& layers = current_->layers;
  layers = keys_.Int(layers_key);
  // Every layer has tensors, so a small file cannot demand long lists of them.
  const int64_t most = std::min<int64_t>(kMaxLayers, static_cast<int64_t>(stored_.names.size()));
  if (ok() && (layers < 1 || layers > most)) {
    Fault(layers_key,
          Concat("an integer in [1, ", most, "] (the files have ", stored_.names.size(),
                 stored_.names.size() == 1 ? " tensor)" : " tensors)"),
          std::to_string(layers));
  }
  spec.hidden_size = keys_.Int(Key("embed_dim"));
  const std::string_view longest = in_encoder() ? "max_source_positions" : "max_target_positions";
  const bool given = keys_.Optional(longest) != nullptr;
  const bool sample = keys_.Optional("tokens_per_sample") != nullptr && !pair();
  if (set_.encoder && !given && !sample) {
    spec.max_position_embeddings = kDefaultPositions;
  } else {
    spec.max_position_embeddings = keys_.Int(given ? longest : "tokens_per_sample");
  }
  const bool scaled = !RequiredBool("no_scale_embedding");
  spec.embedding_scale = scaled && spec.hidden_size > 0 ? std::sqrt(spec.hidden_size) : 1.0;
  spec.embedding_norm = keys_.Bool("layernorm_embedding", false);
  // With one table of both stacks, files may have it once.
  std::string table = Tensor(kEmbedding);
  if (pair() && !Has(table) && keys_.Bool("share_all_embeddings", false)) {
    table = Concat(in_encoder() ? kDecoderName : kEncoderName, '.', kEmbedding);
  }
  spec.vocab_size = ReadVocabulary(table);
}

int Reader::ReadVocabulary(const std::string& tensor) {
  const TensorEntry* const embedding = Find(tensor);
  if (embedding != nullptr && embedding->shape.size() == 2 &&
      embedding->shape[0] <= kMaxVocabulary) {
    return static_cast<int>(embedding->shape[0]);
  }
  problems_.Add(Concat("tensor ", Quoted(tensor),
                       ": expected a matrix with one row per token, at most ", kMaxVocabulary,
                       ", found ",
                       embedding == nullptr ? "no such tensor" : ShapeText(embedding->shape)));
  return 0;
}

bool Reader::Same(const std::string& a, const std::string& b) {
  const Result<bool> same = SameData(*source_.files.Find(a), *source_.files.Find(b));
  if (same.ok()) return *same;
  problems_.Add(std::string(same.status().message()));
  return true;
}

void Reader::ReadSharedTables() {
  bool& shared = set_.shared_embeddings;
  shared = keys_.Bool("share_all_embeddings", false);
  const std::string encoder = Concat(kEncoderName, '.', kEmbedding);
  const std::string decoder = Concat(kDecoderName, '.', kEmbedding);
  if (shared && Has(encoder) && Has(decoder) && !Same(encoder, decoder)) {
    shared = false;
    Decide(Concat("embeddings: one matrix for both stacks according to share_all_embeddings, but ",
                  encoder, " and ", decoder, " differ; both are used"));
  }
  encoder_.spec.share_embeddings = decoder_.spec.share_embeddings = shared;
}

PositionSpec Reader::AddedPositions() {
  PositionSpec position;
  position.kind = PositionKind::kNone;
  const bool none = RequiredBool("no_token_positional_embeddings");
  const bool learned =
      none ? keys_.Bool(Key("learned_pos"), false) : RequiredBool(Key("learned_pos"));
  if (none) return position;
  position.kind = learned ? PositionKind::kLearned : PositionKind::kSinusoidal;
  if (!learned) position.first = kFirstPosition;
  position.count_padding = !set_.encoder;
  return position;
}

AttentionSpec Reader::Heads() {
  AttentionSpec attention;
  const std::string key = Key("attention_heads");
  const int heads = keys_.Int(key);
  attention.num_heads = attention.num_kv_heads = heads;
  const int width = spec().hidden_size;
  if (heads < 1 || width % heads != 0) {
    if (ok()) {
      Fault(key, Concat("a divisor of ", Key("embed_dim"), ", which is ", width),
            std::to_string(heads));
    }
    return attention;
  }
  attention.head_dim = width / heads;
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  return attention;
}

int Reader::IntOrUnset(std::string_view key, int fallback) {
  const int number = keys_.Int(key, fallback);
  return number == kUnset ? fallback : number;
}

void Reader::RequireCrossAttention() {
  Require("no_cross_attention", false, "a decoder beside an encoder attends to it");
  Require("cross_self_attention", false, "attention to both texts at once is not supported");
}

void Reader::ReadHead(ActivationKind activation) {
  Use(set_.decoder ? kDecoderName : kEncoderName);
  if (set_.decoder) {
    ReadDecoderHead();
    return;
  }
  spec().kind = ModelKind::kEncoder;
  std::vector<std::string> heads;
  for (auto it = stored_.names.lower_bound(kHeads);
       it != stored_.names.end() && it->starts_with(kHeads); ++it) {
    const std::string_view rest = std::string_view(*it).substr(kHeads.size());
    std::string name(rest.substr(0, rest.find('.')));
    if (heads.empty() || heads.back() != name) heads.push_back(std::move(name));
  }
  if (heads.size() == 1) {
    ReadClassifier(heads[0]);
    return;
  }
  if (heads.size() > 1) {
    set_.ignores_classifiers = true;
    Decide(Concat("head: that of masked tokens; the files also have ", heads.size(),
                  " heads of classification, of which a model can have one"));
  }
  ReadTokenHead(activation);
}

void Reader::ReadDecoderHead() {
  ModelSpec& spec = current_->spec;
  const bool all = keys_.Bool("share_all_embeddings", false);
  const bool shared = keys_.Bool("share_decoder_input_output_embed", false) || all;
  const std::string head = Tensor(kHead), embedding = Tensor(kEmbedding);
  // With a table of its own, the decoder has the head as a second tensor with the same data.
  const bool own_table = pair() && !set_.shared_embeddings;
  spec.tie_word_embeddings = shared && !own_table;
  set_.head_is_embedding = shared && own_table;
  if (!shared || !Has(head)) return;
  // Both are one tensor for the original code, which stores it under both names.
  const std::string table = Has(embedding) ? embedding : Concat(kEncoderName, '.', kEmbedding);
  if (!Has(table)) return;
  if (Same(table, head)) {
    set_.ignores_head = true;
    return;
  }
  spec.tie_word_embeddings = set_.head_is_embedding = false;
  Decide(Concat("LM head: the embedding matrix according to the options, but ", head,
                " has other data; the LM head is that tensor"));
}

void Reader::ReadTokenHead(ActivationKind activation) {
  ModelSpec& spec = current_->spec;
  const std::string head = Tensor(kHead), embedding = Tensor(kEmbedding);
  spec.head.kind = HeadKind::kMaskedLm;
  spec.head_bias = Has(Tensor("output_projection.bias"));
  const bool layer = Has(Tensor("output_projection.dense.weight"));
  if (layer) {
    const float eps = spec.norm.outer_eps.value_or(spec.norm.eps);
    if (eps != kHeadEps && spec.embedding_norm) {
      Fault("layernorm_eps",
            "1e-05 (the head of masked tokens has a norm with this eps, and the norm of the "
            "embeddings has the same one)",
            ShowJson(Json(eps)));
    }
    if (spec.norm.eps != kHeadEps) spec.norm.outer_eps = kHeadEps;
    spec.head.layer = HeadLayerSpec{.activation = activation,
                                    .bias = Has(Tensor("output_projection.dense.bias")),
                                    .norm = Has(Tensor("output_projection.layer_norm.weight"))};
  }
  // The layer and the matrix come together; the matrix is then always that of the embeddings.
  const bool shared = keys_.Bool("share_encoder_input_output_embed", layer) || layer;
  spec.tie_word_embeddings = shared;
  if (!shared || !Has(head) || !Has(embedding)) return;
  if (Same(embedding, head)) {
    set_.ignores_head = true;
    return;
  }
  spec.tie_word_embeddings = false;
  Decide(Concat("head: ", head, ", whose data are others than those of the embedding matrix"));
}

void Reader::ReadClassifier(const std::string& name) {
  ModelSpec& spec = current_->spec;
  const std::string prefix = Concat(kHeads, name, '.');
  const std::string matrix = prefix + "out_proj.weight";
  const TensorEntry* const out = Find(matrix);
  if (out == nullptr || out->shape.size() != 2 || out->shape[0] < 1 || out->shape[0] > kMaxLabels) {
    problems_.Add(Concat("tensor ", Quoted(matrix), ": expected a matrix with 1 to ", kMaxLabels,
                         " rows, one for each label, found ",
                         out == nullptr ? "no such tensor" : ShapeText(out->shape)));
    return;
  }
  spec.head.kind = HeadKind::kSequenceClassification;
  for (int64_t i = 0; i < out->shape[0]; ++i) spec.head.labels.push_back(Concat("LABEL_", i));
  spec.head.bias = Has(prefix + "out_proj.bias");
  spec.pooling = PoolingSpec{.kind = PoolingKind::kFirst, .dense = {}, .normalize = false};
  const auto activation = keys_.Pick<ActivationKind>("pooler_activation_fn",
                                                     {{"tanh", ActivationKind::kTanh},
                                                      {"relu", ActivationKind::kRelu},
                                                      {"gelu", ActivationKind::kGelu}},
                                                     ActivationKind::kRelu);
  spec.head.layer = HeadLayerSpec{.activation = activation.value_or(ActivationKind::kRelu),
                                  .bias = Has(prefix + "dense.bias")};
  set_.classifier = name;
  set_.ignores_token_head = true;
  Decide(Concat("head: classification of texts by ", Quoted(Printable(name, 64)),
                ", whose labels no file names"));
}

bool Reader::CheckExperts(std::string_view key, int experts, int64_t routed) {
  int64_t most = std::min<int64_t>(kMaxExperts, kMaxExpertsOfModel / std::max<int64_t>(routed, 1));
  // Every expert is a part of a tensor, so a small file cannot demand long lists of them.
  int64_t rows = static_cast<int64_t>(stored_.names.size());
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
        (set_.decoder && key.starts_with("decoder_")) ||
        (set_.encoder && key.starts_with("encoder_")) ||
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

absl::Status Reader::AddBlocks(StackOptions& stack) {
  for (size_t i = 0; i < stack.blocks.size(); ++i) {
    for (BlockSpec& block : stack.blocks[i]) {
      block.layer = static_cast<int>(i);
      block.stack = stack.spec.stack;
      stack.spec.blocks.push_back(std::move(block));
    }
  }
  if (!stack.spec.blocks.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(prefix_, ": expected layers, found none"));
}

ConfigResult Reader::Finish(const Tables& tables) {
  RefuseUnknown();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(prefix_));
  if (pair()) {
    encoder_.spec.stack = Stack::kEncoder;
    encoder_.spec.kind = ModelKind::kEncoder;
    encoder_.spec.head.kind = HeadKind::kNone;
    decoder_.spec.stack = Stack::kDecoder;
    decoder_.spec.kind = ModelKind::kEncoderDecoder;
  }
  for (StackOptions* const stack : {&encoder_, &decoder_}) {
    if (stack == &encoder_ ? set_.encoder : set_.decoder) {
      MOESERVE_RETURN_IF_ERROR(AddBlocks(*stack));
    }
  }
  std::unique_ptr<NameTableConfig> config = MakeFairseqConfig(tables, set_, stored_);
  config->key_place = source_.options.place;
  config->spec = std::move((set_.decoder ? decoder_ : encoder_).spec);
  if (pair()) config->spec.encoder = std::make_shared<const ModelSpec>(std::move(encoder_.spec));
  config->decisions = std::move(decisions_);
  const auto language = [&](const char* key) {
    const auto found = source_.options.values.find(key);
    const bool text = found != source_.options.values.end() && found->is_string();
    return text ? found->get<std::string>() : std::string();
  };
  config->source_language = language(kSourceLanguage);
  config->target_language = language(kTargetLanguage);
  const absl::Status valid = Validate(config->spec);
  if (!valid.ok()) {
    const std::string message(valid.message());
    return absl::Status(valid.code(), Concat(prefix_, ": ", config->AsInFile(message)));
  }
  return config;
}

}  // namespace moeserve::fairseq
