// The decoder of MiniMax-M3. Its tokens attend to blocks of keys that an indexer chooses. As long
// as there are no more blocks than that, the result is that of attention to all keys, so texts are
// limited to this length, and the indexer is not computed.

#include <algorithm>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kM3Experts[] = {
    {"blocks.*.feed_forward.router.choice_bias",
     "model.layers.*.block_sparse_moe.e_score_correction_bias"},
    {"blocks.*.feed_forward.shared.gate.weight",
     "model.layers.*.block_sparse_moe.shared_experts.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight",
     "model.layers.*.block_sparse_moe.shared_experts.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight",
     "model.layers.*.block_sparse_moe.shared_experts.down_proj.weight"},
    // Newer versions in memory.
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.mlp.gate_up_proj.weight", 0, 2},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mlp.gate_up_proj.weight", 1, 2},
    {"blocks.*.feed_forward.shared.gate.weight",
     "model.layers.*.mlp.shared_experts.gate_up_proj.weight", 0, 2},
    {"blocks.*.feed_forward.shared.up.weight",
     "model.layers.*.mlp.shared_experts.gate_up_proj.weight", 1, 2},
};

constexpr KeyRule kM3Keys[] = {{"feed_forward.expert.activation_slope", "swiglu_alpha"},
                               {"feed_forward.expert.activation_limit", "swiglu_limit"},
                               {"feed_forward.routing.scale", "routed_scaling_factor"},
                               {"feed_forward.shared_width", "shared_intermediate_size"}};

// Older files give the number of rotated elements; it must agree with the fraction, if that is
// there, too.
Json WithFraction(const Json& json) {
  Json config = json;
  const auto rotary = json.find("rotary_dim"), head = json.find("head_dim");
  const auto rope = json.find("rope_parameters");
  const bool named = json.contains("partial_rotary_factor") ||
                     (rope != json.end() && rope->contains("partial_rotary_factor"));
  if (named || rotary == json.end() || !rotary->is_number()) return config;
  const double width = head != json.end() && head->is_number() ? head->get<double>() : 128.0;
  if (width > 0) config["partial_rotary_factor"] = rotary->get<double>() / width;
  return config;
}

// Returns whether entry `layer` of a list of numbers or truth values is neither 0 nor false.
// Reports a list of another kind under the name `path`.
std::optional<std::vector<bool>> Flags(DecoderConfig& c, const Json* list,
                                       const std::string& path) {
  if (list == nullptr || c.layers() < 1 || c.layers() > kMaxLayers) return std::nullopt;
  std::vector<bool> flags;
  bool valid = list->is_array() && list->size() == static_cast<size_t>(c.layers());
  for (size_t i = 0; valid && i < list->size(); ++i) {
    const Json& entry = (*list)[i];
    valid = entry.is_boolean() || entry == 0 || entry == 1;
    flags.push_back(entry == true || entry == 1);
  }
  if (valid) return flags;
  c.problems().Add(Concat(path, ": expected a list of ", c.layers(), " numbers 0 or 1, found ",
                          ShowJson(*list)));
  return std::nullopt;
}

// Reads the keys of the indexer, whose names are older in the object "sparse_attention_config", and
// limits the context.
void ReadIndexer(DecoderConfig& c) {
  ObjectReader& keys = c.keys();
  constexpr std::string_view kTypes[] = {"full_attention", "minimax_m3_sparse"};
  const std::optional<std::vector<int>> types = c.LayerNames("layer_types", kTypes);
  int blocks = keys.Int("index_topk_blocks", 16), size = keys.Int("index_block_size", 128);
  c.Ignore({"index_n_heads", "index_head_dim", "index_local_blocks"});
  bool sparse = types.has_value() && std::ranges::find(*types, 1) != types->end();
  if (const Json* const older = keys.Optional("sparse_attention_config"); older != nullptr) {
    const Json cleaned = WithoutNulls(*older);
    const std::string path = keys.PathOf("sparse_attention_config");
    ObjectReader reader(cleaned, path, &c.problems());
    blocks = reader.Int("sparse_topk_blocks", blocks);
    size = reader.Int("sparse_block_size", size);
    const auto flags =
        Flags(c, reader.Optional("sparse_attention_freq"), path + ".sparse_attention_freq");
    if (!types.has_value() && flags.has_value()) {
      sparse = std::ranges::find(*flags, true) != flags->end();
    }
  }
  if (!sparse) return;
  if (blocks < 1 || size < 1) {
    keys.Fault("index_topk_blocks", "above 0, as index_block_size", Concat(blocks, " of ", size));
    return;
  }
  c.LimitContext(int64_t{blocks} * size,
                 "sparse attention beyond index_topk_blocks * index_block_size is not computed");
}

