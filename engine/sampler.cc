#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

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

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0 with a relative error of about 1e-7, in plain multiplications and additions
// that the compiler puts into vectors; 0 below -87.
inline float FastExp(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float scaled = clamped * 1.44269504f;
  const auto whole = static_cast<int32_t>(scaled - 0.5f);
  const auto n = static_cast<float>(whole);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float power = std::bit_cast<float>((whole + 127) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

}  // namespace

double UniformDraw(uint64_t seed, int64_t sample_index, int64_t step) {
  uint64_t z = Mix(seed + 0x9e3779b97f4a7c15ULL);
  z = Mix(z ^ (static_cast<uint64_t>(sample_index) + 0x9e3779b97f4a7c15ULL));
  z = Mix(z ^ (static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15ULL + 1));
  return static_cast<double>(z >> 11) * 0x1p-53;
}

TokenId ArgMax(std::span<const float> logits) {
  // The maximum first: that loop has no index to carry and runs in vectors.
  float highest = logits[0];
  for (float l : logits) highest = l > highest ? l : highest;
  return static_cast<TokenId>(std::find(logits.begin(), logits.end(), highest) - logits.begin());
}

SamplingState::SamplingState(const SamplingParams& params, std::span<const TokenId> prompt,
                             std::span<const TokenId> eos)
    : params_(params), eos_(eos) {
  if (params.repetition_penalty != 1.0) {
    for (TokenId token : prompt) counts_.try_emplace(token, 0);
  }
  if (params.constraint != nullptr) constraint_ = params.constraint->NewState();
  changes_ = !params.logit_bias.empty() || !params.allowed_token_ids.empty() ||
             !params.bad_words.empty() || params.min_tokens > 0 || constraint_ != nullptr ||
             params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 ||
             params.repetition_penalty != 1.0;
}

bool SamplingState::Apply(std::span<const TokenId> history, std::span<float> logits) {
  for (const auto& [token, bias] : params_.logit_bias) logits[token] += bias;
  mask_.assign((logits.size() + 31) / 32, ~uint32_t{0});
  if (constraint_ != nullptr) {
    constraint_->AllowedTokens(mask_, params_.max_tokens - generated_);
  }
  if (!params_.allowed_token_ids.empty()) {
    std::vector<uint32_t> allowed(mask_.size());
    for (TokenId token : params_.allowed_token_ids) {
      allowed[token / 32] |= uint32_t{1} << (token % 32);
    }
    for (size_t i = 0; i < mask_.size(); ++i) mask_[i] &= allowed[i];
  }
  if (constraint_ != nullptr || !params_.allowed_token_ids.empty()) {
    for (size_t i = 0; i < logits.size(); ++i) {
      if ((mask_[i / 32] >> (i % 32) & 1) == 0) logits[i] = kForbidden;
    }
  }
  ForbidBadWords(history, logits);
  ForbidEnds(logits);
  Penalise(logits);
  return std::any_of(logits.begin(), logits.end(), [](float l) { return l != kForbidden; });
}

void SamplingState::ForbidEnds(std::span<float> logits) const {
  if (generated_ >= params_.min_tokens) return;
  for (TokenId token : eos_) logits[token] = kForbidden;
  for (TokenId token : params_.stop_token_ids) logits[token] = kForbidden;
}

void SamplingState::ForbidBadWords(std::span<const TokenId> history,
                                   std::span<float> logits) const {
  for (const std::vector<TokenId>& word : params_.bad_words) {
    const size_t before = word.size() - 1;
    if (before > history.size()) continue;
    if (std::equal(word.begin(), word.end() - 1, history.end() - static_cast<int64_t>(before))) {
      logits[word.back()] = kForbidden;
    }
  }
}

void SamplingState::Penalise(std::span<float> logits) const {
  const auto repetition = static_cast<float>(params_.repetition_penalty);
  for (const auto& [token, count] : counts_) {
    float& logit = logits[token];
    if (logit == kForbidden) continue;
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    if (count == 0) continue;
    logit -= static_cast<float>(params_.frequency_penalty) * static_cast<float>(count) +
             static_cast<float>(params_.presence_penalty);
  }
}

void SamplingState::Accept(TokenId token) {
  ++generated_;
  if (!changes_) return;
  ++counts_[token];
  if (constraint_ != nullptr) constraint_->Accept(token);
}

bool SamplingState::constraint_ended() const {
  return constraint_ != nullptr && constraint_->complete() && !constraint_->can_continue();
}

TokenId Sampler::Sample(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                        int64_t step) {
  const TokenId best = ArgMax(logits);
  if (params.temperature == 0.0) return best;
  const float highest = logits[best];
  const auto scale = static_cast<float>(1.0 / params.temperature);
  weights_.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) weights_[i] = FastExp((logits[i] - highest) * scale);
  Filter(logits, params);
  double mass = 0.0;
  for (float w : weights_) mass += w;
  const double target = UniformDraw(seed, params.sample_index, step) * mass;
  double sum = 0.0;
  TokenId last = best;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] == 0.0f) continue;
    sum += weights_[i];
    last = static_cast<TokenId>(i);
    if (target < sum) break;
  }
  return last;
}

void Sampler::Filter(std::span<const float> logits, const SamplingParams& params) {
  const auto size = static_cast<int64_t>(logits.size());
  const bool by_rank = params.top_k > 0 && params.top_k < size;
  if (by_rank || params.top_p < 1.0) {
    order_.resize(logits.size());
    std::iota(order_.begin(), order_.end(), 0);
    // A heap gives the tokens from the most probable on, as many as are needed.
    const auto less = [&](TokenId a, TokenId b) {
      return MoreProbable({logits[b], b}, {logits[a], a});
    };
    std::make_heap(order_.begin(), order_.end(), less);
    auto end = order_.end();
    const int64_t ranks = by_rank ? params.top_k : size;
    double total = 0.0;
    if (by_rank) {
      for (int64_t r = 0; r < ranks; ++r) {
        std::pop_heap(order_.begin(), end, less);
        total += weights_[*--end];
      }
    } else {
      for (float w : weights_) total += w;
    }
    if (params.top_p < 1.0) {
      double sum = 0.0;
      auto rank = order_.end();
      while (rank != order_.begin()) {
        if (!by_rank) {
          std::pop_heap(order_.begin(), rank, less);
        } else if (rank == end) {
          break;
        }
        sum += weights_[*--rank];
        if (sum >= params.top_p * total) break;
      }
      end = rank;
    }
    for (auto it = order_.begin(); it != end; ++it) weights_[*it] = 0.0f;
  }
  if (params.min_p > 0.0) {
    // The most probable token has weight 1.
    for (float& w : weights_) w = w < params.min_p ? 0.0f : w;
  }
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
