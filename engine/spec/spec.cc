#include "engine/spec/spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/message.h"
#include "engine/spec/check_position.h"
#include "engine/spec/checker.h"
#include "engine/spec/spec_limits.h"
#include "engine/spec/weights.h"

namespace moeserve {
namespace {

// Explains a bound that is the number of experts which a row can select.
std::string ExpertsAre(const RoutedLayerSpec& routing) {
  if (routing.null_experts.total() == 0) return Is("num_experts", routing.num_experts);
  return " (num_experts and null_experts together are " + std::to_string(routing.num_experts) + ")";
}

void CheckScore(Checker& check, const std::string& scope, const ScoreSpec& score) {
  check.Factor(scope, "score.row_scale", score.row_scale);
  switch (score.kind) {
    case ScoreKind::kDot:
      return;
    case ScoreKind::kCosine:
      check.Int(scope, "score.dim", score.dim, 1, kMaxWidth);
      check.Real(scope, "score.eps", score.eps, 0.0, 1.0);
      return;
  }
}

void CheckGroups(Checker& check, const std::string& scope, const RoutedLayerSpec& routing) {
  const SelectSpec& select = routing.select;
  check.Int(scope, "select.groups", select.groups, 1, kMaxExpertGroups);
  check.Divides(scope, "select.groups", select.groups, "num_experts", routing.num_experts);
  check.Int(scope, "select.best_groups", select.best_groups, 1, select.groups,
            Is("select.groups", select.groups));
  if (!check.ok()) return;
  const int size = routing.num_experts / select.groups;
  if (select.groups > 1 && select.group_score == GroupScoreKind::kSumOfTwo && size < 2) {
    check.Fail(scope + "select.groups", "groups of at least 2 experts",
               std::to_string(select.groups) + ExpertsAre(routing));
  }
  if (select.best_groups < select.groups) {
    check.Int(scope, select.kind == SelectKind::kTopP ? "select.max" : "select.k",
              select.MaxSelected(), 1, int64_t{size} * select.best_groups,
              " (the best groups have fewer experts)");
  }
}

void CheckSelect(Checker& check, const std::string& scope, const RoutedLayerSpec& routing) {
  const int experts = routing.num_experts;
  const SelectSpec& select = routing.select;
  CheckGroups(check, scope, routing);
  switch (select.kind) {
    case SelectKind::kTopK:
      check.Int(scope, "select.k", select.k, 1, experts, ExpertsAre(routing));
      return;
    case SelectKind::kTable: {
      const std::string because = " (select.kind is \"table\")";
      check.Int(scope, "select.k", select.k, 1, experts, ExpertsAre(routing));
      check.Set(scope, "select.bias", select.bias, false, because);
      check.Int(scope, "select.best_groups", select.best_groups, select.groups, select.groups,
                because);
      if (check.ok() && routing.gate == GateKind::kSparseMixer) {
        check.Fail(scope + "gate", "another gate than \"sparse_mixer\"",
                   "\"sparse_mixer\"" + because);
      }
      return;
    }
    case SelectKind::kTopP:
      check.Factor(scope, "select.p", select.p);
      if (check.ok() && !(select.p >= 0)) {
        check.Fail(scope + "select.p", "a number >= 0", Number(select.p));
      }
      check.Int(scope, "select.max", select.max_experts, 1, experts, ExpertsAre(routing));
      return;
  }
}

void CheckGate(Checker& check, const std::string& scope, const RoutedLayerSpec& routing) {
  check.Factor(scope, "mixer_limit", routing.mixer_limit);
  if (!check.ok()) return;
  if (!(routing.mixer_limit >= 0)) {
    check.Fail(scope + "mixer_limit", "a number >= 0", Number(routing.mixer_limit));
  }
  const SelectSpec& select = routing.select;
  if (routing.gate == GateKind::kSparseMixer) {
    const std::string because = " (gate is \"sparse_mixer\")";
    check.Set(scope, "renormalize", routing.renormalize, false, because);
    check.Set(scope, "select.bias", select.bias, false, because);
    check.Int(scope, "select.best_groups", select.best_groups, select.groups, select.groups,
              because);
  } else if (routing.mixer_limit != 0) {
    check.Fail(scope + "mixer_limit", "0 (gate is not \"sparse_mixer\")",
               Number(routing.mixer_limit));
  }
}

void CheckNullExperts(Checker& check, const std::string& scope, const RoutedLayerSpec& routing) {
  const NullExperts& null_experts = routing.null_experts;
  const int most = routing.num_experts - 1;  // at least one expert has matrices
  check.Int(scope, "null_experts.zero", null_experts.zero, 0, most, ExpertsAre(routing));
  check.Int(scope, "null_experts.copy", null_experts.copy, 0, most, ExpertsAre(routing));
  check.Int(scope, "null_experts.constant", null_experts.constant, 0, most, ExpertsAre(routing));
  if (check.ok() && routing.num_bodies() < 1) {
    check.Fail(scope + "num_experts", "an integer in [1, " + std::to_string(kMaxExperts) + "]",
               std::to_string(routing.num_bodies()));
  }
}

void CheckSplit(Checker& check, const std::string& scope, const ModelSpec& spec,
                const SplitSpec& split) {
  check.Int(scope, "heads", split.heads, 1, kMaxWidth);
  check.Divides(scope, "heads", split.heads, "hidden_size", spec.hidden_size);
  check.Int(scope, "depth", split.depth, 1, kMaxProjectionDepth);
  if (!split.projection && !split.merge_projection) {
    check.Int(scope, "depth", split.depth, 1, 1, " (there is no projection)");
  }
}

void CheckRouting(Checker& check, const std::string& scope, const ModelSpec& spec,
                  const RoutedLayerSpec& routing, BlockKind block) {
  check.Int(scope, "num_experts", routing.num_experts, 1, kMaxExperts);
  CheckNullExperts(check, scope, routing);
  if (!check.ok()) return;
  const auto widths = static_cast<int64_t>(routing.widths.size());
  if (block == BlockKind::kAttention) {
    if (widths != 0) check.Fail(scope + "widths", "none in attention", std::to_string(widths));
    if (routing.split.heads != 1) {
      check.Fail(scope + "split", "none in attention",
                 std::to_string(routing.split.heads) + " heads");
    }
    if (routing.null_experts.total() != 0) {
      check.Fail(scope + "null_experts", "none in attention",
                 std::to_string(routing.null_experts.total()) + " experts");
    }
    check.Int(scope, "latent_width", routing.latent_width, 0, 0, " (in attention)");
  } else {
    const int bodies = routing.num_bodies();
    if (widths != bodies) {
      check.Fail(scope + "widths", "a list of " + std::to_string(bodies) + " widths",
                 std::to_string(widths) + Is("num_experts", bodies));
    }
    for (int64_t i = 0; check.ok() && i < widths; ++i) {
      if (routing.widths[i] >= 1 && routing.widths[i] <= kMaxWidth) continue;
      check.Int(scope, ("widths[" + std::to_string(i) + "]").c_str(), routing.widths[i], 1,
                kMaxWidth);
    }
    CheckSplit(check, scope + "split.", spec, routing.split);
    const int64_t routes = int64_t{routing.split.heads} * routing.num_experts;
    if (check.ok() && routes > kMaxRoutesOfToken) {
      check.Fail(scope + "split.heads",
                 "heads * num_experts <= " + std::to_string(kMaxRoutesOfToken),
                 std::to_string(routes));
    }
    check.Int(scope, "latent_width", routing.latent_width, 0, kMaxWidth);
    if (routing.latent_width > 0) {
      check.Set(scope, "split.residual", routing.split.residual, false,
                Is("latent_width", routing.latent_width));
    }
  }
  CheckScore(check, scope, routing.score);
  CheckSelect(check, scope, routing);
  CheckGate(check, scope, routing);
  check.Factor(scope, "scale", routing.scale);
}

void CheckSoftCap(Checker& check, const std::string& scope, const char* key, double cap) {
  check.Factor(scope, key, cap);
  if (check.ok() && (cap < 0 || std::isnan(cap))) {
    check.Fail(scope + key, "a number >= 0", Number(cap));
  }
}

void CheckExpert(Checker& check, const std::string& scope, const ExpertSpec& expert) {
  check.Int(scope, "depth", expert.depth, 1, kMaxExpertDepth);
  if (!expert.residual) {
    check.Int(scope, "depth", expert.depth, 1, 1, " (sublayer is \"plain\")");
  }
  check.Factor(scope, "activation_limit", expert.activation_limit);
  check.Factor(scope, "activation_slope", expert.activation_slope);
  check.Factor(scope, "up_offset", expert.up_offset);
  if (!check.ok()) return;
  if (!(expert.activation_limit >= 0)) {
    check.Fail(scope + "activation_limit", "a number >= 0", Number(expert.activation_limit));
  }
  if (expert.form != ExpertForm::kGated &&
      (expert.activation_limit != 0 || expert.activation_slope != 1 || expert.up_offset != 0)) {
    check.Fail(scope + "form", "\"gated\" beside activation_limit, activation_slope or up_offset",
               "\"plain\"");
  }
  if (expert.activation != ActivationKind::kSilu && expert.activation_slope != 1) {
    check.Fail(scope + "activation_slope", "1 (activation is not \"silu\")",
               Number(expert.activation_slope));
  }
}

void CheckNoClip(Checker& check, const std::string& scope, const AttentionSpec& attention,
                 const std::string& because) {
  if (!check.ok() || attention.qkv_clip == 0.0) return;
  check.Fail(scope + "qkv_clip", "0", Number(attention.qkv_clip) + " (" + because + ")");
}

void CheckLatent(Checker& check, const std::string& scope, const AttentionSpec& attention) {
  const LatentSpec& latent = *attention.latent;
  const std::string because = Is("head_dim", attention.head_dim);
  check.Int(scope, "num_kv_heads", attention.num_kv_heads, attention.num_heads, attention.num_heads,
            " (latent attention)");
  check.Int(scope, "latent.query_rank", latent.query_rank, 0, kMaxWidth);
  check.Int(scope, "latent.rank", latent.rank, 1, kMaxWidth);
  check.Int(scope, "latent.rope_dim", latent.rope_dim, 1, attention.head_dim - 1, because);
  check.Int(scope, "latent.value_dim", latent.value_dim, 1, kMaxWidth);
  check.Real(scope, "latent.norm_eps", latent.norm_eps, 0.0, 1.0);
  if (check.ok() && attention.qk_norm != QkNorm::kNone) {
    check.Fail(scope + "qk_norm", "none in latent attention", "another kind");
  }
  CheckNoClip(check, scope, attention, "latent attention");
  check.Set(scope, "sinks", attention.sinks, false, " (latent attention)");
  check.Set(scope, "gate", attention.gate, false, " (latent attention)");
  check.Set(scope, "inner_norm", attention.inner_norm, false, " (latent attention)");
  const int64_t widest =
      std::max(int64_t{latent.rank} + latent.rope_dim, int64_t{latent.value_dim});
  if (check.ok() && widest * attention.num_heads > kMaxWidth) {
    check.Fail(
        scope + "latent",
        "num_heads * (rank + rope_dim) and num_heads * value_dim <= " + std::to_string(kMaxWidth),
        std::to_string(widest * attention.num_heads));
  }
}

void CheckAttention(Checker& check, const ModelSpec& spec, const std::string& scope,
                    const AttentionSpec& attention) {
  check.Int(scope, "num_kv_heads", attention.num_kv_heads, 1, kMaxWidth);
  check.Int(scope, "head_dim", attention.head_dim, 1, kMaxWidth);
  if (!check.ok()) return;
  const int64_t head_dim = attention.head_dim;
  if (attention.num_kv_heads * head_dim > kMaxWidth) {
    check.Fail(scope + "num_kv_heads", "num_kv_heads * head_dim <= " + std::to_string(kMaxWidth),
               std::to_string(attention.num_kv_heads * head_dim));
  }
  if (attention.routed()) {
    // Routed attention has no QK norm; a loader that sets one misread its file.
    if (attention.qk_norm != QkNorm::kNone) {
      check.Fail(scope + "qk_norm", "none in routed attention", "another kind");
    }
    CheckNoClip(check, scope, attention, "kind is \"routed\"");
    check.Set(scope, "sinks", attention.sinks, false, " (kind is \"routed\")");
    check.Set(scope, "gate", attention.gate, false, " (kind is \"routed\")");
    check.Set(scope, "inner_norm", attention.inner_norm, false, " (kind is \"routed\")");
    if (check.ok() && attention.latent.has_value()) {
      check.Fail(scope + "latent", "none in routed attention", "an object");
    }
    CheckRouting(check, scope + "routing.", spec, *attention.routing, BlockKind::kAttention);
  } else {
    check.Int(scope, "num_heads", attention.num_heads, 1, kMaxWidth);
    check.Divides(scope, "num_kv_heads", attention.num_kv_heads, "num_heads", attention.num_heads);
    if (attention.latent.has_value()) CheckLatent(check, scope, attention);
    if (check.ok() && attention.num_heads * head_dim > kMaxWidth) {
      check.Fail(scope + "num_heads", "num_heads * head_dim <= " + std::to_string(kMaxWidth),
                 std::to_string(attention.num_heads * head_dim));
    }
  }
  check.Factor(scope, "scale", attention.scale);
  CheckSoftCap(check, scope, "soft_cap", attention.soft_cap);
  CheckSoftCap(check, scope, "qkv_clip", attention.qkv_clip);
  if (attention.window.has_value()) {
    check.Int(scope, "window", *attention.window, 1, std::numeric_limits<int>::max());
  }
  CheckRopeOfLayer(check, spec, scope, attention);
}

void CheckFeedForward(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const FeedForwardSpec& feed_forward) {
  CheckExpert(check, scope + "expert.", feed_forward.expert);
  if (!feed_forward.routed()) {
    check.Int(scope, "width", feed_forward.width, 1, kMaxWidth);
    check.Int(scope, "shared_width", feed_forward.shared_width, 0, 0, " (kind is \"dense\")");
    return;
  }
  CheckRouting(check, scope + "routing.", spec, *feed_forward.routing, BlockKind::kFeedForward);
  check.Int(scope, "shared_width", feed_forward.shared_width, 0, kMaxWidth);
  if (feed_forward.shared_width == 0) {
    check.Set(scope, "shared_gate", feed_forward.shared_gate, false, Is("shared_width", 0));
  }
}

// Returns the number of sub-layers of all networks of a block beyond the first of each network;
// each sub-layer has tensors of its own.
int64_t MoreSublayers(const FeedForwardSpec& feed_forward) {
  int64_t networks = feed_forward.shared_width > 0 ? 1 : 0;
  networks += feed_forward.routed() ? feed_forward.routing->num_bodies() : 1;
  return networks * (feed_forward.expert.depth - 1);
}

void CheckTokenIds(Checker& check, const ModelSpec& spec) {
  const std::string because = Is("vocab_size", spec.vocab_size);
  if (spec.bos_token_id.has_value()) {
    check.Int("", "bos_token_id", *spec.bos_token_id, 0, spec.vocab_size - 1, because);
  }
  for (size_t i = 0; i < spec.eos_token_ids.size(); ++i) {
    const std::string key =
        spec.eos_token_ids.size() == 1 ? "eos_token_id" : "eos_token_id[" + std::to_string(i) + "]";
    check.Int("", key.c_str(), spec.eos_token_ids[i], 0, spec.vocab_size - 1, because);
  }
}

// Runs after all other checks have passed, because these checks bound the number of tensors.
void CheckTotals(Checker& check, const ModelSpec& spec) {
  if (!check.ok()) return;
  int64_t total = 0;
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    int64_t elements = 1;  // tensors have at most two dimensions, so this is at most 2^44
    for (const int64_t dim : tensor.shape) elements *= dim;
    total += elements;
    if (total > kMaxParameters) {
      check.Fail("the configuration", "at most " + std::to_string(kMaxParameters) + " parameters",
                 "more, counted up to " + tensor.name);
      return;
    }
  }
}

// A loader that numbers blocks wrongly is a defect of the program.
void CheckOrder(const ModelSpec& spec) {
  for (size_t i = 0; i < spec.blocks.size(); ++i) {
    const int layer = spec.blocks[i].layer;
    const int before = i == 0 ? -1 : spec.blocks[i - 1].layer;
    MOESERVE_CHECK(layer == before || layer == before + 1, "blocks are in the order of layers");
    for (size_t j = i; j-- > 0 && spec.blocks[j].layer == layer;) {
      MOESERVE_CHECK(spec.blocks[j].name() != spec.blocks[i].name(),
                     "the blocks of a layer have different names");
    }
  }
}

}  // namespace

