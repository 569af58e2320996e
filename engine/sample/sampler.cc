#include "engine/sample/sampler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moeserve {
namespace {

// The mixing function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
// generators").
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

bool MoreProbable(const std::pair<float, TokenId>& a, const std::pair<float, TokenId>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

constexpr SamplingCutoff kKeepAll{kForbidden, std::numeric_limits<TokenId>::max()};
constexpr int kBinBits = std::countr_zero(unsigned{kSamplingBins});

// As a number of tokens that are left.
constexpr int64_t kNoLimitOfTokens = int64_t{1} << 40;

constexpr size_t kBlock = 256;  // tokens per partial sum of weights

// Returns whether the last token of `word` would complete it.
bool CompletesWord(std::span<const TokenId> history, const std::vector<TokenId>& word) {
  const size_t before = word.size() - 1;
  return before <= history.size() &&
         std::equal(word.begin(), word.end() - 1, history.end() - static_cast<int64_t>(before));
}

// Calls `visit` for each token that would complete a sequence of `size` tokens that `history` has
// already.
template <typename Visit>
void ForEachRepeat(std::span<const TokenId> history, int size, const Visit& visit) {
  const auto before = static_cast<size_t>(size) - 1;
  if (size == 0 || history.size() < before) return;
  const auto last = history.last(before);
  for (size_t i = before; i < history.size(); ++i) {
    if (std::equal(last.begin(), last.end(), history.begin() + static_cast<int64_t>(i - before))) {
      visit(history[i]);
    }
  }
}

// Returns the sum of the weights of those tokens in a block, which starts at id `begin`, that pass
// the filters. Short loops without branches are used because the compiler vectorises them.
uint64_t SumWeights(std::span<const float> logits, float highest, float scale,
                    const SamplingCutoff& cutoff, float min_p, TokenId begin) {
  std::array<float, kBlock> shares{};
  const size_t size = std::min(kBlock, logits.size());
  for (size_t i = 0; i < size; ++i) shares[i] = SamplingExp((logits[i] - highest) * scale);
  if (min_p > 0.0f) {
    for (float& share : shares) share = share < min_p ? 0.0f : share;
  }
  if (cutoff.logit != kForbidden) {
    for (size_t i = 0; i < size; ++i) {
      shares[i] = cutoff.Keeps(logits[i], begin + static_cast<TokenId>(i)) ? shares[i] : 0.0f;
    }
  }
  uint64_t sum = 0;
  for (float share : shares) sum += SamplingWeight(share);
  return sum;
}

}  // namespace

double UniformDraw(uint64_t seed, int64_t sample_index, int64_t step) {
  uint64_t z = Mix(seed + 0x9e3779b97f4a7c15ULL);
  z = Mix(z ^ (static_cast<uint64_t>(sample_index) + 0x9e3779b97f4a7c15ULL));
  z = Mix(z ^ (static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15ULL + 1));
  return static_cast<double>(z >> 11) * 0x1p-53;
}

TokenId ArgMax(std::span<const float> logits) {
  // First finds the maximum alone, because a loop without an index and with independent lanes is
  // vectorised.
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> lanes;
  lanes.fill(logits[0]);
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t k = 0; k < kLanes; ++k) {
      const float l = logits[i + k];
      lanes[k] = lanes[k] > l ? lanes[k] : l;
    }
  }
  float highest = *std::max_element(lanes.begin(), lanes.end());
  for (; i < logits.size(); ++i) highest = std::max(highest, logits[i]);
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
             !params.bad_words.empty() || params.no_repeat_ngram_size > 0 ||
             params.min_tokens > 0 || params.forced_bos_token_id || params.forced_eos_token_id ||
             constraint_ != nullptr || params.presence_penalty != 0.0 ||
             params.frequency_penalty != 0.0 || params.repetition_penalty != 1.0;
}

void SamplingState::FillMask(int vocab_size) {
  if (std::exchange(mask_is_current_, true)) return;
  mask_.assign((static_cast<size_t>(vocab_size) + 31) / 32, ~uint32_t{0});
  if (constraint_ != nullptr) {
    constraint_->AllowedTokens(mask_,
                               limit_ == Limit::kKept ? TokensAfterNext() + 1 : kNoLimitOfTokens);
  }
  if (!params_.allowed_token_ids.empty()) {
    std::vector<uint32_t> allowed(mask_.size());
    for (TokenId token : params_.allowed_token_ids) {
      allowed[token / 32] |= uint32_t{1} << (token % 32);
    }
    for (size_t i = 0; i < mask_.size(); ++i) mask_[i] &= allowed[i];
  }
}

