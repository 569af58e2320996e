#include "model_loaders/architectures/native/config_blocks.h"

#include <cmath>
#include <optional>
#include <vector>

#include "base/kinds.h"
#include "base/message.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/files/object_reader.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

enum class BlockForm { kDense, kRouted };

std::optional<BlockForm> ReadBlockForm(ObjectReader& reader) {
  return reader.Pick<BlockForm>("kind",
                                {{"dense", BlockForm::kDense}, {"routed", BlockForm::kRouted}});
}

ScoreSpec ParseScore(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  ScoreSpec score;
  const auto kind = reader.PickKind<ScoreKind>("kind");
  if (!kind.has_value()) return score;
  score.kind = *kind;
  score.norm = reader.PickKindOr("norm", RowNorm::kNone);
  score.row_scale = reader.Real("row_scale", 1.0);
  score.bias = reader.Bool("bias", false);
  switch (score.kind) {
    case ScoreKind::kDot:
      break;
    case ScoreKind::kCosine:
      score.dim = reader.Int("dim", 16);
      score.normalize_row = reader.Bool("normalize_row", true);
      score.normalize_expert = reader.Bool("normalize_expert", true);
      score.eps = reader.Real("eps", 1e-12);
      score.temperature = reader.PickKindOr("temperature", TemperatureKind::kNone);
      break;
  }
  reader.RefuseOthers(Concat(" (kind is ", Quoted(KindName(score.kind)), ')'));
  return score;
}

SelectSpec ParseSelect(const Json& json, const std::string& path, int num_experts,
                       Problems* problems) {
  ObjectReader reader(json, path, problems);
  SelectSpec select;
  const auto kind = reader.PickKind<SelectKind>("kind");
  if (!kind.has_value()) return select;
  select.kind = *kind;
  switch (select.kind) {
    case SelectKind::kTopK:
    case SelectKind::kTable:
      select.k = reader.Int("k");
      break;
    case SelectKind::kTopP:
      select.p = reader.Real("p");
      select.compare = reader.PickKindOr("compare", TopPCompare::kGe);
      select.max_experts = reader.Int("max", num_experts);
      break;
  }
  select.bias = reader.Bool("bias", false);
  select.groups = reader.Int("groups", 1);
  select.best_groups = reader.Int("best_groups", select.groups);
  select.group_score = reader.PickKindOr("group_score", GroupScoreKind::kMax);
  select.group_mask = reader.PickKindOr("group_mask", GroupMaskKind::kMinusInfinity);
  reader.RefuseOthers(Concat(" (kind is ", Quoted(KindName(select.kind)), ')'));
  return select;
}

SplitSpec ParseSplit(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  SplitSpec split;
  split.heads = reader.Int("heads");
  split.projection = reader.Bool("projection", true);
  split.merge_projection = reader.Bool("merge_projection", split.projection);
  split.depth = reader.Int("depth", 1);
  split.bias = reader.Bool("bias", true);
  split.residual = reader.Bool("residual", false);
  reader.RefuseOthers();
  return split;
}

// Reads one width for all experts, or a list with one width per expert. `num_experts` is 0 if its
// value was invalid; only the type is then checked.
std::vector<int> ParseWidths(const Json& json, const std::string& path, int num_experts,
                             Problems* problems) {
  const std::string expected = num_experts > 0
                                   ? Concat("an integer or a list of ", num_experts, " integers")
                                   : std::string("an integer or a list of integers");
  if (const std::optional<int> width = IntFrom(json)) return std::vector<int>(num_experts, *width);
  if (!json.is_array() || (num_experts > 0 && json.size() != static_cast<size_t>(num_experts))) {
    const std::string because =
        num_experts > 0 ? Concat(" (num_experts is ", num_experts, ')') : std::string();
    const std::string found = json.is_array() ? Concat("a list of ", json.size()) : ShowJson(json);
    problems->Add(Concat(path, ": expected ", expected, ", found ", found, because));
    return {};
  }
  std::vector<int> widths;
  widths.reserve(json.size());
  for (const Json& item : json) {
    const std::optional<int> width = IntFrom(item);
    if (!width.has_value()) {
      problems->Add(
          Concat(path, '[', widths.size(), "]: expected an integer, found ", ShowJson(item)));
      return {};
    }
    widths.push_back(*width);
  }
  return widths;
}