std::vector<KvLayerShape> CacheShapes(const ModelSpec& spec) {
  std::vector<KvLayerShape> shapes;
  for (const BlockSpec& block : spec.blocks) {
    const AttentionSpec* a = block.attention();
    if (a == nullptr) continue;
    if (a->latent.has_value()) {
      shapes.push_back({1, a->latent->rank + a->latent->rope_dim, a->latent->rank});
    } else {
      shapes.push_back({a->num_kv_heads, a->head_dim, 0});
    }
  }
  return shapes;
}

int CacheLayer(const ModelSpec& spec, int block) {
  return static_cast<int>(
      std::count_if(spec.blocks.begin(), spec.blocks.begin() + block,
                    [](const BlockSpec& b) { return b.attention() != nullptr; }));
}

std::vector<StateShape> StateShapes(const ModelSpec& spec) {
  std::vector<StateShape> shapes;
  for (const BlockSpec& block : spec.blocks) {
    if (const ShortConvolutionSpec* convolution = block.short_convolution()) {
      shapes.push_back({convolution->taps - 1, spec.hidden_size});
    }
  }
  return shapes;
}

int StateIndex(const ModelSpec& spec, int block) {
  return static_cast<int>(
      std::count_if(spec.blocks.begin(), spec.blocks.begin() + block,
                    [](const BlockSpec& b) { return b.short_convolution() != nullptr; }));
}

