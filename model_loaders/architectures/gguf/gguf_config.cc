#include "model_loaders/architectures/gguf/gguf_config.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"
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
constexpr std::string_view kWindow = ".attention.sliding_window";

}  // namespace

GgufConfigReader::GgufConfigReader(const GgufFile& file, const WeightFiles& weights,
                                   const GgufFamily& family,
                                   const std::vector<std::string>& ignored)
    : file_(file),
      weights_(weights),
      family_(family),
      keys_(file, family.name, &problems_, &ignored) {
  for (const WeightFiles::Location& tensor : weights.tensors()) {
    stored_.insert(tensor.entry->name);
  }
}

void GgufConfigReader::ReadSizes() {
  const int blocks = keys_.Int(".block_count");
  // Every layer has tensors, so a small file cannot demand long lists of them.
  const int64_t most = std::min<int64_t>(kMaxLayers, static_cast<int64_t>(stored_.size()));
  if (problems_.empty() && (blocks < 1 || blocks > most)) {
    keys_.Fault(".block_count",
                Concat("an integer in [1, ", most, "] (the files have ", stored_.size(),
                       stored_.size() == 1 ? " tensor)" : " tensors)"),
                std::to_string(blocks));
  }
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
  if (problems_.empty()) layers_ = blocks - next_token_layers_;
  spec_.hidden_size = keys_.Int(".embedding_length");
  spec_.max_position_embeddings = keys_.Int(".context_length");
  spec_.norm.eps = static_cast<float>(keys_.Real(".attention.layer_norm_rms_epsilon"));
  if (family_.norms == GgufFamily::Norms::kBoth) spec_.norm.placement = NormPlacement::kBoth;
  spec_.tie_word_embeddings = !Has("output.weight");
  const WeightFiles::Location* const embedding = weights_.Find("token_embd.weight");
  const int64_t rows = embedding == nullptr ? 0 : embedding->entry->shape.front();
  spec_.vocab_size = keys_.Int(".vocab_size", rows > 0 && rows <= kMaxVocabulary
                                                  ? std::optional(static_cast<int>(rows))
                                                  : std::nullopt);
}

void GgufConfigReader::ReadTokenIds() {
  spec_.bos_token_id = keys_.OptionalInt("tokenizer.ggml.bos_token_id");
  // The ids that end a text, a turn and a message.
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                          "tokenizer.ggml.eom_token_id"}) {
    const std::optional<int> id = keys_.OptionalInt(key);
    std::vector<int32_t>& ids = spec_.eos_token_ids;
    if (id.has_value() && std::find(ids.begin(), ids.end(), *id) == ids.end()) ids.push_back(*id);
  }
}

void GgufConfigReader::ReadFactors() {
  if (family_.root_embedding_scale && spec_.hidden_size > 0) {
    spec_.embedding_scale = std::sqrt(static_cast<double>(spec_.hidden_size));
  }
  if (family_.soft_caps) {
    spec_.logit_soft_cap = keys_.Real(".final_logit_softcapping", family_.logit_cap);
  }
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
  AttentionSpec attention;
  attention.num_heads = keys_.Int(".attention.head_count");
  attention.num_kv_heads = keys_.Int(".attention.head_count_kv", attention.num_heads);
  const int derived = attention.num_heads > 0 ? spec_.hidden_size / attention.num_heads : 0;
  attention.head_dim = keys_.Int(head_dim_key_, derived);
  keys_.Require(".attention.value_length", attention.head_dim);
  const double scale = keys_.Real(".attention.scale", 0.0);
  if (scale != 0.0) {
    attention.scale = scale;
  } else if (derived > 0 && layers_ == family_.derived_scale_layers) {
    attention.scale = 1.0 / std::sqrt(derived);
  } else if (attention.head_dim > 0) {
    attention.scale = 1.0 / std::sqrt(attention.head_dim);
  }
  attention.bias = family_.always_biased || Has("blk.0.attn_q.bias") || Has("blk.0.attn_qkv.bias");
  attention.out_bias = Has("blk.0.attn_output.bias");
  if (!family_.qk_norm_optional || Has("blk.0.attn_q_norm.weight")) {
    attention.qk_norm = family_.qk_norm;
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
    require(".attention.value_length", latent.rank);
    require(".attention.head_count_kv", 1);
  } else {
    latent.value_dim = keys_.Int(".attention.value_length");
    keys_.Require(".attention.head_count_kv", attention.num_heads);
  }
  attention.head_dim = keys_.Int(head_dim_key_);
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  attention.latent = latent;
  return attention;
}

