#include "model_loaders/architectures/gguf/gguf_config.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_encoders.h"
#include "model_loaders/architectures/gguf/gguf_families.h"
#include "model_loaders/architectures/gguf/gguf_keys.h"
#include "model_loaders/architectures/gguf/gguf_reader.h"
#include "model_loaders/architectures/gguf/gguf_tensors.h"

namespace moeserve {
namespace {

constexpr int kMaxNextTokenLayers = 8;
// Of latent attention, in all layers. Every head has tensors of its own in the model, so this
// bounds the memory for the lists of them; published models have less than 10000.
constexpr int64_t kMaxLatentHeads = 1 << 16;

}  // namespace

GgufConfigReader::GgufConfigReader(const GgufFile& file, const WeightFiles& weights,
                                   const GgufFamily& family,
                                   const std::vector<std::string>& ignored, bool predictions)
    : GgufModelReader(file, weights, family.name, ignored), family_(family) {
  stored_.predictions = predictions;
}

void GgufConfigReader::ReadLayerCounts() {
  const int blocks = layers_;
  if (family_.counts_next_token_layers) {
    constexpr std::string_view kKey = ".nextn_predict_layers";
    next_token_layers_ = keys_.Int(kKey, 0);
    const int64_t most_next = std::min<int64_t>(kMaxNextTokenLayers, int64_t{blocks} - 1);
    if (problems_.empty() && (next_token_layers_ < 0 || next_token_layers_ > most_next)) {
      keys_.Fault(kKey,
                  Concat("an integer in [0, ", most_next, "] (", keys_.NameOf(".block_count"),
                         " is ", blocks, ')'),
                  std::to_string(next_token_layers_));
    }
  }
  if (!problems_.empty()) next_token_layers_ = 0;
  layers_ = blocks - next_token_layers_;
  if (family_.norms == GgufFamily::Norms::kBoth) spec_.norm.placement = NormPlacement::kBoth;
  if (family_.layer_norms) spec_.norm.kind = NormKind::kLayer;
  if (family_.grouped_norms) spec_.norm.groups = keys_.Int(".attention.group_norm_groups", 1);
  spec_.head_bias = family_.layer_norms && Has("output.bias");
  spec_.tie_word_embeddings = !Has("output.weight");
  spec_.layer_scale = family_.layer_scales && Has("blk.0.layer_output_scale.weight");
}

void GgufConfigReader::ReadFactors() {
  if (family_.root_embedding_scale && spec_.hidden_size > 0) {
    spec_.embedding_scale = std::sqrt(static_cast<double>(spec_.hidden_size));
  }
  if (family_.soft_caps) {
    spec_.logit_soft_cap = keys_.Real(".final_logit_softcapping", family_.logit_cap);
  }
  if (family_.plain_logit_scale) spec_.logit_scale = keys_.Real(".logit_scale");
  if (!family_.granite_factors) return;
  // 0 stands for "not set".
  const auto factor = [&](std::string_view key) {
    const double value = keys_.Real(key, 0.0);
    return value == 0.0 ? 1.0 : value;
  };
  spec_.embedding_scale = factor(".embedding_scale");
  spec_.residual_scale = factor(".residual_scale");
  spec_.logit_scale = 1.0 / factor(".logit_scale");
}

AttentionSpec GgufConfigReader::ReadAttention() {
  AttentionSpec attention = ReadHeads({.head_dim = head_dim_key_,
                                       .heads = First(heads_),
                                       .kv_heads = heads_.empty() ? kv_heads_ : First(kv_lists_),
                                       .value_widths = family_.value_widths});
  const std::optional<int> layer = FirstOf(LayerKind::kAttention);
  const int derived = attention.num_heads > 0 ? spec_.hidden_size / attention.num_heads : 0;
  const double scale = keys_.Real(".attention.scale", 0.0);
  if (scale != 0.0) {
    attention.scale = scale;
  } else if (derived > 0 && layers_ == family_.derived_scale_layers) {
    attention.scale = 1.0 / std::sqrt(derived);
  } else if (family_.fixed_scale != 0.0) {
    attention.scale = family_.fixed_scale;
  }
  attention.bias =
      family_.always_biased || HasIn(layer, "attn_q.bias") || HasIn(layer, "attn_qkv.bias");
  attention.out_bias = HasIn(layer, "attn_output.bias");
  const bool gated = family_.gated && (!family_.gate_optional || HasIn(layer, "attn_gate.weight"));
  attention.gate = gated || family_.gated_queries;
  attention.gate_activation = family_.gate_activation;
  attention.gate_per_head = family_.head_gates;
  const bool unnormed =
      family_.unnormed_experts > 0 && keys_.Int(".expert_count", 0) == family_.unnormed_experts;
  if (!unnormed && (!family_.qk_norm_optional || HasIn(layer, "attn_q_norm.weight"))) {
    attention.qk_norm = family_.qk_norm;
  }
  attention.value_norm = family_.value_norm;
  if (family_.value_widths) {
    attention.value_scale = keys_.Real(".attention.value_scale", 1.0);
  }
  attention.qk_norm_after_rope = family_.qk_norm_after_rope;
  attention.sinks = family_.sinks;
  if (family_.soft_caps) {
    attention.soft_cap = keys_.Real(".attn_logit_softcapping", family_.attention_cap);
  }
  return attention;
}

// Newer files describe latent attention as attention with one kv head, whose keys are the latent
// vector with the rotated part and whose values are the latent vector; the sizes of the heads that
// the model was trained with are in keys that end with "_mla". Older files have the latter in the
// usual keys.
AttentionSpec GgufConfigReader::ReadLatentAttention() {
  AttentionSpec attention;
  attention.num_heads = keys_.Int(".attention.head_count");
  attention.num_kv_heads = attention.num_heads;
  if (problems_.empty() && int64_t{attention.num_heads} * layers_ > kMaxLatentHeads) {
    keys_.Fault(".attention.head_count",
                Concat("at most ", kMaxLatentHeads, " heads in all layers"),
                Concat(attention.num_heads, " in each of ", layers_));
  }
  LatentSpec latent;
  latent.rank = keys_.Int(".attention.kv_lora_rank");
  latent.query_rank = keys_.Int(".attention.q_lora_rank", 0);
  latent.rope_dim = keys_.Int(".rope.dimension_count");
  if (keys_.Find(".attention.key_length_mla") != nullptr) {
    head_dim_key_ = ".attention.key_length_mla";
    latent.value_dim = keys_.Int(".attention.value_length_mla");
    // Says nothing about numbers that follow from wrong ones.
    const auto require = [&](std::string_view key, double value) {
      if (problems_.empty()) {
        keys_.Require(key, value);
      } else {
        keys_.Ignore(key);
      }
    };
    require(".attention.key_length", static_cast<double>(latent.rank) + latent.rope_dim);
    if (kv_heads_.has_value()) {
      // Converters write what the width of heads in some configurations is.
      keys_.Ignore(".attention.value_length");
      if (kv_heads_ != 1) keys_.Fault(".attention.head_count_kv", "1", std::to_string(*kv_heads_));
    } else {
      require(".attention.value_length", latent.rank);
      require(".attention.head_count_kv", 1);
    }
  } else {
    latent.value_dim = keys_.Int(".attention.value_length");
    if (!kv_heads_.has_value()) {
      keys_.Require(".attention.head_count_kv", attention.num_heads);
    } else if (kv_heads_ != attention.num_heads) {
      keys_.Fault(".attention.head_count_kv", std::to_string(attention.num_heads),
                  std::to_string(*kv_heads_));
    }
  }
  attention.head_dim = keys_.Int(head_dim_key_);
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  attention.latent = latent;
  attention.gate = attention.gate_per_head = family_.gated;
  return attention;
}

// Tokens see the whole text if the file or the architecture says so.
void GgufConfigReader::ReadHead() {
  constexpr std::string_view kCausal = ".attention.causal";
  const bool causal = keys_.Bool(kCausal, !family_.bidirectional);
  const bool possible =
      causal ? !family_.bidirectional : family_.bidirectional || !family_.window_period.has_value();
  if (!possible) {
    keys_.Fault(kCausal, causal ? "false" : "true",
                Concat(causal ? "true" : "false", ", which this server does not support here"));
  }
  if (!causal) spec_.kind = ModelKind::kEncoder;
  ReadTextHead({.generates = causal, .scored = PoolingKind::kFirst, .layer = {}});
  if (family_.bidirectional) ReadDenseModules();
}

// The dense layers behind the pooling of EmbeddingGemma.
void GgufConfigReader::ReadDenseModules() {
  int width = spec_.hidden_size;
  for (const char* module : {"dense_2", "dense_3"}) {
    const std::string in = Concat('.', module, "_feat_in");
    const std::string out = Concat('.', module, "_feat_out");
    const WeightFiles::Location* const found = weights_.Find(Concat(module, ".weight"));
    if (found == nullptr) {
      for (const std::string& key : {in, out}) {
        if (keys_.Find(key) == nullptr) continue;
        keys_.Fault(key, Concat("a tensor \"", module, ".weight\" of this size"), "no such tensor");
      }
      continue;
    }
    const std::vector<int64_t>& shape = found->entry->shape;
    if (shape.size() != 2 || shape[0] > kMaxWidth || shape[1] != width) {
      problems_.Add(Concat("tensor \"", module, ".weight\": expected a matrix with ", width,
                           " columns, found ", ShapeText(shape)));
      return;
    }
    for (const auto& [key, size] : {std::pair(in, shape[1]), std::pair(out, shape[0])}) {
      const int stated = keys_.Int(key, static_cast<int>(size));
      if (stated != size) {
        keys_.Fault(key, Concat(size, " (", module, ".weight is ", ShapeText(shape), ')'),
                    std::to_string(stated));
      }
    }
    width = static_cast<int>(shape[0]);
    if (!spec_.pooling.has_value()) continue;
    spec_.pooling->dense.push_back(
        {.width = width, .activation = ActivationKind::kNone, .bias = false});
  }
}

void GgufConfigReader::RefuseSettings() {
  keys_.Ignore(".tensor_data_layout");
  keys_.Ignore(".n_deepstack_layers");  // of image tokens
  // Converters write the eps of Nemotron's norms under both names.
  if (family_.norms == GgufFamily::Norms::kOne) keys_.Ignore(".attention.layer_norm_epsilon");
  // Parts of models that are not computed.
  for (const char* key : {".attention.shared_kv_layers", ".embedding_length_per_layer_input"}) {
    keys_.Require(key, 0);
  }
  for (const char* key :
       {".attention.max_alibi_bias", ".attention.clamp_kqv", ".use_parallel_residual"}) {
    keys_.Require(key, 0);
  }
  keys_.RefuseOthers();
}

// As long as there are no more keys than an indexer chooses, all of them count.
void GgufConfigReader::ReadIndexer() {
  if (!family_.indexed) return;
  constexpr std::string_view kChosen = ".attention.indexer.top_k";
  const int chosen = keys_.Int(kChosen);
  if (chosen < 1 && keys_.Find(kChosen) != nullptr)
    keys_.Fault(kChosen, "an integer of at least 1", std::to_string(chosen));
  for (const char* key : {"head_count", "key_length", "types"}) {
    keys_.Ignore(Concat(".attention.indexer.", key));
  }
  if (chosen >= spec_.max_position_embeddings) return;
  spec_.max_position_embeddings = chosen;
  context_reason_ = Concat("sparse attention beyond ", keys_.NameOf(kChosen), " is not computed");
}

// All keys were read without errors.
std::unique_ptr<GgufConfig> GgufConfigReader::Assemble(const AttentionSpec& attention) const {
  const bool predicts = HasPrediction();
  auto config = std::make_unique<GgufConfig>(family_, stored_, head_dim_key_,
                                             predicts && stored_.predictions ? layers_ : -1);
  config->spec = spec_;
  ModelSpec& spec = config->spec;
  // With all dimensions rotated, or none, the rows can be put into the order of other formats,
  // which makes the results equal to theirs to the last bit.
  const bool whole = spec.position.kind == PositionKind::kNone || spec.position.fraction == 1.0;
  if (family_.pairs == GgufFamily::Pairs::kPermuted && whole && attention.head_dim % 2 == 0) {
    config->paired_rows = attention.head_dim;
  } else if (family_.pairs != GgufFamily::Pairs::kHalves) {
    spec.position.pairing = RopePairing::kInterleaved;
  }
  const WeightFiles::Location* gate = weights_.Find("blk.0.ffn_gate_inp_shexp.weight");
  config->reversed_scores = reversed_scores_;
  config->vector_gate = gate == nullptr || gate->entry->shape.size() == 1;
  config->context_reason = context_reason_;
  for (int i = 0; i < next_token_layers_; ++i) {
    config->ignored_prefixes.push_back(Concat("blk.", layers_ + i, '.'));
  }
  for (int i = 0; i < layers_; ++i) {
    spec.AddLayer(Layer(i, attention));
    if (family_.norms != GgufFamily::Norms::kShared) continue;
    BlockSpec& second = spec.blocks.back();
    second.residual.parallel = true;
    // The sum of routed and shared experts is halved.
    const FeedForwardSpec& network = *second.feed_forward();
    if (network.routed() && network.shared_width > 0) second.residual.scale = 0.5;
  }
  if (predicts && stored_.predictions) {
    ModelSpec prediction = PredictionOf(spec);
    prediction.AddLayer(Layer(layers_ - 1, attention));
    for (BlockSpec& block : prediction.blocks) block.stack = Stack::kPrediction;
    spec.prediction = std::make_shared<const ModelSpec>(std::move(prediction));
  } else if (predicts) {
    config->decisions.emplace_back(kPredictionsLeft);
    config->prediction_prefix = Concat("blk.", layers_, '.');
  }
  return config;
}

// A prediction layer is like the last layer. Files of families whose layers differ are not known
// to have any.
bool GgufConfigReader::HasPrediction() const {
  if (next_token_layers_ == 0 || !heads_.empty() || !limits_.empty() || layers_ < 1) return false;
  if (kinds_[static_cast<size_t>(layers_) - 1] != LayerKind::kAttention) return false;
  return HasIn(layers_, "nextn.eh_proj.weight") && HasIn(layers_, "nextn.shared_head_norm.weight");
}

ConfigResult GgufConfigReader::Read() {
  constexpr std::string_view kLayerEps = ".attention.layer_norm_epsilon";
  const bool layer_norms = family_.plain_layer_norms && keys_.Find(kLayerEps) != nullptr;
  ReadSizes(layer_norms ? kLayerEps : ".attention.layer_norm_rms_epsilon");
  if (layer_norms) {
    spec_.norm.kind = NormKind::kLayer;
    spec_.norm.bias = false;
  }
  ReadLayerCounts();
  ReadTokenIds();
  ReadFactors();
  ReadMixers();
  ReadLayerHeads();
  AttentionSpec attention = family_.latent ? ReadLatentAttention() : ReadAttention();
  ReadPosition(attention.rope_width());
  attention.scale *= score_factor_;
  ReadWindows(attention.head_dim);
  ReadQueryScale();
  ReadIndexer();
  ReadFeedForward();
  ReadValueExperts();
  ReadHead();
  RefuseSettings();
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(Prefix()));

