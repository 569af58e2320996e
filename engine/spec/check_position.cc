#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/spec/checker.h"
#include "engine/spec/spec_limits.h"

namespace moeserve {
namespace {

// Returns how many dimensions of a head are rotated by rope, before rounding to an integer.
double ExactRopeDimensions(const PositionSpec& position, int head_dim) {
  return position.fraction * head_dim;
}

// Checks that XPOS's factors stay in range up to the last position.
void CheckXpos(Checker& check, const std::string& scope, const ModelSpec& spec,
               const PositionSpec& position) {
  if (!check.ok() || position.xpos_base == 0.0) return;
  const double bits = (spec.max_position_embeddings - 1.0) * -std::log2(kXposSmallest);
  const double smallest = std::max(bits / kMaxXposBits, 1e-3);
  if (position.xpos_base >= smallest) return;
  check.Fail(
      scope + "xpos_base", "0 or a number >= " + Number(smallest),
      Number(position.xpos_base) + Is("max_position_embeddings", spec.max_position_embeddings));
}

// Checks the rules of rope that do not depend on a layer. `scope` is the path of the object.
void CheckRope(Checker& check, const std::string& scope, const ModelSpec& spec,
               const PositionSpec& position) {
  const RopeScaling& scaling = position.scaling;
  check.Refuse(scaling.kind == RopeScalingKind::kLlama3 &&
                   scaling.high_freq_factor <= scaling.low_freq_factor,
               scope, "scaling.high_freq_factor", "more than low_freq_factor",
               Number(scaling.high_freq_factor));
  CheckXpos(check, scope, spec, position);
  check.Refuse(scaling.kind == RopeScalingKind::kYarn && position.theta == 1.0, scope, "theta",
               "a number other than 1", "1 (scaling.kind is \"yarn\")");
}

}  // namespace

void CheckRopeOfLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const AttentionSpec& attention) {
  if (attention.position.has_value()) {
    const auto allowed = [](PositionKind kind) {
      return kind == PositionKind::kRope || kind == PositionKind::kNone;
    };
    check.Refuse(!allowed(attention.position->kind), scope, "position.kind", "\"rope\" or \"none\"",
                 "another kind");
    check.Refuse(!allowed(spec.position.kind), scope, "position",
                 "none, because position.kind is not \"rope\" or \"none\"", "an object");
    if (attention.position->kind == PositionKind::kRope) {
      CheckRope(check, scope + "position.", spec, *attention.position);
    }
  }
  const PositionSpec& position = PositionOf(spec, attention);
  if (!check.ok() || position.kind != PositionKind::kRope) return;
  const std::string path = attention.position.has_value() ? scope + "position." : "position.";
  const int width = attention.rope_width();
  const double exact = ExactRopeDimensions(position, width);
  const int rounded = RopeDimensions(position, width);
  const std::string because = " (" + scope +
                              (attention.latent.has_value() ? "latent.rope_dim" : "head_dim") +
                              " is " + std::to_string(width) + ")";
  if (std::fabs(exact - rounded) > 1e-3 || rounded % 2 != 0 || rounded < 2) {
    check.Fail(path + "fraction", "fraction * head_dim to be an even whole number >= 2",
               Number(exact) + because);
    return;
  }
  check.Refuse(position.span == RopeSpan::kHead && width % 2 != 0, path, "span", "\"rotated\"",
               "\"head\"", because);
  const auto check_list = [&](const char* key, const std::vector<double>& factors) {
    check.Refuse(factors.size() != static_cast<size_t>(rounded / 2), path, key,
                 Concat("a list of ", rounded / 2, " numbers"), factors.size(), because);
  };
  const RopeScaling& scaling = position.scaling;
  const bool is_long = scaling.kind == RopeScalingKind::kLong;
  if (is_long || scaling.kind == RopeScalingKind::kFactors)
    check_list("scaling.factors", scaling.factors);
  if (is_long) check_list("scaling.long_factors", scaling.long_factors);
  check.Refuse(is_long && LongSequencesFrom(spec) != scaling.original_positions, path,
               "scaling.original_positions", "the same number in all layers",
               Number(scaling.original_positions));
}