NullExperts ParseNullExperts(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  NullExperts null_experts;
  if (!reader.valid()) return null_experts;
  // Checked here and not only by Validate(), because the numbers are added below.
  const auto read = [&](const char* key) {
    const int count = reader.Int(key, 0);
    if (count >= 0 && count <= kMaxExperts) return count;
    reader.Fault(key, Concat("an integer in [0, ", kMaxExperts, "]"), std::to_string(count));
    return 0;
  };
  null_experts.zero = read("zero");
  null_experts.copy = read("copy");
  null_experts.constant = read("constant");
  reader.RefuseOthers();
  return null_experts;
}

RoutedLayerSpec ParseRouting(const Json& json, const std::string& path, BlockKind block,
                             Problems* problems) {
  ObjectReader reader(json, path, problems);
  RoutedLayerSpec routing;
  if (!reader.valid()) return routing;
  const size_t before = problems->count();
  routing.num_experts = reader.Int("num_experts");
  // Checked here and not only by Validate(), because one width is expanded to a list of this length
  // below.
  if (problems->count() == before &&
      (routing.num_experts < 1 || routing.num_experts > kMaxExperts)) {
    reader.Fault("num_experts", Concat("an integer in [1, ", kMaxExperts, "]"),
                 std::to_string(routing.num_experts));
  }
  const int experts = problems->count() == before ? routing.num_experts : 0;
  if (block == BlockKind::kFeedForward) {
    if (const Json* widths = reader.Required("widths", "an integer or a list of integers")) {
      routing.widths = ParseWidths(*widths, reader.PathOf("widths"), experts, problems);
    }
    if (const Json* split = reader.Optional("split")) {
      routing.split = ParseSplit(*split, reader.PathOf("split"), problems);
    }
    if (const Json* null_experts = reader.Optional("null_experts")) {
      routing.null_experts =
          ParseNullExperts(*null_experts, reader.PathOf("null_experts"), problems);
      routing.num_experts = experts + routing.null_experts.total();
    }
    routing.latent_width = reader.Int("latent_width", 0);
  }
  if (const Json* score = reader.Optional("score")) {
    routing.score = ParseScore(*score, reader.PathOf("score"), problems);
  }
  routing.gate = reader.PickKindOr("gate", GateKind::kSoftmax);
  routing.mixer_limit = reader.Real("mixer_limit", 0.0);
  if (const Json* select = reader.Required("select", "an object")) {
    routing.select = ParseSelect(*select, reader.PathOf("select"), routing.num_experts, problems);
  }
  routing.renormalize = reader.Bool("renormalize", false);
  routing.scale = reader.Real("scale", 1.0);
  routing.expert_scale = reader.Bool("expert_scale", false);
  reader.RefuseOthers(Concat(" (of ", Name(block), ')'));
  return routing;
}

ExpertSpec ParseExpert(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  ExpertSpec expert;
  if (!reader.valid()) return expert;
  expert.form =
      reader
          .Pick<ExpertForm>("form", {{"plain", ExpertForm::kPlain}, {"gated", ExpertForm::kGated}})
          .value_or(ExpertForm::kPlain);
  expert.activation = reader
                          .PickKind("activation", ActivationKind::kSilu)  // any value except kNone
                          .value_or(ActivationKind::kSilu);
  expert.activation_limit = static_cast<float>(reader.Real("activation_limit", 0.0));
  expert.activation_slope = static_cast<float>(reader.Real("activation_slope", 1.0));
  expert.up_offset = static_cast<float>(reader.Real("up_offset", 0.0));
  expert.bias = reader.Bool("bias", false);
  expert.inner_norm = reader.Bool("inner_norm", false);
  expert.residual =
      reader.Pick<bool>("sublayer", {{"plain", false}, {"residual", true}}, false).value_or(false);
  expert.depth = reader.Int("depth", 1);
  reader.RefuseOthers();
  return expert;
}

