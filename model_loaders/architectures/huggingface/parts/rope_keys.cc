// The keys of rotary positions.

#include <algorithm>
#include <cmath>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

}  // namespace

PositionSpec DecoderConfig::Rope(double default_theta, double default_fraction) {
  const double theta = reader_.Real("rope_theta", default_theta);
  const double fraction = reader_.Real("partial_rotary_factor", default_fraction);
  const Json* const old = reader_.Optional("rope_scaling");
  const Json* const parameters = reader_.Optional("rope_parameters");
  if (old != nullptr && parameters != nullptr && *old != *parameters) {
    reader_.Fault("rope_scaling", "the same as rope_parameters, or none", ShowJson(*old));
  }
  const Json* const json = parameters != nullptr ? parameters : old;
  const Json none = Json::object();
  PositionSpec position =
      RopeFrom(json == nullptr ? none : *json,
               parameters != nullptr ? "rope_parameters" : "rope_scaling", theta);
  if (json == nullptr || !json->is_object() || !json->contains("partial_rotary_factor")) {
    position.fraction = fraction;
  }
  return position;
}

PositionSpec DecoderConfig::RopeFrom(const Json& json, const std::string& path,
                                     double default_theta) {
  const Json cleaned = WithoutNulls(json);
  ObjectReader reader(cleaned, path, &problems_);
  PositionSpec position;
  position.theta = reader.Real("rope_theta", default_theta);
  position.fraction = reader.Real("partial_rotary_factor", 1.0);
  std::string type = "default";
  for (const std::string_view key : {"type", "rope_type"}) {  // old and new name
    const Json* value = reader.Optional(key);
    if (value == nullptr) continue;
    if (value->is_string()) {
      type = value->get<std::string>();
    } else {
      reader.Fault(key, "a string", ShowJson(*value));
    }
  }
  ReadSections(reader);
  position.scaling = ScalingOf(reader, type);
  reader.RefuseOthers(Concat(" (rope_type is ", Quoted(type), ')'));
  return position;
}

// The position of an image's part has three numbers, each of which rotates a section of a head's
// pairs. The three are equal in texts, so that all pairs turn as without sections.
void DecoderConfig::ReadSections(ObjectReader& reader) {
  reader.Bool("mrope_interleaved", false);
  constexpr std::string_view key = "mrope_section";
  const Json* const list = reader.Optional(key);
  if (list == nullptr) return;
  int64_t pairs = 0;
  bool valid = list->is_array() && list->size() <= 8;
  for (size_t i = 0; valid && i < list->size(); ++i) {
    const std::optional<int> section = IntFrom((*list)[i]);
    valid = section.has_value() && *section >= 0;
    pairs += section.value_or(0);
  }
  if (!valid) {
    reader.Fault(key, "a list of at most 8 integers, none below 0", ShowJson(*list));
  } else if (pairs > most_pairs_) {
    most_pairs_ = pairs;
    sections_key_ = reader.PathOf(key);
  }
}

absl::Status DecoderConfig::CheckSections() const {
  for (const BlockSpec& block : spec_.blocks) {
    const AttentionSpec* const attention = block.attention();
    if (attention == nullptr || most_pairs_ == 0) continue;
    const PositionSpec& position = PositionOf(spec_, *attention);
    if (position.kind != PositionKind::kRope || attention->rope_width() > kMaxWidth) continue;
    const int pairs = RopeDimensions(position, attention->rope_width()) / 2;
    if (most_pairs_ <= pairs) continue;
    return absl::InvalidArgumentError(
        Concat(kConfigFile, ": ", sections_key_, ": expected at most ", pairs,
               " pairs of rotated elements in all sections, found ", most_pairs_));
  }
  return absl::OkStatus();
}

bool DecoderConfig::IsRopeOfLayers(const Json& json) {
  return json.is_object() &&
         (json.contains("full_attention") || json.contains("sliding_attention"));
}

RopeScaling DecoderConfig::ScalingOf(ObjectReader& reader, std::string_view type) {
  RopeScaling s;
  if (type == "default") return s;
  if (type == "linear") {
    s.kind = RopeScalingKind::kLinear;
    s.factor = reader.Real("factor");
    return s;
  }
  if (type == "llama3") {
    s.kind = RopeScalingKind::kLlama3;
    s.factor = reader.Real("factor");
    s.original_positions = OriginalPositions(reader);
    s.low_freq_factor = reader.Real("low_freq_factor");
    s.high_freq_factor = reader.Real("high_freq_factor");
    return s;
  }
  if (type == "yarn") {
    s.kind = RopeScalingKind::kYarn;
    s.original_positions = OriginalPositions(reader);
    s.factor = reader.Real("factor", s.original_positions > 0
                                         ? spec_.max_position_embeddings / s.original_positions
                                         : 1.0);
    s.beta_fast = reader.Real("beta_fast", 32.0);
    s.beta_slow = reader.Real("beta_slow", 1.0);
    s.truncate = reader.Bool("truncate", true);
    const auto magnitude = [&](double scale) {
      return s.factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(s.factor) + 1.0;
    };
    const double mscale = reader.Real("mscale", 0.0);
    const double mscale_all = reader.Real("mscale_all_dim", 0.0);
    const double derived = mscale != 0.0 && mscale_all != 0.0
                               ? magnitude(mscale) / magnitude(mscale_all)
                               : magnitude(1.0);
    s.magnitude = reader.Real("attention_factor", derived);
    return s;
  }
  if (type == "longrope" || type == "su") return LongRope(reader);
  reader.Fault("rope_type", "default, linear, llama3, longrope or yarn", Quoted(type));
  return s;
}

double DecoderConfig::OriginalPositions(ObjectReader& reader) {
  constexpr std::string_view key = "original_max_position_embeddings";
  const double inside = reader.Real(key, spec_.max_position_embeddings);
  const std::optional<int>& outside = defaults_.original_max_position_embeddings;
  return outside.has_value() ? reader_.Real(key, *outside) : inside;
}

RopeScaling DecoderConfig::LongRope(ObjectReader& reader) {
  RopeScaling s;
  s.kind = RopeScalingKind::kLong;
  s.original_positions = OriginalPositions(reader);
  s.factors = reader.Reals("short_factor");
  s.long_factors = reader.Reals("long_factor");
  const double factor = reader.Real(
      "factor",
      s.original_positions > 0 ? spec_.max_position_embeddings / s.original_positions : 1.0);
  const double derived = factor > 1.0 && s.original_positions > 1.0
                             ? std::sqrt(1.0 + std::log(factor) / std::log(s.original_positions))
                             : 1.0;
  const double both = reader.Real("attention_factor", derived);
  s.magnitude = reader.Real("short_mscale", both);
  s.long_magnitude = reader.Real("long_mscale", both);
  return s;
}

}  // namespace moeserve::huggingface
