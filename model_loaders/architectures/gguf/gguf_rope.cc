// The rotary positions of GGUF files.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "model_loaders/architectures/gguf/gguf_reader.h"
#include "model_loaders/architectures/gguf/gguf_tensors.h"

namespace moeserve {
namespace {

constexpr std::string_view kType = ".rope.scaling.type";
constexpr std::string_view kFactor = ".rope.scaling.factor";
constexpr std::string_view kOriginalLength = ".rope.scaling.original_context_length";
constexpr double kUnrotated = 1e29;  // files have 1e30
constexpr std::string_view kMagnitude = ".rope.scaling.attn_factor";

}  // namespace

void GgufConfigReader::ReadPosition(int width) {
  PositionSpec& position = spec_.position;
  if (!family_.rope) {
    position.kind = PositionKind::kNone;
    for (const char* key :
         {".rope.freq_base", ".rope.dimension_count", ".rope.scaling.finetuned"}) {
      keys_.Ignore(key);
    }
    return;
  }
  // The parts of positions in images, which are equal in texts.
  keys_.Ignore(".rope.dimension_sections");
  position.theta = keys_.Real(".rope.freq_base", 10000.0);
  rotated_ = rotated_key_ = keys_.Int(".rope.dimension_count", width);
  if (family_.half_rotated) {
    if (problems_.empty() && (rotated_ < 4 || rotated_ > width || rotated_ % 4 != 0)) {
      keys_.Fault(".rope.dimension_count", Concat("a multiple of 4 in [4, ", width, ']'),
                  std::to_string(rotated_));
      rotated_ = rotated_key_ = 4;
    }
    rotated_ /= 2;
  }
  if (width > 0) position.fraction = static_cast<double>(rotated_) / width;
  if (family_.head_pairs && rotated_ != width) position.span = RopeSpan::kHead;
  position.scaling = ReadScaling();
}

RopeScaling GgufConfigReader::ReadScaling() {
  RopeScaling s;
  const double old_factor = keys_.Real(".rope.scale_linear", 1.0);
  s.factor = keys_.Real(kFactor, old_factor);
  if (s.factor == 0.0) s.factor = 1.0;  // stands for "not set"
  // Granite's key for a model without rotary positions, elsewhere information.
  constexpr std::string_view kFinetuned = ".rope.scaling.finetuned";
  if (family_.granite_factors) {
    if (!keys_.Bool(kFinetuned, true)) spec_.position.kind = PositionKind::kNone;
  } else {
    keys_.Ignore(kFinetuned);
  }
  if (family_.long_rope &&
      (Has(std::string(kShortRopeFactors)) || Has(std::string(kLongRopeFactors)))) {
    return ReadLongRope();
  }
  // A factor without a type has always meant linear scaling.
  const std::string type(keys_.Text(kType).value_or(s.factor == 1.0 ? "none" : "linear"));
  if (type == "yarn") {
    ReadYarn(s);
  } else if (type == "linear") {
    s.kind = s.factor == 1.0 ? RopeScalingKind::kNone : RopeScalingKind::kLinear;
    keys_.Ignore(kOriginalLength);
  } else if (type == "none") {
    s.factor = 1.0;
    keys_.Ignore(kOriginalLength);
  } else {
    keys_.Fault(kType, R"("none", "linear" or "yarn")", Quoted(type));
  }
  if (!Has(std::string(kRopeFactors))) return s;
  if (s.kind != RopeScalingKind::kNone) {
    keys_.Fault(kType, Concat("\"none\" with a tensor ", Quoted(kRopeFactors)), Quoted(type));
    return s;
  }
  return ReadDivisors();
}

RopeScaling GgufConfigReader::ReadDivisors() {
  RopeScaling factors;
  factors.kind = RopeScalingKind::kFactors;
  if (family_.half_rotated) {
    // Converters compute the divisors of the frequencies of heads that are rotated as a whole.
    // Every second one of these is one of a half.
    const std::vector<double> all = ReadRopeFactors(kRopeFactors, rotated_key_ / 2);
    for (size_t i = 0; i + 1 < all.size(); i += 2) factors.factors.push_back(all[i]);
  } else {
    factors.factors = ReadRopeFactors(kRopeFactors, rotated_ / 2);
  }
  if (family_.proportional_rope && !factors.factors.empty()) {
    PositionSpec& position = spec_.position;
    while (!factors.factors.empty() && factors.factors.back() >= kUnrotated) {
      factors.factors.pop_back();
    }
    position.fraction *= static_cast<double>(2 * factors.factors.size()) / rotated_;
    position.span = position.frequencies = RopeSpan::kHead;
    if (factors.factors.empty()) {
      problems_.Add(
          Concat("tensor ", Quoted(kRopeFactors), ": expected a divisor below 1e30, found none"));
    }
  }
  const bool neutral = std::all_of(factors.factors.begin(), factors.factors.end(),
                                   [](double f) { return f == 1.0; });
  return neutral ? RopeScaling() : factors;
}

void GgufConfigReader::ReadYarn(RopeScaling& s) {
  s.kind = RopeScalingKind::kYarn;
  s.original_positions = keys_.Real(kOriginalLength);
  s.beta_fast = keys_.Real(".rope.scaling.yarn_beta_fast", 32.0);
  s.beta_slow = keys_.Real(".rope.scaling.yarn_beta_slow", 1.0);
  s.truncate = family_.yarn_truncate;
  s.magnitude = keys_.Real(kMagnitude, 1.0);
  keys_.Require(".rope.scaling.yarn_ext_factor", 1);
  keys_.Require(".rope.scaling.yarn_attn_factor", 1);
  const double usual = s.factor > 1.0 ? 0.1 * std::log(s.factor) + 1.0 : 1.0;
  if (!family_.latent) {
    s.magnitude *= usual;
    return;
  }
  // DeepSeek's models have two numbers, "mscale" and "mscale_all_dim". The first one scales cosines
  // and sines, the second one divides them by what it scales the scores by. A file has a tenth of
  // the second one, because the first one is always equal, so that cosines and sines stay as they
  // are. 0 means that a model has neither number.
  const double log_multiplier = keys_.Real(".rope.scaling.yarn_log_multiplier");
  if (log_multiplier == 0.0) {
    s.magnitude *= usual;
  } else if (s.factor > 1.0) {
    const double magnitude = log_multiplier * std::log(s.factor) + 1.0;
    score_factor_ = magnitude * magnitude;
  }
}

// The authors' factors for short and long texts are tensors, the other settings keys.
RopeScaling GgufConfigReader::ReadLongRope() {
  const std::string_view type = keys_.Text(kType).value_or("longrope");
  if (type != "longrope") {
    keys_.Fault(kType, Concat("\"longrope\" with a tensor ", Quoted(kLongRopeFactors)),
                Quoted(type));
  }
  RopeScaling s;
  s.kind = RopeScalingKind::kLong;
  s.original_positions = keys_.Real(kOriginalLength);
  const double magnitude = keys_.Real(kMagnitude, 1.0);
  s.magnitude = family_.long_magnitude == 0.0 ? magnitude : family_.long_magnitude;
  s.long_magnitude = s.magnitude;
  s.factors = ReadRopeFactors(kShortRopeFactors, rotated_ / 2);
  s.long_factors = ReadRopeFactors(kLongRopeFactors, rotated_ / 2);
  return s;
}

std::vector<double> GgufConfigReader::ReadRopeFactors(std::string_view name, int count) {
  const auto fault = [&](std::string_view expected, std::string_view found) {
    problems_.Add(Concat("tensor ", Quoted(name), ": expected ", expected, ", found ", found));
    return std::vector<double>();
  };
  const std::vector<int64_t> shape = {count};
  const WeightFiles::Location* const tensor = weights_.Find(name);
  if (tensor == nullptr) return fault(Concat("F32 ", ShapeText(shape)), "no such tensor");
  if (tensor->entry->type != ElementType::kF32 || tensor->entry->shape != shape) {
    return fault(Concat("F32 ", ShapeText(shape)),
                 Concat(Name(tensor->entry->type), ' ', ShapeText(tensor->entry->shape)));
  }
  const Result<TensorData> data = tensor->file->Read(*tensor->entry);
  if (!data.ok()) return fault("data", std::string(data.status().message()));
  std::vector<double> factors;
  for (int i = 0; i < count; ++i) {
    float factor = 0.0f;
    std::memcpy(&factor, data->bytes.data() + static_cast<size_t>(i) * sizeof(factor),
                sizeof(factor));
    if (!(factor > 0.0f) || !std::isfinite(factor)) {
      return fault("numbers above 0", Concat("another value at index ", i));
    }
    factors.push_back(factor);
  }
  return factors;
}

}  // namespace moeserve