RopeScaling ParseRopeScaling(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  RopeScaling scaling;
  const auto kind = reader.PickKind<RopeScalingKind>("kind");
  if (!kind.has_value()) return scaling;
  scaling.kind = *kind;
  scaling.magnitude = reader.Real("magnitude", 1.0);
  switch (scaling.kind) {
    case RopeScalingKind::kNone:
      break;
    case RopeScalingKind::kLinear:
      scaling.factor = reader.Real("factor");
      break;
    case RopeScalingKind::kLlama3:
      scaling.factor = reader.Real("factor");
      scaling.original_positions = reader.Real("original_positions");
      scaling.low_freq_factor = reader.Real("low_freq_factor", 1.0);
      scaling.high_freq_factor = reader.Real("high_freq_factor", 4.0);
      break;
    case RopeScalingKind::kYarn:
      scaling.factor = reader.Real("factor");
      scaling.original_positions = reader.Real("original_positions");
      scaling.beta_fast = reader.Real("beta_fast", 32.0);
      scaling.beta_slow = reader.Real("beta_slow", 1.0);
      scaling.truncate = reader.Bool("truncate", true);
      break;
    case RopeScalingKind::kFactors:
      scaling.factors = reader.Reals("factors");
      break;
    case RopeScalingKind::kLong:
      scaling.original_positions = reader.Real("original_positions");
      scaling.factors = reader.Reals("factors");
      scaling.long_factors = reader.Reals("long_factors");
      scaling.long_magnitude = reader.Real("long_magnitude", 1.0);
      break;
  }
  reader.RefuseOthers(Concat(" (kind is ", Quoted(KindName(scaling.kind)), ')'));
  return scaling;
}

LatentSpec ParseLatent(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  LatentSpec latent;
  if (!reader.valid()) return latent;
  latent.query_rank = reader.Int("query_rank", 0);
  latent.rank = reader.Int("rank");
  latent.rope_dim = reader.Int("rope_dim");
  latent.value_dim = reader.Int("value_dim");
  latent.norm_eps = static_cast<float>(reader.Real("norm_eps", 1e-6));
  reader.RefuseOthers();
  return latent;
}

}  // namespace

PositionSpec ParsePosition(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  PositionSpec position;
  const auto kind = reader.Pick<PositionKind>("kind", {{"rope", PositionKind::kRope},
                                                       {"sinusoidal", PositionKind::kSinusoidal},
                                                       {"learned", PositionKind::kLearned},
                                                       {"none", PositionKind::kNone}});
  if (!kind.has_value()) return position;
  position.kind = *kind;
  if (position.kind == PositionKind::kRope) {
    position.theta = reader.Real("theta", 10000.0);
    position.pairing = reader
                           .Pick<RopePairing>("pairing",
                                              {{"half", RopePairing::kHalf},
                                               {"interleaved", RopePairing::kInterleaved}},
                                              RopePairing::kHalf)
                           .value_or(RopePairing::kHalf);
    position.fraction = reader.Real("fraction", 1.0);
    position.xpos_base = reader.Real("xpos_base", 0.0);
    if (const Json* scaling = reader.Optional("scaling")) {
      position.scaling = ParseRopeScaling(*scaling, reader.PathOf("scaling"), problems);
    }
  }
  if (position.kind == PositionKind::kSinusoidal) position.first = reader.Int("first", 0);
  reader.RefuseOthers(position.kind == PositionKind::kRope ? " (kind is \"rope\")"
                                                           : " (kind is not \"rope\")");
  return position;
}

