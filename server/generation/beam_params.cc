#include "server/generation/beam_params.h"

#include <algorithm>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/metrics/prometheus.h"

namespace moeserve::server {
namespace {

// Whether a value of a field of kDrawFields leaves nothing to the draw, and what does.
struct Neutral {
  bool holds;
  const char* expected;
};

Neutral IsNeutral(const SamplingField& field, double value) {
  const std::string_view name = field.name;
  if (name == "temperature") return {value == 1.0 || value == 0.0, "1 or 0"};
  if (name == "top_k") return {value <= 0.0, "0 or -1"};
  if (name == "top_p") return {value == 1.0, "1"};
  return {value == field.Get(SamplingParams()), "0"};
}

}  // namespace

absl::Status ResolveBeams(const BeamNames& names,
                          const std::function<bool(const char* field)>& is_given,
                          const RequestRules& rules, GenerationParams& params) {
  SamplingParams& sampling = params.sampling;
  const auto refuse = [&](const std::string& name, std::string_view expected,
                          const std::string& found) {
    return InvalidValue(name, Concat("'", name, "': expected ", expected, " with '", names.asked,
                                     "', found ", found));
  };
  for (const SamplingField& field : kDrawFields) {
    if (!is_given(field.name)) field.Set(sampling, field.Get(SamplingParams()));
    const double value = field.Get(sampling);
    const Neutral neutral = IsNeutral(field, value);
    if (!neutral.holds) {
      return refuse(names.sampling + field.name, neutral.expected, PrometheusNumber(value));
    }
  }
  if (sampling.seed) {
    return refuse(names.sampling + "seed", "none", std::to_string(*sampling.seed));
  }
  if (params.max_tokens == 0) return refuse(names.sampling + "max_tokens", "1 or more", "0");
  const int beams = sampling.beam->num_beams;
  const int most = std::min(kMaxBeams, rules.max_num_seqs);
  if (beams > most) {
    return refuse(std::string(names.beams), Concat("1 to ", most), std::to_string(beams));
  }
  if (params.n > beams) {
    return refuse("n", Concat("at most '", names.beams, "' (", beams, ")"),
                  std::to_string(params.n));
  }
  return absl::OkStatus();
}

}  // namespace moeserve::server
