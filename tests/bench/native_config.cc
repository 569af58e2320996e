#include "tests/bench/native_config.h"

#include <utility>

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;

Json Routing(const RoutedLayerSpec& routing) {
  Json json = {{"num_experts", routing.num_experts}, {"renormalize", routing.renormalize}};
  if (!routing.widths.empty()) json["widths"] = routing.widths;
  if (routing.split.heads > 1) json["split"] = {{"heads", routing.split.heads}};
  if (routing.score.kind == ScoreKind::kCosine) {
    json["score"] = {{"kind", "cosine"}, {"dim", routing.score.dim}, {"temperature", "divide"}};
  }
  if (routing.select.kind == SelectKind::kTopK) {
    json["select"] = {{"kind", "top_k"}, {"k", routing.select.k}};
  } else {
    json["select"] = {
        {"kind", "top_p"}, {"p", routing.select.p}, {"max", routing.select.max_experts}};
  }
  return json;
}

}  // namespace

Json NativeConfig(const ModelSpec& spec, int32_t eos_token_id) {
  const AttentionSpec& a = spec.attention(0);
  const FeedForwardSpec& f = spec.feed_forward(0);
  Json attention = {{"num_kv_heads", a.num_kv_heads}, {"head_dim", a.head_dim}};
  if (a.routed()) {
    attention["kind"] = "routed";
    attention["routing"] = Routing(*a.routing);
  } else {
    attention["kind"] = "dense";
    attention["num_heads"] = a.num_heads;
    attention["qk_norm"] = a.qk_norm == QkNorm::kHead ? "head" : "none";
  }
  Json feed_forward = {{"expert", {{"form", "gated"}, {"activation", "silu"}}}};
  if (f.routed()) {
    feed_forward["kind"] = "routed";
    feed_forward["routing"] = Routing(*f.routing);
  } else {
    feed_forward["kind"] = "dense";
    feed_forward["width"] = f.width;
  }
  return {{"model_type", "routed_decoder"},
          {"format_version", 1},
          {"vocab_size", spec.vocab_size},
          {"hidden_size", spec.hidden_size},
          {"num_hidden_layers", spec.num_layers()},
          {"max_position_embeddings", spec.max_position_embeddings},
          {"bos_token_id", nullptr},
          {"eos_token_id", eos_token_id},
          {"norm", {{"kind", "rms"}, {"eps", static_cast<double>(spec.norm.eps)}}},
          {"position", {{"kind", "rope"}, {"theta", spec.position.theta}}},
          {"attention", std::move(attention)},
          {"feed_forward", std::move(feed_forward)}};
}

}  // namespace moeserve::testing