ConfigResult ReadMiniMaxM3(const Json& json, const StoredNames& stored) {
  const Json config = WithFraction(json);
  DecoderConfig c(config, stored);
  ObjectReader& keys = c.keys();
  c.Skeleton({.max_position_embeddings = 524288,
              .rope_theta = 5e6,
              .bos_token_id = 200034,
              .eos_token_ids = {200020},
              .num_key_value_heads = 4});
  AttentionSpec attention = c.Attention(128);
  attention.qk_norm = QkNorm::kHead;
  if (const Json* const rotary = keys.Optional("rotary_dim"); rotary != nullptr) {
    const double rotated = c.spec().position.fraction * attention.head_dim;
    if (!rotary->is_number() || rotary->get<double>() != rotated) {
      keys.Fault("rotary_dim",
                 Concat("partial_rotary_factor * head_dim, which is ", ShowJson(Json(rotated))),
                 ShowJson(*rotary));
    }
  }
  ReadIndexer(c);

  ExpertSpec expert;
  expert.activation_slope = static_cast<float>(keys.Real("swiglu_alpha", 1.702));
  expert.activation_limit = static_cast<float>(keys.Real("swiglu_limit", 7.0));
  expert.up_offset = 1.0f;
  c.Ignore({"hidden_act"});  // these settings replace it
  FeedForwardSpec dense = c.Dense("dense_intermediate_size");
  FeedForwardSpec experts = c.Experts({.count = "num_local_experts", .width = "intermediate_size"});
  dense.expert = experts.expert = expert;
  RoutedLayerSpec& routing = *experts.routing;
  routing.gate = GateKind::kSigmoid;
  routing.renormalize = true;
  routing.select.bias = true;
  routing.scale = keys.Real("routed_scaling_factor", 2.0);
  experts.shared_width = keys.Int("shared_intermediate_size", 3072);
  const std::optional<std::vector<bool>> flags =
      Flags(c, keys.Optional("moe_layer_freq"), keys.PathOf("moe_layer_freq"));
  const std::vector<bool> sparse = c.SparseLayers(
      [&](int layer) { return !flags.has_value() || (*flags)[static_cast<size_t>(layer)]; });
  c.Require("n_shared_experts", 1);
  c.Require("use_gemma_norm", true);
  c.Require("use_qk_norm", true);
  c.Require("qk_norm_type", "per_head");
  c.Require("scoring_func", "sigmoid");
  c.Require("use_routing_bias", true);
  c.Ignore({"num_mtp_modules", "mtp_transformer_layers", "use_mtp", "router_jitter_noise"});
  c.IgnorePrefix("mtp.");
  c.IgnoreTensors({"model.layers.*.self_attn.index_q_proj.weight",
                   "model.layers.*.self_attn.index_k_proj.weight",
                   "model.layers.*.self_attn.index_q_norm.weight",
                   "model.layers.*.self_attn.index_k_norm.weight",
                   "model.layers.*.self_attn.indexer.q_proj.weight",
                   "model.layers.*.self_attn.indexer.k_proj.weight",
                   "model.layers.*.self_attn.indexer.q_norm.weight",
                   "model.layers.*.self_attn.indexer.k_norm.weight"});
  c.Keys(kM3Keys);
  c.Tensors({OffsetNormTensors(), EmbeddingTensors(), AttentionTensors(), DenseTensors(),
             BlockSparseTensors(), ExpertTensors(), SharedExpertTensors(), kM3Experts});
  return c.Finish(attention, dense, experts, sparse);
}

}  // namespace

constinit const Architecture kMiniMaxM3TextArchitecture = {.model_type = "minimax_m3_vl_text",
                                                           .read = ReadMiniMaxM3};

}  // namespace moeserve
