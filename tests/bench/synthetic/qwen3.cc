#include <cstring>
#include <utility>

#include "tests/bench/synthetic/family_files.h"

namespace moeserve::testing {

using Json = nlohmann::json;

bool HasQwenExperts(const FeedForwardSpec& f) {
  bool same = f.expert.form == ExpertForm::kGated && f.expert.activation == ActivationKind::kSilu;
  if (!f.routed()) return same;
  const RoutedLayerSpec& r = *f.routing;
  same = same && r.split.heads == 1 && r.score.kind == ScoreKind::kDot && r.renormalize &&
         r.select.kind == SelectKind::kTopK && r.gate == GateKind::kSoftmax && r.scale == 1.0;
  for (const int width : r.widths) same = same && width == r.widths[0];
  return same;
}

absl::Status CheckQwen3(const ModelSpec& spec, std::string_view option) {
  const AttentionSpec& a = spec.attention(0);
  const FeedForwardSpec& f = spec.feed_forward(0);
  if (!a.routed() && a.qk_norm == QkNorm::kHead && !a.window && !a.gate &&
      a.group_order == GroupOrder::kInterleave && HasQwenExperts(f) && f.shared_width == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      std::string(option) +
      ": expected dense attention with normed heads and gated experts of one width, top-k by dot "
      "product, found a shape that qwen3moe and qwen3 cannot express");
}

void AddCommonKeys(const ModelSpec& spec, const AttentionSpec& a, const std::string& arch,
                   GgufWriter& file) {
  const auto add = [&](const char* key, int value) {
    file.AddU32(arch + "." + key, static_cast<uint32_t>(value));
  };
  file.AddString("general.architecture", arch);
  add("block_count", spec.num_layers());
  add("context_length", spec.max_position_embeddings);
  add("embedding_length", spec.hidden_size);
  add("vocab_size", spec.vocab_size);
  add("attention.head_count", a.num_heads);
  add("attention.head_count_kv", a.num_kv_heads);
  add("attention.key_length", a.head_dim);
  add("attention.value_length", a.head_dim);
  add("rope.dimension_count", a.head_dim);
  if (const FeedForwardSpec& f = spec.feed_forward(0); f.routed()) {
    add("expert_feed_forward_length", f.routing->widths[0]);
    add("expert_count", f.routing->num_experts);
    add("expert_used_count", f.routing->select.k);
  }
  file.AddF32(arch + ".attention.layer_norm_rms_epsilon", spec.norm.eps);
  file.AddF32(arch + ".rope.freq_base", static_cast<float>(spec.position.theta));
}

void AddExperts(const ModelSpec& spec, int layer, GgufWriter& file) {
  const std::string to = "blk." + std::to_string(layer) + ".";
  const std::string ff = "blocks." + std::to_string(layer) + ".feed_forward.";
  const FeedForwardSpec& f = spec.feed_forward(layer);
  const int64_t d = spec.hidden_size;
  const int64_t experts = f.routing->num_experts;
  const int64_t width = f.routing->widths[0];
  file.AddTensor(
      {to + "ffn_gate_inp.weight", GgufType::kF32, {experts, d}, {ff + "router.weight"}});
  for (const char* matrix : {"gate", "up", "down"}) {
    const bool down = std::strcmp(matrix, "down") == 0;
    GgufTensor stacked{to + "ffn_" + matrix + "_exps.weight",
                       GgufType::kBF16,
                       {experts, down ? d : width, down ? width : d},
                       {}};
    for (int64_t e = 0; e < experts; ++e) {
      stacked.sources.push_back(ff + "experts." + std::to_string(e) + "." + matrix + ".weight");
    }
    file.AddTensor(std::move(stacked));
  }
}

void AddQwen3Gguf(const ModelSpec& spec, GgufWriter& file) {
  const AttentionSpec& a = spec.attention(0);
  const FeedForwardSpec& first = spec.feed_forward(0);
  const std::string arch = first.routed() ? "qwen3moe" : "qwen3";
  AddCommonKeys(spec, a, arch, file);
  const int width = first.routed() ? first.routing->widths[0] : first.width;
  file.AddU32(arch + ".feed_forward_length", static_cast<uint32_t>(width));
  const int64_t d = spec.hidden_size;
  const int64_t queries = int64_t{a.num_heads} * a.head_dim;
  const int64_t keys = int64_t{a.num_kv_heads} * a.head_dim;
  const auto bf16 = [&](const std::string& name, const std::string& source,
                        std::vector<int64_t> shape) {
    file.AddTensor({name, GgufType::kBF16, std::move(shape), {source}});
  };
  const auto norm = [&](const std::string& name, const std::string& source, int64_t n) {
    file.AddTensor({name, GgufType::kF32, {n}, {source}});
  };
  bf16("token_embd.weight", "embed.weight", {spec.vocab_size, d});
  norm("output_norm.weight", "norm.weight", d);
  bf16("output.weight", "head.weight", {spec.vocab_size, d});
  for (int i = 0; i < spec.num_layers(); ++i) {
    const std::string to = "blk." + std::to_string(i) + ".";
    const std::string attention = "blocks." + std::to_string(i) + ".attention.";
    const std::string ff = "blocks." + std::to_string(i) + ".feed_forward.";
    norm(to + "attn_norm.weight", attention + "norm.weight", d);
    norm(to + "attn_q_norm.weight", attention + "q_norm.weight", a.head_dim);
    norm(to + "attn_k_norm.weight", attention + "k_norm.weight", a.head_dim);
    bf16(to + "attn_q.weight", attention + "q.weight", {queries, d});
    bf16(to + "attn_k.weight", attention + "k.weight", {keys, d});
    bf16(to + "attn_v.weight", attention + "v.weight", {keys, d});
    bf16(to + "attn_output.weight", attention + "o.weight", {d, queries});
    norm(to + "ffn_norm.weight", ff + "norm.weight", d);
    const FeedForwardSpec& f = spec.feed_forward(i);
    if (f.routed()) {
      AddExperts(spec, i, file);
      continue;
    }
    bf16(to + "ffn_gate.weight", ff + "gate.weight", {f.width, d});
    bf16(to + "ffn_up.weight", ff + "up.weight", {f.width, d});
    bf16(to + "ffn_down.weight", ff + "down.weight", {d, f.width});
  }
}

std::vector<StoredTensor> Qwen3Tensors(const ModelSpec& spec) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"attention.norm.", "input_layernorm."},
      {"attention.q_norm.", "self_attn.q_norm."},
      {"attention.k_norm.", "self_attn.k_norm."},
      {"attention.q.", "self_attn.q_proj."},
      {"attention.k.", "self_attn.k_proj."},
      {"attention.v.", "self_attn.v_proj."},
      {"attention.o.", "self_attn.o_proj."},
      {"feed_forward.norm.", "post_attention_layernorm."},
      {"feed_forward.router.", "mlp.gate."}};
  std::vector<StoredTensor> tensors;
  const auto add = [&](const TensorRequirement& t, std::string name) {
    tensors.push_back({std::move(name), t.name, t.shape});
  };
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    const std::string_view name = t.name;
    if (name == "embed.weight") add(t, "model.embed_tokens.weight");
    if (name == "norm.weight") add(t, "model.norm.weight");
    if (name == "head.weight") add(t, "lm_head.weight");
    constexpr std::string_view kBlocks = "blocks.";
    if (!name.starts_with(kBlocks)) continue;
    const std::string_view inner = name.substr(kBlocks.size());
    const size_t dot = inner.find('.') + 1;
    const std::string layer = "model.layers." + std::string(inner.substr(0, dot));
    const std::string_view part = inner.substr(dot);
    for (const auto& [ours, theirs] : kNames) {
      if (!part.starts_with(ours)) continue;
      add(t, layer + std::string(theirs) + std::string(part.substr(ours.size())));
    }
    // "feed_forward.experts.3.gate.weight" is "mlp.experts.3.gate_proj.weight".
    constexpr std::string_view kExperts = "feed_forward.experts.";
    if (!part.starts_with(kExperts)) continue;
    const size_t suffix = part.rfind('.');
    const size_t from = std::string_view("feed_forward.").size();
    add(t, layer + "mlp." + std::string(part.substr(from, suffix - from)) + "_proj" +
               std::string(part.substr(suffix)));
  }
  return tensors;
}

