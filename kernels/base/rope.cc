#include "kernels/base/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace moeserve {
namespace {

// Returns Llama 3.1's frequency: unchanged if its wavelength is short compared with the original
// context, divided by `factor` if it is long, and a blend of both in between.
double Llama3Frequency(double frequency, const RopeScaling& s) {
  const double rotations = s.original_positions * frequency / (2.0 * std::numbers::pi);
  if (rotations < s.low_freq_factor) return frequency / s.factor;
  if (rotations > s.high_freq_factor) return frequency;
  const double kept = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1.0 - kept) * frequency / s.factor + kept * frequency;
}

// Returns the (fractional) index of the pair that rotates this number of times over the original
// context.
double YarnPair(double rotations, double theta, int dimensions, const RopeScaling& s) {
  return dimensions * std::log(s.original_positions / (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(theta));
}

// Divides the frequencies of slow pairs by `factor`, keeps those of fast pairs, and blends both
// between the limits.
void ApplyYarn(double theta, int dimensions, const RopeScaling& s,
               std::vector<double>& frequencies) {
  double low = YarnPair(s.beta_fast, theta, dimensions, s);
  double high = YarnPair(s.beta_slow, theta, dimensions, s);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dimensions - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double divided = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = divided * frequencies[i] / s.factor + (1.0 - divided) * frequencies[i];
  }
}

}  // namespace

std::vector<double> RopeFrequencies(const RopeSettings& settings, bool long_sequence) {
  std::vector<double> frequencies;
  const int period = settings.period > 0 ? settings.period : settings.dimensions;
  for (int i = 0; i < settings.dimensions / 2; ++i) {
    frequencies.push_back(std::pow(settings.theta, -2.0 * i / period));
  }
  if (settings.scaling == nullptr) return frequencies;
  const RopeScaling& s = *settings.scaling;
  switch (s.kind) {
    case RopeScalingKind::kNone:
      break;
    case RopeScalingKind::kLinear:
      for (double& f : frequencies) f /= s.factor;
      break;
    case RopeScalingKind::kLlama3:
      for (double& f : frequencies) f = Llama3Frequency(f, s);
      break;
    case RopeScalingKind::kYarn:
      ApplyYarn(settings.theta, period, s, frequencies);
      break;
    case RopeScalingKind::kFactors:
    case RopeScalingKind::kLong: {
      const bool use_long = s.kind == RopeScalingKind::kLong && long_sequence;
      const std::vector<double>& factors = use_long ? s.long_factors : s.factors;
      MOESERVE_CHECK(factors.size() == frequencies.size(), "one rope factor per frequency");
      for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= factors[i];
      break;
    }
  }
  return frequencies;
}

std::vector<double> XposRates(const RopeSettings& settings) {
  std::vector<double> rates;
  if (settings.xpos_base == 0.0) return rates;
  const int n = settings.dimensions;
  for (int i = 0; i < n / 2; ++i) {
    const double rate = std::log((2.0 * i + 0.4 * n) / (1.4 * n)) / settings.xpos_base;
    rates.push_back(settings.keys ? -rate : rate);
  }
  return rates;
}

bool SameAngles(const RopeSettings& a, const RopeSettings& b) {
  if (a.dimensions != b.dimensions || a.theta != b.theta || a.period != b.period) return false;
  if (a.xpos_base != b.xpos_base || (a.xpos_base != 0.0 && a.keys != b.keys)) return false;
  if (a.scaling == b.scaling) return true;
  return a.scaling != nullptr && b.scaling != nullptr && *a.scaling == *b.scaling;
}

}  // namespace moeserve