namespace {

AttentionSpec ParseAttention(ObjectReader& reader, bool routed, Problems* problems) {
  AttentionSpec attention;
  if (routed) {
    attention.num_kv_heads = reader.Int("num_kv_heads", 1);
    if (const Json* routing = reader.Required("routing", "an object")) {
      attention.routing =
          ParseRouting(*routing, reader.PathOf("routing"), BlockKind::kAttention, problems);
    }
  } else {
    attention.num_heads = reader.Int("num_heads");
    attention.num_kv_heads = reader.Int("num_kv_heads", attention.num_heads);
    attention.qk_norm =
        reader
            .Pick<QkNorm>(
                "qk_norm",
                {{"none", QkNorm::kNone}, {"head", QkNorm::kHead}, {"full", QkNorm::kFull}},
                QkNorm::kNone)
            .value_or(QkNorm::kNone);
    attention.group_order = reader
                                .Pick<GroupOrder>("group_order",
                                                  {{"interleave", GroupOrder::kInterleave},
                                                   {"tile", GroupOrder::kTile}},
                                                  GroupOrder::kInterleave)
                                .value_or(GroupOrder::kInterleave);
    attention.sinks = reader.Bool("sinks", false);
    attention.qk_norm_after_rope = reader.Bool("qk_norm_after_rope", false);
    attention.qkv_clip = reader.Real("qkv_clip", 0.0);
    attention.gate = reader.Bool("gate", false);
    attention.inner_norm = reader.Bool("inner_norm", false);
    if (const Json* latent = reader.Optional("latent")) {
      attention.latent = ParseLatent(*latent, reader.PathOf("latent"), problems);
    }
  }
  attention.head_dim = reader.Int("head_dim");
  attention.bias = reader.Bool("bias", false);
  attention.out_bias = reader.Bool("out_bias", false);
  const double default_scale =
      attention.head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(attention.head_dim)) : 1.0;
  attention.scale = reader.Real("scale", default_scale);
  attention.soft_cap = reader.Real("soft_cap", 0.0);
  if (const Json* position = reader.Optional("position")) {
    attention.position = ParsePosition(*position, reader.PathOf("position"), problems);
  }
  if (const Json* window = reader.Optional("window"); window != nullptr && !window->is_null()) {
    attention.window = IntFrom(*window);
    if (!attention.window.has_value()) {
      reader.Fault("window", "null or an integer", ShowJson(*window));
    }
  }
  reader.RefuseOthers(routed ? " (kind is \"routed\")" : " (kind is \"dense\")");
  return attention;
}

ShortConvolutionSpec ParseShortConvolution(ObjectReader& reader) {
  ShortConvolutionSpec convolution;
  convolution.taps = reader.Int("conv", 3);
  convolution.bias = reader.Bool("bias", false);
  reader.RefuseOthers(" (kind is \"short_conv\")");
  return convolution;
}

}  // namespace

Mixer ParseTokenMixer(const Json& json, const std::string& path, Problems* problems) {
  enum class Form { kDense, kRouted, kShortConvolution };
  ObjectReader reader(json, path, problems);
  if (!reader.valid()) return AttentionSpec();
  const auto form = reader.Pick<Form>("kind", {{"dense", Form::kDense},
                                               {"routed", Form::kRouted},
                                               {"short_conv", Form::kShortConvolution}});
  if (!form.has_value()) return AttentionSpec();
  if (*form == Form::kShortConvolution) return ParseShortConvolution(reader);
  return ParseAttention(reader, *form == Form::kRouted, problems);
}

FeedForwardSpec ParseFeedForward(const Json& json, const std::string& path, Problems* problems) {
  ObjectReader reader(json, path, problems);
  FeedForwardSpec feed_forward;
  if (!reader.valid()) return feed_forward;
  const std::optional<BlockForm> form = ReadBlockForm(reader);
  if (!form.has_value()) return feed_forward;
  const bool routed = *form == BlockForm::kRouted;

  feed_forward.out_bias = reader.Bool("out_bias", false);
  if (const Json* expert = reader.Required("expert", "an object")) {
    feed_forward.expert = ParseExpert(*expert, reader.PathOf("expert"), problems);
  }
  if (routed) {
    if (const Json* routing = reader.Required("routing", "an object")) {
      feed_forward.routing =
          ParseRouting(*routing, reader.PathOf("routing"), BlockKind::kFeedForward, problems);
    }
    feed_forward.shared_width = reader.Int("shared_width", 0);
    feed_forward.shared_gate = reader.Bool("shared_gate", false);
  } else {
    feed_forward.width = reader.Int("width");
  }
  reader.RefuseOthers(routed ? " (kind is \"routed\")" : " (kind is \"dense\")");
  return feed_forward;
}

}  // namespace moeserve
