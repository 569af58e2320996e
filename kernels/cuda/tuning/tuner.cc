#include "kernels/cuda/tuning/tuner.h"

#include <algorithm>

namespace moeserve::cuda {
namespace {

constexpr int kRounds = 5;
// After this many rounds, candidates that took kFarSlower times as long as the fastest are dropped.
constexpr int kRoundsOfAll = 2;
constexpr double kFarSlower = 1.3;
constexpr double kLeastGain = 0.02;

double Median(std::vector<double> times) {
  if (times.empty()) return 0.0;
  const size_t middle = times.size() / 2;
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(middle), times.end());
  return times[middle];
}

const std::function<void(int turn)>& Compared(const TuneCandidate& candidate) {
  return candidate.enqueue_to_output ? candidate.enqueue_to_output : candidate.enqueue;
}

}  // namespace

Result<TuneResult> Tune(const TuneCase& tune_case, TuneDevice& device) {
  const std::vector<TuneCandidate>& candidates = tune_case.candidates;
  TuneResult result;
  result.microseconds.resize(candidates.size());
  if (candidates.size() < 2) return result;

  MOESERVE_RETURN_IF_ERROR(device.RunDefault(Compared(candidates[0])));
  std::vector<std::function<Result<double>()>> measure(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (i > 0) {
      MOESERVE_ASSIGN_OR_RETURN(const bool equal, device.EqualsDefault(Compared(candidates[i])));
      if (!equal) {
        result.different.push_back(candidates[i].name);
        continue;
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(measure[i], device.Prepare(candidates[i].enqueue));
  }
  std::vector<std::vector<double>> times(candidates.size());
  for (int round = 0; round < kRounds; ++round) {
    double fastest = 0.0;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!measure[i]) continue;
      MOESERVE_ASSIGN_OR_RETURN(const double time, measure[i]());
      times[i].push_back(time);
      const double least = *std::min_element(times[i].begin(), times[i].end());
      fastest = fastest == 0.0 ? least : std::min(fastest, least);
    }
    if (round + 1 != kRoundsOfAll) continue;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!measure[i]) continue;
      const double least = *std::min_element(times[i].begin(), times[i].end());
      if (least > kFarSlower * fastest) measure[i] = nullptr;
    }
  }
  double best = 0.0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    result.microseconds[i] = Median(times[i]);
    if (!measure[i]) continue;
    if (best == 0.0 || result.microseconds[i] < best) {
      best = result.microseconds[i];
      result.chosen = static_cast<int>(i);
    }
  }
  if (measure[0] && best > (1.0 - kLeastGain) * result.microseconds[0]) result.chosen = 0;
  return result;
}

std::vector<int64_t> NumbersOfRows(int64_t most, int factor) {
  std::vector<int64_t> numbers;
  for (int64_t n = 1; n < most; n *= factor) numbers.push_back(n);
  numbers.push_back(most);
  return numbers;
}

}  // namespace moeserve::cuda