absl::Status Validate(const ModelSpec& spec) {
  CheckOrder(spec);
  Checker check;
  check.Int("", "vocab_size", spec.vocab_size, 1, kMaxVocabulary);
  check.Int("", "hidden_size", spec.hidden_size, 1, kMaxWidth);
  check.Int("", "num_hidden_layers", spec.num_layers(), 1, kMaxLayers);
  check.Int("", "max_position_embeddings", spec.max_position_embeddings, 1, kMaxPositions);
  CheckTokenIds(check, spec);
  check.Real("norm.", "eps", spec.norm.eps, 0.0, 1.0);
  check.Real("norm.", "final_eps", spec.norm.final_eps.value_or(0.0f), 0.0, 1.0);
  CheckPosition(check, spec);
  CheckRelativeBias(check, spec);
  if (spec.tie_word_embeddings) {
    check.Set("", "head_bias", spec.head_bias, false, " (tie_word_embeddings is true)");
  }
  check.Factor("", "embedding_scale", spec.embedding_scale);
  check.Factor("", "residual_scale", spec.residual_scale);
  check.Factor("", "logit_scale", spec.logit_scale);
  CheckSoftCap(check, "", "logit_soft_cap", spec.logit_soft_cap);
  if (!check.ok()) return check.status();

  int64_t experts = 0;
  int64_t latent_heads = 0;  // each head has tensors of its own
  for (size_t i = 0; check.ok() && i < spec.blocks.size(); ++i) {
    const BlockSpec& block = spec.blocks[i];
    const std::string scope = Concat(Name(block.kind()), '[', block.layer, "].");
    if (const AttentionSpec* attention = block.attention()) {
      CheckAttention(check, spec, scope, *attention);
      CheckBiasOfLayer(check, spec, scope, *attention);
      if (attention->latent.has_value()) latent_heads += attention->num_heads;
    }
    if (const ShortConvolutionSpec* convolution = block.short_convolution()) {
      check.Int(scope, "conv", convolution->taps, 1, kMaxTaps);
      if (check.ok() && spec.relative_bias.has_value()) {
        check.Fail(scope + "kind", "\"dense\"", "\"short_conv\" (relative_bias is set)");
      }
    }
    if (const FeedForwardSpec* feed_forward = block.feed_forward()) {
      CheckFeedForward(check, spec, scope, *feed_forward);
      experts += MoreSublayers(*feed_forward);
    }
    if (NormsOutput(spec.norm.placement)) {
      const bool bias = std::visit([](const auto& mixer) { return mixer.out_bias; }, block.mixer);
      check.Set(scope, "out_bias", bias, false, " (norm.placement normalizes the output)");
    }
    if (const RoutedLayerSpec* routing = block.routing()) experts += routing->num_experts;
    if (latent_heads > kMaxExpertsOfModel) {
      check.Fail("num_heads",
                 "at most " + std::to_string(kMaxExpertsOfModel) +
                     " heads of latent attention in all layers together",
                 Concat(latent_heads, " up to layer ", block.layer));
    }
    if (experts > kMaxExpertsOfModel) {
      check.Fail("num_experts",
                 "at most " + std::to_string(kMaxExpertsOfModel) +
                     " experts in all layers together, each sub-layer of an expert counted",
                 Concat(experts, " up to layer ", block.layer));
    }
  }
  CheckTotals(check, spec);
  return check.status();
}

}  // namespace moeserve