void GgufConfigReader::ReadWindows() {
  if (!family_.window_period.has_value()) {
    keys_.Require(kWindow, 0);
    return;
  }
  const int window = keys_.Int(kWindow, family_.default_window);
  if (window != 0) window_ = window;
  constexpr std::string_view kPeriod = ".attention.sliding_window_pattern";
  window_period_ = keys_.Int(kPeriod, *family_.window_period);
  if (window_period_ < 0) {
    keys_.Fault(kPeriod, "an integer of at least 0", std::to_string(window_period_));
  }
  if (!family_.window_theta.has_value()) return;
  PositionSpec position = spec_.position;
  position.theta = keys_.Real(".rope.freq_base_swa", family_.window_theta);
  position.scaling = RopeScaling();
  window_position_ = std::move(position);
}

void GgufConfigReader::RefuseSettings() {
  keys_.Ignore(".tensor_data_layout");
  keys_.Ignore(".pooling_type");
  keys_.Require(".attention.causal", 1);
  for (const char* key :
       {".attention.max_alibi_bias", ".attention.clamp_kqv", ".use_parallel_residual"}) {
    keys_.Require(key, 0);
  }
  keys_.RefuseOthers();
}

LayerSpec GgufConfigReader::Layer(int layer, const AttentionSpec& attention) const {
  LayerSpec result{attention, IsRouted(layer) ? experts_ : dense_};
  const bool sliding = window_period_ == 0 || layer % window_period_ < window_period_ - 1;
  if (window_.has_value() && sliding) {
    result.attention.window = window_;
    result.attention.position = window_position_;
  }
  return result;
}

ConfigResult GgufConfigReader::Read() {
  ReadSizes();
  ReadTokenIds();
  ReadFactors();
  AttentionSpec attention = family_.latent ? ReadLatentAttention() : ReadAttention();
  ReadPosition(attention.rope_width());
  attention.scale *= score_factor_;
  ReadWindows();
  ReadFeedForward();
  RefuseSettings();
  const std::string prefix = Concat(Printable(file_.file_name()), ": ", kGgufMetadata);
  MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(prefix));

  auto config = std::make_unique<GgufConfig>(family_, stored_, head_dim_key_);
  config->spec = spec_;
  ModelSpec& spec = config->spec;
  // With all dimensions rotated, the rows can be put into the order of other formats, which makes
  // the results equal to theirs to the last bit.
  const bool permuted = family_.pairs == GgufFamily::Pairs::kPermuted;
  if (permuted && spec.position.fraction == 1.0 && attention.head_dim % 2 == 0) {
    config->paired_rows = attention.head_dim;
  } else if (family_.pairs != GgufFamily::Pairs::kHalves) {
    spec.position.pairing = RopePairing::kInterleaved;
  }
  const WeightFiles::Location* gate = weights_.Find("blk.0.ffn_gate_inp_shexp.weight");
  config->vector_gate = gate == nullptr || gate->entry->shape.size() == 1;
  for (int i = 0; i < next_token_layers_; ++i) {
    config->ignored_prefixes.push_back(Concat("blk.", layers_ + i, '.'));
  }
  for (int i = 0; i < layers_; ++i) spec.AddLayer(Layer(i, attention));
  const absl::Status valid = Validate(spec);
  if (!valid.ok()) {
    const std::string message(valid.message());
    return absl::Status(valid.code(), Concat(prefix, ": ", config->AsInFile(message)));
  }
  return config;
}

ConfigResult ReadGgufConfig(const GgufFile& file, const WeightFiles& weights,
                            const std::vector<std::string>& ignored) {
  Problems problems;
  GgufKeys keys(file, "", &problems, &ignored);
  const std::string prefix = Concat(Printable(file.file_name()), ": ", kGgufMetadata);
  const std::string_view kind = keys.Text("general.type").value_or("model");
  if (kind != "model") keys.Fault("general.type", "\"model\"", Quoted(kind));
  const std::optional<std::string_view> name = keys.Text("general.architecture");
  const GgufFamily* const family = FindGgufFamily(name.value_or(""));
  if (family == nullptr) {
    keys.Fault("general.architecture", GgufFamilyNames(),
               name.has_value() ? Quoted(*name) : "none");
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(prefix));
  return GgufConfigReader(file, weights, *family, ignored).Read();
}

}  // namespace moeserve
