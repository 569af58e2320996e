#include "server/encode/label_scores.h"

#include <algorithm>
#include <cmath>

namespace moeserve::server {
namespace {

double DotProduct(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum;
}

}  // namespace

void NormalizeVector(std::span<float> vector) {
  const double length = std::max(std::sqrt(DotProduct(vector, vector)), 1e-12);
  for (float& x : vector) x = static_cast<float>(x / length);
}

float CosineOf(std::span<const float> a, std::span<const float> b) {
  const double lengths = std::sqrt(DotProduct(a, a)) * std::sqrt(DotProduct(b, b));
  if (lengths == 0.0) return 0.0f;
  return static_cast<float>(std::clamp(DotProduct(a, b) / lengths, -1.0, 1.0));
}

std::vector<double> LogSoftmax(std::span<const float> logits) {
  const double largest = *std::ranges::max_element(logits);
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(x - largest);
  const double log_sum = largest + std::log(sum);
  std::vector<double> out;
  out.reserve(logits.size());
  for (const float x : logits) out.push_back(x - log_sum);
  return out;
}

void ScoreLabels(LabelScores kind, std::span<float> logits) {
  switch (kind) {
    case LabelScores::kIdentity:
      return;
    case LabelScores::kSigmoid:
      for (float& x : logits) x = static_cast<float>(1.0 / (1.0 + std::exp(-double{x})));
      return;
    case LabelScores::kSoftmax: {
      const std::vector<double> logprobs = LogSoftmax(logits);
      for (size_t i = 0; i < logits.size(); ++i) {
        logits[i] = static_cast<float>(std::exp(logprobs[i]));
      }
      return;
    }
  }
}

absl::Status CheckFinite(std::span<const float> values) {
  if (std::ranges::all_of(values, [](float x) { return std::isfinite(x); })) {
    return absl::OkStatus();
  }
  return absl::InternalError("the model's outputs have a value that is not finite");
}

}  // namespace moeserve::server