Json CommonConfig(const ModelSpec& spec, const AttentionSpec& a, const RoutedLayerSpec& r) {
  return {{"torch_dtype", "bfloat16"},
          {"vocab_size", spec.vocab_size},
          {"hidden_size", spec.hidden_size},
          {"num_hidden_layers", spec.num_layers()},
          {"max_position_embeddings", spec.max_position_embeddings},
          {"num_attention_heads", a.num_heads},
          {"num_key_value_heads", a.num_kv_heads},
          {"head_dim", a.head_dim},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"rms_norm_eps", static_cast<double>(spec.norm.eps)},
          {"hidden_act", "silu"},
          {"num_experts", r.num_experts},
          {"num_experts_per_tok", r.select.k},
          {"moe_intermediate_size", r.widths[0]},
          {"output_router_logits", false},
          {"router_aux_loss_coef", 0.001},
          {"initializer_range", 0.02},
          {"tie_word_embeddings", false},
          {"use_cache", true},
          {"bos_token_id", kEndOfText},
          {"eos_token_id", kEndOfText}};
}

Json Qwen3Config(const ModelSpec& spec) {
  const RoutedLayerSpec& r = *spec.feed_forward(0).routing;
  Json json = CommonConfig(spec, spec.attention(0), r);
  json.update({{"architectures", {"Qwen3MoeForCausalLM"}},
               {"model_type", "qwen3_moe"},
               {"use_sliding_window", false},
               {"rope_theta", spec.position.theta},
               {"norm_topk_prob", true},
               {"intermediate_size", r.widths[0]},
               {"decoder_sparse_step", 1},
               {"mlp_only_layers", Json::array()}});
  return json;
}

}  // namespace moeserve::testing