void CheckPosition(Checker& check, const ModelSpec& spec) {
  if (spec.position.kind == PositionKind::kRope) CheckRope(check, "position.", spec, spec.position);
  check.Refuse(spec.position.kind == PositionKind::kSinusoidal &&
                   (spec.hidden_size < 4 || spec.hidden_size % 2 != 0),
               "", "hidden_size", "an even number >= 4", spec.hidden_size,
               " (position.kind is \"sinusoidal\")");
}

void CheckRelativeBias(Checker& check, const ModelSpec& spec) {
  if (!spec.relative_bias.has_value()) return;
  const RelativeBias& bias = *spec.relative_bias;
  const std::string scope = "relative_bias.";
  check.Int(scope, "max_distance", bias.max_distance, bias.exact_buckets() + 1, kMaxPositions,
            Is("buckets", bias.buckets));
  const int64_t distances =
      std::min<int64_t>(int64_t{bias.max_distance} + 1, spec.max_position_embeddings);
  const int64_t tables = bias.per_layer ? std::max(spec.num_layers(), 1) : 1;
  const int64_t most = kMaxRelativeBiases / (std::max<int64_t>(distances, 1) * tables);
  const AttentionSpec* const first = FirstAttention(spec);
  check.Refuse(first == nullptr, "", "relative_bias", "none", "an object (no layer has attention)");
  if (first == nullptr) return;
  check.Int("attention[0].", "num_heads", first->num_heads, 1, most,
            Is("relative_bias.max_distance", bias.max_distance));
}

void CheckBiasOfLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const AttentionSpec& attention) {
  if (!check.ok() || !spec.relative_bias.has_value()) return;
  const std::string because = " (relative_bias is set)";
  check.Refuse(attention.routed(), scope, "kind", "\"dense\"", "\"routed\"", because);
  check.Refuse(attention.latent.has_value(), scope, "latent", "none", "an object", because);
  check.Refuse(attention.soft_cap != 0, scope, "soft_cap", "0", Number(attention.soft_cap),
               because);
  const AttentionSpec& first = *FirstAttention(spec);
  const int heads = first.num_heads;
  check.Refuse(IsCausal(spec, attention) != IsCausal(spec, first), scope, "causal",
               "the same value in all layers", "two values", because);
  check.Int(scope, "num_heads", attention.num_heads, heads, heads, because);
}

const PositionSpec& PositionOf(const ModelSpec& spec, const AttentionSpec& attention) {
  return attention.position.has_value() ? *attention.position : spec.position;
}

std::optional<double> LongSequencesFrom(const ModelSpec& spec) {
  const auto of = [](const PositionSpec& position) -> std::optional<double> {
    if (position.kind != PositionKind::kRope || position.scaling.kind != RopeScalingKind::kLong) {
      return std::nullopt;
    }
    return position.scaling.original_positions;
  };
  for (const BlockSpec& block : spec.blocks) {
    const AttentionSpec* attention = block.attention();
    if (attention == nullptr) continue;
    if (const auto found = of(PositionOf(spec, *attention))) return found;
  }
  return std::nullopt;
}

bool HasXpos(const ModelSpec& spec) {
  return std::any_of(spec.blocks.begin(), spec.blocks.end(), [&](const BlockSpec& block) {
    const AttentionSpec* attention = block.attention();
    if (attention == nullptr) return false;
    const PositionSpec& position = PositionOf(spec, *attention);
    return position.kind == PositionKind::kRope && position.xpos_base > 0.0;
  });
}

int RopeDimensions(const PositionSpec& position, int head_dim) {
  if (position.kind != PositionKind::kRope) return 0;
  return static_cast<int>(std::lround(ExactRopeDimensions(position, head_dim)));
}

RopeSettings RopeOf(const ModelSpec& model, const AttentionSpec& attention) {
  const PositionSpec& position = PositionOf(model, attention);
  RopeSettings rope;
  rope.head_dim = attention.rope_width();
  if (position.kind != PositionKind::kRope) return rope;
  rope.dimensions = RopeDimensions(position, attention.rope_width());
  rope.theta = position.theta;
  rope.interleaved = position.pairing == RopePairing::kInterleaved;
  rope.xpos_base = position.xpos_base;
  if (position.span == RopeSpan::kHead) rope.distance = rope.head_dim / 2;
  if (position.frequencies == RopeSpan::kHead) rope.period = rope.head_dim;
  if (position.scaling != RopeScaling()) {
    rope.scaling = std::make_shared<const RopeScaling>(position.scaling);
  }
  return rope;
}

}  // namespace moeserve