std::optional<TokenId> SamplingState::Forced() const {
  if (generated_ == 0 && params_.forced_bos_token_id) return params_.forced_bos_token_id;
  return generated_ + 1 == params_.max_tokens ? params_.forced_eos_token_id : std::nullopt;
}

bool SamplingState::Apply(std::span<const TokenId> history, std::span<float> logits) {
  if (const std::optional<TokenId> forced = Forced()) {
    std::ranges::fill(logits, kForbidden);
    logits[*forced] = 0.0f;
    return true;
  }
  for (const auto& [token, bias] : params_.logit_bias) logits[token] += bias;
  FillMask(static_cast<int>(logits.size()));
  if (constraint_ != nullptr || !params_.allowed_token_ids.empty()) {
    for (size_t i = 0; i < logits.size(); ++i) {
      if ((mask_[i / 32] >> (i % 32) & 1) == 0) logits[i] = kForbidden;
    }
  }
  ForbidRepeats(history, logits);
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

void SamplingState::ForbidRepeats(std::span<const TokenId> history, std::span<float> logits) const {
  ForEachRepeat(history, params_.no_repeat_ngram_size,
                [&](TokenId token) { logits[token] = kForbidden; });
}

void SamplingState::ForbidBadWords(std::span<const TokenId> history,
                                   std::span<float> logits) const {
  for (const std::vector<TokenId>& word : params_.bad_words) {
    if (CompletesWord(history, word)) logits[word.back()] = kForbidden;
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

void SamplingState::CountToken(TokenId token, uint64_t state) {
  if (keeps_steps_) steps_.push_back({state, token});
  ++generated_;
  mask_is_current_ = false;
  if (changes_) ++counts_[token];
}

bool SamplingState::AcceptInTime(TokenId token) {
  if (constraint_ == nullptr || limit_ != Limit::kWatched) {
    Accept(token);
    return true;
  }
  const uint64_t before = keeps_steps_ ? constraint_->StateHash() : 0;
  if (!constraint_->AcceptInTime(token, TokensAfterNext())) {
    limit_ = Limit::kKept;
    mask_is_current_ = false;
    return false;
  }
  CountToken(token, before);
  return true;
}

void SamplingState::Accept(TokenId token) {
  CountToken(token, keeps_steps_ ? constraint_->StateHash() : 0);
  if (constraint_ != nullptr) constraint_->Accept(token);
}

bool SamplingState::Forbids(std::span<const TokenId> history, TokenId token) const {
  const auto contains = [token](std::span<const TokenId> ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  if (generated_ < params_.min_tokens && (contains(eos_) || contains(params_.stop_token_ids))) {
    return true;
  }
  bool repeats = false;
  ForEachRepeat(history, params_.no_repeat_ngram_size,
                [&](TokenId other) { repeats = repeats || other == token; });
  if (repeats) return true;
  return std::any_of(params_.bad_words.begin(), params_.bad_words.end(), [&](const auto& word) {
    return word.back() == token && CompletesWord(history, word);
  });
}

std::optional<TokenId> SamplingState::OnlyToken(std::span<const TokenId> history, int vocab_size,
                                                std::span<const TokenId> textless) {
  if (const std::optional<TokenId> forced = Forced()) return forced;
  if (constraint_ == nullptr && params_.allowed_token_ids.empty()) return std::nullopt;
  FillMask(vocab_size);
  if (overworked()) return std::nullopt;
  std::optional<TokenId> only;
  for (size_t i = 0; i < mask_.size(); ++i) {
    for (uint32_t word = mask_[i]; word != 0; word &= word - 1) {
      const auto token = static_cast<TokenId>(32 * i) + std::countr_zero(word);
      if (token >= vocab_size || std::binary_search(textless.begin(), textless.end(), token) ||
          Forbids(history, token)) {
        continue;
      }
      if (only.has_value()) return std::nullopt;
      only = token;
    }
  }
  return only;
}

bool SamplingState::AcceptUnlessLast(TokenId token) {
  if (constraint_ == nullptr) {
    CountToken(token, 0);
    return true;
  }
  std::unique_ptr<ConstraintState> next = constraint_->Clone();
  const bool accepted = limit_ == Limit::kWatched ? next->AcceptInTime(token, TokensAfterNext())
                                                  : next->Accept(token);
  if (!accepted || (next->complete() && !next->can_continue())) return false;
  CountToken(token, keeps_steps_ ? constraint_->StateHash() : 0);
  constraint_ = std::move(next);
  return true;
}

void SamplingState::Continue(const SamplingState& parent) {
  generated_ = parent.generated_;
  counts_ = parent.counts_;
  constraint_ = parent.constraint_ == nullptr ? nullptr : parent.constraint_->Clone();
  mask_is_current_ = false;
  limit_ = parent.limit_;
}

bool SamplingState::AllowsInTime(TokenId token) {
  if (constraint_ == nullptr || limit_ != Limit::kWatched ||
      constraint_->Clone()->AcceptInTime(token, TokensAfterNext())) {
    return true;
  }
  limit_ = Limit::kKept;
  mask_is_current_ = false;
  return false;
}

bool SamplingState::ConstraintEndsAfter(TokenId token) const {
  if (constraint_ == nullptr) return false;
  const std::unique_ptr<ConstraintState> next = constraint_->Clone();
  return next->Accept(token) && next->complete() && !next->can_continue();
}

bool SamplingState::IgnoreLimit() {
  if (limit_ != Limit::kKept) return false;
  limit_ = Limit::kIgnored;
  mask_is_current_ = false;
  return true;
}

bool SamplingState::constraint_ended() const {
  return constraint_ != nullptr && constraint_->complete() && !constraint_->can_continue();
}

TokenId Sampler::Sample(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                        int64_t step) {
  return Sample(logits, params, UniformDraw(seed, params.sample_index, step));
}

TokenId Sampler::SampleAgain(std::span<const float> logits, const SamplingParams& params,
                             uint64_t seed, int64_t step) {
  // Another number, so that the tokens that are left keep their relative probabilities.
  return Sample(logits, params, UniformDraw(seed, params.sample_index, -1 - step));
}

TokenId Sampler::Sample(std::span<const float> logits, const SamplingParams& params,
                        double uniform) {
  const TokenId best = ArgMax(logits);
  const float scale = SamplingScale(params.temperature);
  if (scale == 0.0f) return best;
  const Row row{logits, logits[best], scale};
  const auto min_p = static_cast<float>(params.min_p);
  const SamplingCutoff cutoff = Filter(row, params);
  const uint64_t mass = SumBlocks(row, cutoff, min_p);
  if (mass == 0) return best;  // all logits are -infinity
  const uint64_t target = DrawTarget(uniform, mass);
  uint64_t sum = 0;
  size_t block = 0;
  while (sum + block_mass_[block] <= target) sum += block_mass_[block++];
  for (size_t i = block * kBlock; i < logits.size(); ++i) {
    const float share = SamplingExp(row.Exponent(i));
    const auto token = static_cast<TokenId>(i);
    if (share >= min_p && cutoff.Keeps(logits[i], token)) sum += SamplingWeight(share);
    if (sum > target) return token;
  }
  MOESERVE_CHECK(false, "a draw's target is less than the weight of all tokens");
}

uint64_t Sampler::SumBlocks(const Row& row, const SamplingCutoff& cutoff, float min_p) {
  const size_t size = row.logits.size();
  block_mass_.clear();
  uint64_t mass = 0;
  for (size_t i = 0; i < size; i += kBlock) {
    const auto logits = row.logits.subspan(i, std::min(kBlock, size - i));
    block_mass_.push_back(
        SumWeights(logits, row.highest, row.scale, cutoff, min_p, static_cast<TokenId>(i)));
    mass += block_mass_.back();
  }
  return mass;
}

SamplingCutoff Sampler::Filter(const Row& row, const SamplingParams& params) {
  SamplingCutoff cutoff = kKeepAll;
  uint64_t size = row.logits.size();
  if (params.top_k > 0 && static_cast<uint64_t>(params.top_k) < size) {
    size = static_cast<uint64_t>(params.top_k);
    cutoff = Cut(row, Measure::kCount, size, SamplingFloor(0));
  }
  if (params.top_p >= 1.0) return cutoff;
  const uint64_t total = SumBlocks(row, cutoff, 0.0f);
  if (total == 0) return cutoff;
  // `weight` is the share top_p of the weight of the tokens that top_k keeps. In descending order
  // of probability these tokens come first, so the shortest prefix of all tokens that reaches
  // `weight` contains only tokens that top_k keeps.
  const uint64_t weight = NucleusWeight(params.top_p, total);
  const float floor =
      RaisedFloor(SamplingFloor((total - weight) / size), (cutoff.logit - row.highest) * row.scale);
  return Cut(row, Measure::kWeight, weight, floor);
}

SamplingCutoff Sampler::Cut(const Row& row, Measure measure, uint64_t target, float floor) {
  candidates_.resize(row.logits.size());
  size_t kept = 0;
  for (size_t i = 0; i < row.logits.size(); ++i) {
    candidates_[kept] = static_cast<TokenId>(i);
    kept += static_cast<size_t>(row.Exponent(i) >= floor);
  }
  candidates_.resize(kept);
  const auto amount = [&](TokenId token) {
    return measure == Measure::kCount ? 1 : SamplingWeight(SamplingExp(row.Exponent(token)));
  };
  // Sums the amounts bin by bin and keeps only the candidates of the bin in which the sum reaches
  // the target, in order of id. Subtracts the sum of the bins before it from the target.
  const auto narrow = [&](const auto& bin_of) {
    histogram_.assign(kSamplingBins, 0);
    for (TokenId token : candidates_) histogram_[bin_of(token)] += amount(token);
    int bin = 0;
    while (bin < kSamplingBins && histogram_[bin] < target) target -= histogram_[bin++];
    std::erase_if(candidates_, [&](TokenId token) { return bin_of(token) != bin; });
  };
  const float bins_per_unit = SamplingBinsPerUnit(floor);
  narrow([&](TokenId token) { return SamplingBin(row.Exponent(token), bins_per_unit); });
  while (!candidates_.empty()) {
    const auto order = [&](TokenId token) { return OrderOfF32(row.logits[token]); };
    uint32_t highest = 0, lowest = ~uint32_t{0};
    for (TokenId token : candidates_) {
      highest = std::max(highest, order(token));
      lowest = std::min(lowest, order(token));
    }
    if (highest == lowest) {
      const uint64_t each = amount(candidates_[0]);
      return {F32OfOrder(highest), candidates_[(target - 1) / each]};
    }
    const int shift = std::max(0, static_cast<int>(std::bit_width(highest - lowest)) - kBinBits);
    narrow([&](TokenId token) { return static_cast<int>((highest - order(token)) >> shift); });
  }
  return kKeepAll;
}

TextlessIds::TextlessIds(const Tokenizer* tokenizer, std::span<const TokenId> eos, int vocab_size) {
  drawable_ = vocab_size;
  if (tokenizer == nullptr) return;
  for (TokenId id = 0; id < vocab_size; ++id) {
    const bool has_text = id < tokenizer->vocab_size() && !tokenizer->TokenString(id).empty();
    if (!has_text && std::find(eos.begin(), eos.end(), id) == eos.end()) ids_.push_back(id);
  }
  const int others = vocab_size - static_cast<int>(ids_.size());
  drawable_ = others;
  if (!ids_.empty() && ids_.front() != others) drawable_.reset();
}

double LogSumExp(std::span<const float> logits) {
  const float highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (float l : logits) sum += std::exp(l - highest);
  return std::log(sum) + highest;
}

TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top) {
  return Logprob(logits, token, top, logits);
}

TokenLogprob Logprob(std::span<const float> logits, TokenId token, int top,
                     std::span<const float> drawable) {
  const double log_sum = LogSumExp(logits);
  TokenLogprob result;
  result.token = token;
  result.logprob = static_cast<float>(logits[token] - log_sum);
  for (size_t i = 0; i < drawable.size(); ++i) {
    if (MoreProbable({drawable[i], static_cast<TokenId>(i)}, {logits[token], token})) ++result.rank;
  }
  if (top <= 0) return result;
  std::vector<std::pair<float, TokenId>> best;
  best.reserve(drawable.size());
  for (size_t i = 0; i < drawable.size(); ++i) {
    const bool left_out = drawable.data() != logits.data() && drawable[i] == kForbidden;
    if (!left_out) best.emplace_back(drawable[i], static_cast<TokenId>(i));
  }
  const size_t n = std::min(static_cast<size_t>(top), best.size());
  std::partial_sort(best.begin(), best.begin() + static_cast<int64_t>(n), best.end(), MoreProbable);
  for (size_t i = 0; i < n; ++i) {
    result.top.emplace_back(best[i].second, static_cast<float>(best[i].first - log_sum));
  }
  return result;
}

}  // namespace moeserve
