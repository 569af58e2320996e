#include "engine/sampler.h"

#include <algorithm>
#include <cmath>

namespace moeserve {
namespace {

// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (the mix of SplitMix64).
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

bool MoreProbable(const std::pair<float, TokenId>& a, const std::pair<float, TokenId>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

}  // namespace

double UniformDraw(uint64_t seed, int64_t sample_index, int64_t step) {
  uint64_t z = Mix(seed + 0x9e3779b97f4a7c15ULL);
  z = Mix(z ^ (static_cast<uint64_t>(sample_index) + 0x9e3779b97f4a7c15ULL));
  z = Mix(z ^ (static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15ULL + 1));
  return static_cast<double>(z >> 11) * 0x1p-53;
}

TokenId ArgMax(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TokenId Sampler::Sample(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                        int64_t step) {
  if (params.temperature == 0.0) return ArgMax(logits);
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    candidates_.emplace_back(logits[i], static_cast<TokenId>(i));
  }
  const size_t k = params.top_k > 0 ? std::min<size_t>(params.top_k, logits.size()) : logits.size();
  if (k < candidates_.size()) {
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(k),
                      candidates_.end(), MoreProbable);
    candidates_.resize(k);
  } else {
    std::sort(candidates_.begin(), candidates_.end(), MoreProbable);
  }
  const double highest = candidates_.front().first;
  weights_.clear();
  double total = 0.0;
  for (const auto& [logit, id] : candidates_) {
    weights_.push_back(std::exp((logit - highest) / params.temperature));
    total += weights_.back();
  }
  size_t kept = candidates_.size();
  if (params.top_p < 1.0) {
    double sum = 0.0;
    kept = 0;
    while (kept < candidates_.size()) {
      sum += weights_[kept++];
      if (sum >= params.top_p * total) break;
    }
  }
  if (params.min_p > 0.0) {
    // The most probable candidate has weight 1.
    while (kept > 1 && weights_[kept - 1] < params.min_p) --kept;
  }
  double mass = 0.0;
  for (size_t i = 0; i < kept; ++i) mass += weights_[i];
  const double target = UniformDraw(seed, params.sample_index, step) * mass;
  double sum = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    sum += weights_[i];
    if (target < sum) return candidates_[i].second;
  }
  return candidates_[kept - 1].second;
}

TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top) {
  const float highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (float l : logits) sum += std::exp(l - highest);
  const double log_sum = std::log(sum) + highest;
  TokenLogprob result;
  result.token = token;
  result.logprob = static_cast<float>(logits[token] - log_sum);
  for (size_t i = 0; i < logits.size(); ++i) {
    if (MoreProbable({logits[i], static_cast<TokenId>(i)}, {logits[token], token})) ++result.rank;
  }
  const size_t n = std::min<size_t>(static_cast<size_t>(std::max(top, 0)), logits.size());
  if (n == 0) return result;
  std::vector<std::pair<float, TokenId>> best;
  best.reserve(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    best.emplace_back(logits[i], static_cast<TokenId>(i));
  }
  std::partial_sort(best.begin(), best.begin() + static_cast<int64_t>(n), best.end(), MoreProbable);
  for (size_t i = 0; i < n; ++i) {
    result.top.emplace_back(best[i].second, static_cast<float>(best[i].first - log_sum));
  }
  return result;
}

}  // namespace moeserve
