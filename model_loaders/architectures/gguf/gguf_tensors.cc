#include "model_loaders/architectures/gguf/gguf_tensors.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/architectures/gguf/gguf_mixer_tensors.h"

namespace moeserve {
namespace {

using Norms = GgufFamily::Norms;

// Experts are stacked. In older files, each has tensors of its own; newer ones may join gate and
// up, and q, k and v.
constexpr TensorRule kGgufTensors[] = {
    {"embed.weight", "token_embd.weight"},
    {"norm.weight", "output_norm.weight"},
    {"head.weight", "output.weight"},
    {"classifier.weight", "cls.output.weight"},
    {"blocks.*.attention.norm.weight", "blk.*.attn_norm.weight"},
    {"blocks.*.attention.q.weight", "blk.*.attn_q.weight"},
    {"blocks.*.attention.o.weight", "blk.*.attn_output.weight"},
    {"blocks.*.attention.out_bias", "blk.*.attn_output.bias"},
    {"blocks.*.feed_forward.gate.weight", "blk.*.ffn_gate.weight"},
    {"blocks.*.feed_forward.up.weight", "blk.*.ffn_up.weight"},
    {"blocks.*.feed_forward.down.weight", "blk.*.ffn_down.weight"},
    {"blocks.*.feed_forward.gate.bias", "blk.*.ffn_gate.bias"},
    {"blocks.*.feed_forward.up.bias", "blk.*.ffn_up.bias"},
    {"blocks.*.feed_forward.down.bias", "blk.*.ffn_down.bias"},
    {"blocks.*.feed_forward.router.weight", "blk.*.ffn_gate_inp.weight"},
    {"blocks.*.feed_forward.router.bias", "blk.*.ffn_gate_inp.bias"},
    {"blocks.*.feed_forward.router.choice_bias", "blk.*.exp_probs_b.bias"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "blk.*.ffn_gate_exps.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_up_exps.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "blk.*.ffn_down_exps.weight"},
    {"blocks.*.feed_forward.experts.*.gate.bias", "blk.*.ffn_gate_exps.bias"},
    {"blocks.*.feed_forward.experts.*.up.bias", "blk.*.ffn_up_exps.bias"},
    {"blocks.*.feed_forward.experts.*.down.bias", "blk.*.ffn_down_exps.bias"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "blk.*.ffn_gate.*.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_up.*.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "blk.*.ffn_down.*.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "blk.*.ffn_gate_up_exps.weight", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_gate_up_exps.weight", 1, 2},
    {"blocks.*.feed_forward.router.choice_bias", "blk.*.exp_probs_b"},
    {"blocks.*.feed_forward.latent_down.weight", "blk.*.ffn_latent_down.weight"},
    {"blocks.*.feed_forward.latent_up.weight", "blk.*.ffn_latent_up.weight"},
    {"blocks.*.feed_forward.shared.gate.weight", "blk.*.ffn_gate_shexp.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "blk.*.ffn_up_shexp.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "blk.*.ffn_down_shexp.weight"},
    {"blocks.*.feed_forward.shared_gate.weight", "blk.*.ffn_gate_inp_shexp.weight"},
};

constexpr TensorRule kInputNorm[] = {
    {"blocks.*.feed_forward.norm.weight", "blk.*.ffn_norm.weight"},
};

constexpr TensorRule kPostAttentionNorm[] = {
    {"blocks.*.feed_forward.norm.weight", "blk.*.post_attention_norm.weight"},
};

constexpr TensorRule kOutputNorms[] = {
    {"blocks.*.attention.output_norm.weight", "blk.*.post_attention_norm.weight"},
    {"blocks.*.feed_forward.output_norm.weight", "blk.*.post_ffw_norm.weight"},
};

// Experts beside a dense network.
constexpr TensorRule kBesideDense[] = {
    {"blocks.*.feed_forward.norm.weight", "blk.*.pre_ffw_norm_2.weight"},
    {"blocks.*.feed_forward.experts_norm.weight", "blk.*.post_ffw_norm_2.weight"},
    {"blocks.*.feed_forward.shared_norm.weight", "blk.*.ffn_norm.weight"},
    {"blocks.*.feed_forward.shared_output_norm.weight", "blk.*.post_ffw_norm_1.weight"},
    {"blocks.*.feed_forward.shared.gate.weight", "blk.*.ffn_gate.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "blk.*.ffn_up.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "blk.*.ffn_down.weight"},
    {"blocks.*.feed_forward.router.norm.weight", "blk.*.ffn_gate_inp.scale"},
    {"blocks.*.feed_forward.router.expert_scale", "blk.*.ffn_down_exps.scale"},
};

constexpr TensorRule kLayerScales[] = {
    {"blocks.*.scale", "blk.*.layer_output_scale.weight"},
};

constexpr TensorRule kOneNorm[] = {
    {"blocks.*.feed_forward.norm.weight", "blk.*.attn_norm.weight"},
};

constexpr TensorRule kLayerNorms[] = {
    {"norm.bias", "output_norm.bias"},
    {"head.bias", "output.bias"},
    {"blocks.*.attention.norm.bias", "blk.*.attn_norm.bias"},
    {"blocks.*.feed_forward.norm.bias", "blk.*.ffn_norm.bias"},
};

// The last norm of LFM2.
constexpr TensorRule kLastNorm[] = {
    {"norm.weight", "token_embd_norm.weight"},
};

constexpr TensorRule kGatedQueries[] = {
    {"blocks.*.attention.q.weight", "blk.*.attn_q.weight", 0, 1, RowOrder::kGatedQueries},
    {"blocks.*.attention.gate.weight", "blk.*.attn_q.weight", 1, 1, RowOrder::kGatedQueries},
};

constexpr TensorRule kGgufAttention[] = {
    {"blocks.*.attention.gate.weight", "blk.*.attn_gate.weight"},
    {"blocks.*.attention.k.weight", "blk.*.attn_k.weight"},
    {"blocks.*.attention.v.weight", "blk.*.attn_v.weight"},
    {"blocks.*.attention.q.bias", "blk.*.attn_q.bias"},
    {"blocks.*.attention.k.bias", "blk.*.attn_k.bias"},
    {"blocks.*.attention.v.bias", "blk.*.attn_v.bias"},
    {"blocks.*.attention.q.weight", "blk.*.attn_qkv.weight", 0, 3, RowOrder::kQkv},
    {"blocks.*.attention.k.weight", "blk.*.attn_qkv.weight", 1, 3, RowOrder::kQkv},
    {"blocks.*.attention.v.weight", "blk.*.attn_qkv.weight", 2, 3, RowOrder::kQkv},
    {"blocks.*.attention.q.bias", "blk.*.attn_qkv.bias", 0, 3, RowOrder::kQkv},
    {"blocks.*.attention.k.bias", "blk.*.attn_qkv.bias", 1, 3, RowOrder::kQkv},
    {"blocks.*.attention.v.bias", "blk.*.attn_qkv.bias", 2, 3, RowOrder::kQkv},
    {"blocks.*.attention.q_norm.weight", "blk.*.attn_q_norm.weight"},
    {"blocks.*.attention.k_norm.weight", "blk.*.attn_k_norm.weight"},
    {"blocks.*.attention.sinks", "blk.*.attn_sinks.weight"},
};

constexpr TensorRule kValueExperts[] = {
    {"blocks.*.attention.router.weight", "blk.*.attn_v_gate.weight"},
    {"blocks.*.attention.router.choice_bias", "blk.*.attn_v_gate.bias"},
    {"blocks.*.attention.experts.*.v.weight", "blk.*.attn_v_exps.weight"},
};

constexpr TensorRule kLatentAttention[] = {
    {"blocks.*.attention.gate.weight", "blk.*.attn_gate.weight"},
    {"blocks.*.attention.q.weight", "blk.*.attn_q_b.weight"},
    {"blocks.*.attention.q_down.weight", "blk.*.attn_q_a.weight"},
    {"blocks.*.attention.q_norm.weight", "blk.*.attn_q_a_norm.weight"},
    {"blocks.*.attention.latent.weight", "blk.*.attn_kv_a_mqa.weight"},
    {"blocks.*.attention.latent_norm.weight", "blk.*.attn_kv_a_norm.weight"},
    {"blocks.*.attention.heads.*.k.weight", "blk.*.attn_kv_b.weight", 0, 2, RowOrder::kLatent},
    {"blocks.*.attention.heads.*.v.weight", "blk.*.attn_kv_b.weight", 1, 2, RowOrder::kLatent},
};

constexpr TensorRule kPredictions[] = {
    {"blocks.*.prediction.embed_norm.weight", "blk.*.nextn.enorm.weight"},
    {"blocks.*.prediction.hidden_norm.weight", "blk.*.nextn.hnorm.weight"},
    {"blocks.*.prediction.join.weight", "blk.*.nextn.eh_proj.weight"},
    {"blocks.*.prediction.norm.weight", "blk.*.nextn.shared_head_norm.weight"},
};

constexpr TensorRule kDenseModules[] = {
    {"pooling.dense.0.weight", "dense_2.weight"},
    {"pooling.dense.1.weight", "dense_3.weight"},
};

constexpr TensorRule kJoinedGateUp[] = {
    {"blocks.*.feed_forward.gate.weight", "blk.*.ffn_up.weight", 0, 2},
    {"blocks.*.feed_forward.up.weight", "blk.*.ffn_up.weight", 1, 2},
};

constexpr KeyRule kGgufKeys[] = {
    {"vocab_size", ".vocab_size"},
    {"hidden_size", ".embedding_length"},
    {"num_hidden_layers", ".block_count"},
    {"max_position_embeddings", ".context_length"},
    {"bos_token_id", "tokenizer.ggml.bos_token_id"},
    {"eos_token_id", "tokenizer.ggml.eos_token_id"},
    {"norm.eps", ".attention.layer_norm_rms_epsilon"},
    {"embedding_scale", ".embedding_scale"},
    {"residual_scale", ".residual_scale"},
    {"logit_scale", ".logit_scale"},
    {"logit_soft_cap", ".final_logit_softcapping"},
    {"position.theta", ".rope.freq_base"},
    {"position.fraction", ".rope.dimension_count"},
    {"position.scaling.factor", ".rope.scaling.factor"},
    {"position.scaling.original_positions", ".rope.scaling.original_context_length"},
    {"position.scaling.magnitude", ".rope.scaling.attn_factor"},
    {"attention.num_heads", ".attention.head_count"},
    {"attention.num_kv_heads", ".attention.head_count_kv"},
    {"attention.scale", ".attention.scale"},
    {"norm.groups", ".attention.group_norm_groups"},
    {"attention.routing.num_experts", ".attention.value_expert_count"},
    {"attention.value_routing.num_experts", ".attention.value_expert_count"},
    {"attention.value_routing.select.k", ".attention.value_expert_used_count"},
    {"attention.value_dim", ".attention.value_length"},
    {"attention.value_scale", ".attention.value_scale"},
    {"attention.query_scale.factor", ".attention.temperature_scale"},
    {"attention.query_scale.step", ".attention.temperature_length"},
    {"attention.window", ".attention.sliding_window"},
    {"attention.soft_cap", ".attn_logit_softcapping"},
    {"attention.position.theta", ".rope.freq_base_swa"},
    {"attention.latent.rank", ".attention.kv_lora_rank"},
    {"attention.latent.query_rank", ".attention.q_lora_rank"},
    {"attention.latent.rope_dim", ".rope.dimension_count"},
    {"num_heads", ".attention.head_count"},
    {"num_kv_heads", ".attention.head_count_kv"},
    {"feed_forward.width", ".feed_forward_length"},
    {"feed_forward.shared_width", ".expert_shared_feed_forward_length"},
    {"feed_forward.shared_limit", ".swiglu_clamp_shexp"},
    {"feed_forward.expert.activation_limit", ".swiglu_clamp_exp"},
    {"feed_forward.routing.num_experts", ".expert_count"},
    {"feed_forward.routing.select.k", ".expert_used_count"},
    {"feed_forward.routing.select.groups", ".expert_group_count"},
    {"feed_forward.routing.select.best_groups", ".expert_group_used_count"},
    {"feed_forward.routing.scale", ".expert_weights_scale"},
    {"feed_forward.routing.latent_width", ".moe_latent_size"},
    {"num_experts", ".expert_count"},
    {"routing.num_experts", ".expert_count"},
};

constexpr const char* kJoinedQkv =
    "[(num_heads + 2 * num_kv_heads) * attention.head_dim, hidden_size]";

// Removes `prefix` and the number after it from `text`. Returns nullopt if they are not there.
std::optional<int> TakeLayerNumber(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return std::nullopt;
  text.remove_prefix(prefix.size());
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace

GgufTables::GgufTables(const GgufFamily& family, const StoredNames& stored,
                       std::string_view head_dim_key) {
  const bool beside_dense =
      family.shared == GgufFamily::Shared::kDense && stored.contains("blk.0.ffn_gate_inp.weight");
  const auto add_tensors = [&](std::span<const TensorRule> rules) {
    tensors.insert(tensors.end(), rules.begin(), rules.end());
  };
  // The first of several rules for a tensor counts if no file has one of the tensors.
  if (family.joined_gate_up) add_tensors(kJoinedGateUp);
  if (family.recurrent == GgufFamily::Recurrent::kShortConvolution) add_tensors(kLastNorm);
  if (family.gated_queries) add_tensors(kGatedQueries);
  if (family.layer_norms) add_tensors(kLayerNorms);
  if (family.layer_scales) add_tensors(kLayerScales);
  if (beside_dense) add_tensors(kBesideDense);
  if (family.value_experts) add_tensors(kValueExperts);
  add_tensors(kGgufTensors);
  add_tensors(family.latent ? std::span<const TensorRule>(kLatentAttention) : kGgufAttention);
  if (family.recurrent != GgufFamily::Recurrent::kNone) {
    for (TensorRule& rule : tensors) {
      const bool mixer = rule.model.starts_with("blocks.*.attention.") &&
                         rule.model != "blocks.*.attention.norm.weight";
      if (mixer) rule.mixer = BlockKind::kAttention;
    }
    add_tensors(RecurrentTensors(family.recurrent));
  }
  if (family.bidirectional) add_tensors(kDenseModules);
  if (family.counts_next_token_layers) add_tensors(kPredictions);
  switch (family.norms) {
    case Norms::kInput:
      add_tensors(kInputNorm);
      break;
    case Norms::kPostAttention:
      add_tensors(kPostAttentionNorm);
      break;
    case Norms::kBoth:
      add_tensors(kOutputNorms);
      if (!beside_dense) add_tensors(kInputNorm);
      break;
    case Norms::kOne:
    case Norms::kShared:
      add_tensors(kOneNorm);
      break;
  }

  const bool of_heads = head_dim_key.ends_with("_mla");
  const KeyRule own[] = {{"feed_forward.routing.widths", family.expert_width},
                         {"attention.head_dim", head_dim_key},
                         {"attention.latent.value_dim",
                          of_heads ? ".attention.value_length_mla" : ".attention.value_length"}};
  AddKeys(family.name, RecurrentKeys(family.recurrent));
  AddKeys(family.name, kGgufKeys);
  AddKeys(family.name, own);
}

GgufTables::GgufTables(std::string_view architecture, std::span<const TensorRule> tensor_rules,
                       std::span<const KeyRule> key_rules)
    : tensors(tensor_rules.begin(), tensor_rules.end()) {
  AddKeys(architecture, key_rules);  // the first rule for a key counts
  AddKeys(architecture, kGgufKeys);
}

void GgufTables::AddKeys(std::string_view architecture, std::span<const KeyRule> rules) {
  for (const KeyRule& rule : rules) {
    names.push_back(rule.file.starts_with('.') ? Concat(architecture, rule.file)
                                               : std::string(rule.file));
    keys.push_back({rule.model, names.back()});
  }
}

std::optional<TensorPlace> GgufTableConfig::Place(const TensorRequirement& tensor) const {
  std::optional<TensorPlace> place = NameTableConfig::Place(tensor);
  if (!place.has_value()) return place;
  if (place->name.find(".attn_qkv.") != std::string::npos) place->follows_from = kJoinedQkv;
  if (std::ranges::find(vectors, place->name) != vectors.end()) {
    place->shape = {tensor.shape.back()};
    place->follows_from = "[hidden_size]";
  }
  return place;
}

GgufConfig::GgufConfig(const GgufFamily& family, const StoredNames& stored,
                       std::string_view head_dim_key, int prediction_layer)
    : GgufTables(family, stored, head_dim_key),
      NameTableConfig(tensors, keys, stored, {}, {}, {.layer = prediction_layer, .prefix = {}}),
      tiled_values_(family.tiled_values) {
  key_place = kGgufMetadata;
  ignored.push_back(kRopeFactors);
  ignored.push_back("blk.*.attn_rot_embd");  // frequencies, in files of early versions
  if (family.long_rope) {
    ignored.push_back(kShortRopeFactors);
    ignored.push_back(kLongRopeFactors);
  }
  if (family.indexed) {
    for (const char* tensor : {"blk.*.indexer.attn_k.weight", "blk.*.indexer.attn_q_b.weight",
                               "blk.*.indexer.k_norm.weight", "blk.*.indexer.k_norm.bias",
                               "blk.*.indexer.proj.weight"}) {
      ignored.push_back(tensor);
    }
  }
  if (family.latent) {
    split_heads_ = std::ranges::any_of(stored.names, [](const std::string& name) {
      return MatchesName("blk.*.attn_k_b.weight", name) ||
             MatchesName("blk.*.attn_v_b.weight", name);
    });
    // Some files contain both forms.
    if (split_heads_) ignored.push_back("blk.*.attn_kv_b.weight");
  }
}

std::optional<TensorPlace> GgufConfig::HeadPlace(const TensorRequirement& tensor) const {
  std::string_view rest = tensor.name;
  const std::optional<int> layer = TakeLayerNumber(rest, "blocks.");
  const std::optional<int> head = TakeLayerNumber(rest, ".attention.heads.");
  const bool keys_of_head = rest == ".k.weight";
  if (!layer.has_value() || !head.has_value() || !(keys_of_head || rest == ".v.weight") ||
      TokenMixer(*layer) == nullptr || TokenMixer(*layer)->attention() == nullptr ||
      tensor.shape.size() != 2) {
    return std::nullopt;
  }
  TensorPlace place;
  place.name = Concat("blk.", *layer, keys_of_head ? ".attn_k_b.weight" : ".attn_v_b.weight");
  place.shape = {TokenMixer(*layer)->attention()->num_heads, tensor.shape[0], tensor.shape[1]};
  place.index = *head;
  const std::string of_layer = Concat("attention[", *layer, "].");
  if (tensor.follows_from.starts_with('[')) {
    place.follows_from = Concat('[', of_layer, "num_heads, ", tensor.follows_from.substr(1));
  }
  return place;
}

std::optional<TensorPlace> GgufConfig::Place(const TensorRequirement& required) const {
  TensorRequirement tensor = required;
  tensor.name = NameForRules(required.name);
  const std::string_view name = tensor.name;
  const auto is = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (split_heads_ && is(".attention.heads.")) return HeadPlace(tensor);
  std::optional<TensorPlace> place = NameTableConfig::Place(tensor);
  if (!place.has_value()) return place;
  std::string_view rest = name;
  const std::optional<int> layer = TakeLayerNumber(rest, "blocks.");
  const BlockSpec* const block =
      layer.has_value() && rest.starts_with(".attention.") ? TokenMixer(*layer) : nullptr;
  const bool recurrent = block != nullptr && block->kind() != BlockKind::kAttention;
  if (recurrent) PlaceRecurrent(name, *block, tiled_values_, *place);
  if (!recurrent && place->name.find(".attn_qkv.") != std::string::npos) {
    place->follows_from = kJoinedQkv;
  }
  if (place->name.find(".attn_kv_b.") != std::string::npos) {
    place->follows_from =
        "[num_heads * (attention.head_dim - attention.latent.rope_dim + "
        "attention.latent.value_dim), attention.latent.rank]";
  }
  if (paired_rows != 0 && (is(".attention.q.") || is(".attention.k."))) {
    place->paired_rows = paired_rows;
  }
  if (reversed_scores && name == "classifier.weight") {
    place->shape = tensor.shape;
    place->first_row = tensor.shape[0] - 1;
    place->row_step = -1;
  }
  if (vector_gate && name.ends_with(".shared_gate.weight")) {
    place->shape = {tensor.shape.back()};
    place->follows_from = "[hidden_size]";
  }
  return place;
}

}  // namespace moeserve