  return Finish(Assemble(attention));
}

ConfigResult ReadGgufConfig(const GgufFile& file, const WeightFiles& weights,
                            const std::vector<std::string>& ignored, bool predictions) {
  Problems problems;
  GgufKeys keys(file, "", &problems, &ignored);
  const std::string prefix = Concat(Printable(file.file_name()), ": ", kGgufMetadata);
  const std::string_view kind = keys.Text("general.type").value_or("model");
  if (kind != "model") keys.Fault("general.type", "\"model\"", Quoted(kind));
  const std::optional<std::string_view> name = keys.Text("general.architecture");
  const GgufFamily* const family = FindGgufFamily(name.value_or(""));
  const bool encoder = std::ranges::find(kGgufEncoderNames, name) != std::end(kGgufEncoderNames);
  if (family == nullptr && !encoder) {
    keys.Fault("general.architecture", GgufFamilyNames(),
               name.has_value() ? Quoted(*name) : "none");
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(prefix));
  if (family != nullptr) {
    return GgufConfigReader(file, weights, *family, ignored, predictions).Read();
  }
  const bool t5 = *name == kGgufT5 || *name == kGgufT5Encoder;
  return (t5 ? ReadGgufT5 : ReadGgufEncoder)(file, weights, *name, ignored);
}

}  // namespace moeserve
