// Compares the sampler with a simple reference sampler in double precision.

#include "engine/sample/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "engine/sample/output_text.h"
#include "kernels/base/sampling.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kVocab = 50;
constexpr double kNever = -std::numeric_limits<double>::infinity();

// Returns the logits after biases, masks and penalties.
std::vector<double> Changed(const std::vector<float>& logits, const SamplingParams& p,
                            const std::vector<TokenId>& prompt, const std::vector<TokenId>& output,
                            const std::vector<TokenId>& eos) {
  std::vector<double> x(logits.begin(), logits.end());
  const auto steps = static_cast<int>(output.size());
  for (const auto& [token, step] :
       {std::pair{p.forced_bos_token_id, 0}, std::pair{p.forced_eos_token_id, p.max_tokens - 1}}) {
    if (!token || step != steps) continue;
    std::fill(x.begin(), x.end(), kNever);
    x[*token] = 0.0;
    return x;
  }
  for (const auto& [id, bias] : p.logit_bias) x[id] += bias;
  if (!p.allowed_token_ids.empty()) {
    const std::set<TokenId> allowed(p.allowed_token_ids.begin(), p.allowed_token_ids.end());
    for (int i = 0; i < kVocab; ++i) x[i] = allowed.contains(i) ? x[i] : kNever;
  }
  std::vector<TokenId> history = prompt;
  history.insert(history.end(), output.begin(), output.end());
  const auto size = static_cast<size_t>(p.no_repeat_ngram_size);
  for (int id = 0; id < kVocab && size > 0; ++id) {
    std::vector<TokenId> next = history;
    next.push_back(id);
    for (size_t i = 0; i + size <= history.size(); ++i) {
      const auto begin = history.begin() + static_cast<int64_t>(i);
      if (std::equal(next.end() - static_cast<int64_t>(size), next.end(), begin)) x[id] = kNever;
    }
  }
  for (const auto& word : p.bad_words) {
    std::vector<TokenId> next = history;
    next.push_back(word.back());
    const bool ends =
        next.size() >= word.size() && std::equal(word.rbegin(), word.rend(), next.rbegin());
    if (ends) x[word.back()] = kNever;
  }
  if (static_cast<int>(output.size()) < p.min_tokens) {
    for (TokenId id : eos) x[id] = kNever;
    for (TokenId id : p.stop_token_ids) x[id] = kNever;
  }
  for (int i = 0; i < kVocab; ++i) {
    if (x[i] == kNever) continue;
    const auto in_output = std::count(output.begin(), output.end(), i);
    const bool seen = in_output > 0 || std::count(prompt.begin(), prompt.end(), i) > 0;
    if (seen) x[i] = x[i] > 0 ? x[i] / p.repetition_penalty : x[i] * p.repetition_penalty;
    x[i] -= p.frequency_penalty * static_cast<double>(in_output);
    if (in_output > 0) x[i] -= p.presence_penalty;
  }
  return x;
}

struct Choice {
  TokenId token = 0;
  double margin = 0.0;  // the least distance of a decision from its threshold
};

Choice Choose(const std::vector<double>& x, const SamplingParams& p, double uniform) {
  std::vector<int> order(kVocab);
  for (int i = 0; i < kVocab; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
  Choice choice{order[0], x[order[0]] - x[order[1]]};
  if (p.temperature == 0.0) return choice;
  choice.margin = 1.0;
  std::vector<double> weight(kVocab);
  for (int i = 0; i < kVocab; ++i) weight[i] = std::exp((x[i] - x[order[0]]) / p.temperature);
  int kept = kVocab;
  if (p.top_k > 0 && p.top_k < kVocab) {
    kept = p.top_k;
    if (x[order[kept]] != kNever) {
      choice.margin = std::min(choice.margin, x[order[kept - 1]] - x[order[kept]]);
    }
  }
  double total = 0.0;
  for (int r = 0; r < kept; ++r) total += weight[order[r]];
  if (p.top_p < 1.0) {
    double sum = 0.0;
    int n = 0;
    while (n < kept && sum < p.top_p * total) sum += weight[order[n++]];
    choice.margin = std::min({choice.margin, std::abs(sum - p.top_p * total),
                              std::abs(sum - weight[order[n - 1]] - p.top_p * total)});
    kept = n;
  }
  std::vector<bool> keep(kVocab);
  double mass = 0.0;
  for (int r = 0; r < kept; ++r) {
    const double w = weight[order[r]];
    choice.margin = std::min(choice.margin, p.min_p > 0.0 ? std::abs(w - p.min_p) : 1.0);
    keep[order[r]] = w >= p.min_p && w > 0.0;
    if (keep[order[r]]) mass += w;
  }
  double sum = 0.0;
  for (int i = 0; i < kVocab; ++i) {
    if (!keep[i]) continue;
    choice.token = i;
    sum += weight[i];
    choice.margin = std::min(choice.margin, std::abs(sum - uniform * mass));
    if (uniform * mass < sum) break;
  }
  return choice;
}

SamplingParams RandomParams(Random& random) {
  SamplingParams p;
  const auto sometimes = [&] { return random.Below(3) == 0; };
  p.temperature = sometimes() ? 0.0 : 0.3 + 0.1 * random.Below(15);
  if (sometimes()) p.top_k = random.Below(60);
  if (sometimes()) p.top_p = 0.05 + 0.1 * random.Below(9);
  if (sometimes()) p.min_p = 0.02 * random.Below(20);
  if (sometimes()) p.presence_penalty = -2.0 + 0.5 * random.Below(9);
  if (sometimes()) p.frequency_penalty = -2.0 + 0.5 * random.Below(9);
  if (sometimes()) p.repetition_penalty = 0.5 + 0.25 * random.Below(6);
  if (sometimes()) {
    for (int i = 0; i < 5; ++i)
      p.logit_bias.emplace_back(i * 7, static_cast<float>(random.Below(9)) - 4);
  }
  if (sometimes()) {
    for (int i = 0; i < 12; ++i) p.allowed_token_ids.push_back(random.Below(kVocab));
  }
  if (sometimes()) p.bad_words = {{random.Below(kVocab)}, {3, random.Below(kVocab)}, {4, 5, 6}};
  if (sometimes()) p.no_repeat_ngram_size = random.Below(4);
  if (sometimes()) p.min_tokens = random.Below(12);
  if (sometimes()) p.stop_token_ids = {random.Below(kVocab)};
  p.max_tokens = 100;
  if (sometimes()) p.forced_bos_token_id = random.Below(kVocab);
  if (sometimes()) {
    p.max_tokens = 1 + random.Below(8);
    p.forced_eos_token_id = random.Below(kVocab);
  }
  p.sample_index = random.Below(4);
  return p;
}

TEST(SamplerTest, EqualsTheObviousOne) {
  Sampler sampler;
  int compared = 0, close = 0, only = 0;
  for (int c = 0; c < 4000; ++c) {
    Random random(static_cast<uint64_t>(c));
    const SamplingParams params = RandomParams(random);
    std::vector<TokenId> prompt, output;
    for (int i = 0; i < 6; ++i) prompt.push_back(random.Below(kVocab));
    const std::vector<TokenId> eos = {kVocab - 1, kVocab - 2};
    SamplingState state(params, prompt, eos);
    std::vector<TokenId> history = prompt;
    for (int step = 0; step < 10; ++step) {
      std::vector<float> logits = random.Normals(kVocab);
      for (float& l : logits) l *= 3.0f;
      const std::vector<double> changed = Changed(logits, params, prompt, output, eos);
      const bool any =
          std::any_of(changed.begin(), changed.end(), [](double x) { return x != kNever; });
      if (!params.allowed_token_ids.empty()) {
        std::vector<TokenId> left;
        for (TokenId t = 0; t < kVocab; ++t) {
          if (changed[t] != kNever) left.push_back(t);
        }
        ASSERT_EQ(state.OnlyToken(history, kVocab, {}).value_or(-1),
                  left.size() == 1 ? left.front() : -1);
        only += left.size() == 1 ? 1 : 0;
      }
      if (state.changes_logits()) {
        ASSERT_EQ(state.Apply(history, logits), any) << "case " << c;
      }
      if (!any) break;
      const auto seed = static_cast<uint64_t>(c * 3);
      const TokenId token = sampler.Sample(logits, params, seed, step);
      const Choice wanted = Choose(changed, params, UniformDraw(seed, params.sample_index, step));
      if (wanted.margin > 1e-5) {
        ASSERT_EQ(token, wanted.token) << "case " << c << ", step " << step;
        ++compared;
      } else {
        ++close;
      }
      state.Accept(token);
      output.push_back(token);
      history.push_back(token);
    }
  }
  EXPECT_GT(compared, 30000);
  EXPECT_GT(only, 10);
  EXPECT_LT(close, compared / 100);
}

// Applies the sampling rules by sorting, with the sampler's own f32 weights. The result is exact,
// so that ties and thresholds are tested, too.
TokenId ChooseExactly(const std::vector<float>& logits, const SamplingParams& p, double uniform) {
  const auto size = logits.size();
  std::vector<TokenId> order(size);
  for (size_t i = 0; i < size; ++i) order[i] = static_cast<TokenId>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  const TokenId best = order[0];
  if (p.temperature == 0.0) return best;
  const auto share = [&](TokenId t) {
    return SamplingExp((logits[t] - logits[best]) * SamplingScale(p.temperature));
  };
  size_t kept = size;
  if (p.top_k > 0) kept = std::min(kept, static_cast<size_t>(p.top_k));
  uint64_t total = 0;
  for (size_t r = 0; r < kept; ++r) total += SamplingWeight(share(order[r]));
  if (total == 0) return best;
  if (p.top_p < 1.0) {
    const uint64_t wanted = NucleusWeight(p.top_p, total);
    uint64_t sum = 0;
    size_t n = 0;
    while (sum < wanted) sum += SamplingWeight(share(order[n++]));
    kept = n;
  }
  order.resize(kept);
  std::erase_if(order, [&](TokenId t) { return share(t) < static_cast<float>(p.min_p); });
  std::sort(order.begin(), order.end());
  uint64_t mass = 0;
  for (TokenId t : order) mass += SamplingWeight(share(t));
  const uint64_t target = DrawTarget(uniform, mass);
  uint64_t sum = 0;
  for (TokenId t : order) {
    sum += SamplingWeight(share(t));
    if (sum > target) return t;
  }
  ADD_FAILURE() << "nothing was drawn";
  return -1;
}

TEST(SamplerTest, KeepsAndDrawsExactly) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Sampler sampler;
  for (int c = 0; c < 20000; ++c) {
    Random random(static_cast<uint64_t>(c));
    const int size = 1 + random.Below(c % 10 == 0 ? 1500 : 40);
    std::vector<float> logits = random.Normals(size, 3.0);
    const int kind = random.Below(7);
    for (float& l : logits) {
      if (kind == 1) l = std::round(l);
      if (kind == 2) l = 4.5f;
      if (kind == 3 && random.Below(3) != 0) l = -kInfinity;
      if (kind == 4) l = l > 0.0f ? 8.0f : std::nextafter(8.0f, 0.0f);
      if (kind == 5) l *= random.Below(2) == 0 ? 1e-39f : 1e38f;
      if (kind == 6) l = l > 3.0f ? l : 0.0f * l;
    }
    SamplingParams p;
    p.temperature = std::vector<double>{0.0, 1e-300, 0.1, 0.7, 1.0, 100.0}[random.Below(6)];
    if (random.Below(2) == 0) p.top_k = 1 + random.Below(size + 2);
    if (random.Below(2) == 0) {
      p.top_p = std::vector<double>{1.0 - random.Uniform(), 1e-12, 0.0}[random.Below(3)];
    }
    if (random.Below(4) == 0) p.min_p = random.Below(2) == 0 ? random.Uniform() : 1.0;
    const double uniform = std::vector<double>{0.0, 1.0 - 0x1p-53, random.Uniform(),
                                               random.Uniform()}[random.Below(4)];
    ASSERT_EQ(sampler.Sample(logits, p, uniform), ChooseExactly(logits, p, uniform))
        << "case " << c << ", kind " << kind;
  }
}

TEST(SamplerTest, TopPOfZeroTakesTheMostProbableToken) {
  Sampler sampler;
  Random random(7);
  for (int c = 0; c < 200; ++c) {
    const std::vector<float> logits = random.Normals(50, 3.0);
    SamplingParams p;
    p.top_p = 0.0;
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    ASSERT_EQ(sampler.Sample(logits, p, random.Uniform()), best);
  }
}

TEST(SamplingArithmetic, WeightsAreExponentials) {
  EXPECT_EQ(SamplingWeight(SamplingExp(0.0f)), uint64_t{1} << kSamplingWeightBits);
  EXPECT_EQ(SamplingWeight(SamplingExp(-std::numeric_limits<float>::infinity())), 0u);
  EXPECT_EQ(SamplingWeight(SamplingExp(std::numeric_limits<float>::quiet_NaN())), 0u);
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto x = static_cast<float>(-90.0 * random.Uniform());
    const double expected = x > -87.0f ? std::exp(static_cast<double>(x)) : 0.0;
    EXPECT_NEAR(SamplingExp(x), expected, 2e-7 * expected);
    EXPECT_EQ(
        SamplingWeight(SamplingExp(x)),
        static_cast<uint64_t>(std::nearbyint(std::ldexp(static_cast<double>(SamplingExp(x)), 40))));
  }
}

// The tokens below the floor, which the search for a cutoff drops first, must have negligible
// weight together.
TEST(SamplingArithmetic, NothingOfWeightLiesBelowTheFloor) {
  Random random(2);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t negligible =
        random.Below(10) == 0 ? 0 : (uint64_t{1} << 40) >> random.Below(41) >> random.Below(2);
    const uint64_t near = negligible - (negligible > 1 && random.Below(2) == 0 ? 1 : 0);
    const float floor = SamplingFloor(near);
    ASSERT_LT(floor, 0.0f);
    const float below = std::nextafter(
        floor - (random.Below(2) == 0 ? 0.0f : static_cast<float>(random.Uniform())), -100.0f);
    ASSERT_LE(SamplingWeight(SamplingExp(below)), near) << floor;
    const float bins = SamplingBinsPerUnit(floor);
    const auto a = static_cast<float>(floor * random.Uniform());
    const auto b = std::max(floor, std::nextafter(a, -100.0f));
    ASSERT_GE(SamplingBin(a, bins), 0);
    ASSERT_LE(SamplingBin(a, bins), SamplingBin(b, bins));
    ASSERT_LT(SamplingBin(b, bins), kSamplingBins);
  }
}

TEST(SamplingArithmetic, TargetsLieInTheirRange) {
  Random random(3);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t total = 1 + (random.Next() >> (1 + random.Below(60)));
    EXPECT_LT(DrawTarget(1.0 - 0x1p-53, total), total);
    EXPECT_EQ(DrawTarget(0.0, total), 0u);
    EXPECT_EQ(DrawTarget(0.5, total), total / 2);
    const uint64_t weight = NucleusWeight(1.0 - random.Uniform(), total);
    EXPECT_GE(weight, 1u);
    EXPECT_LE(weight, total);
    const auto a = F32FromBits(static_cast<uint32_t>(random.Next()));
    const auto b = F32FromBits(static_cast<uint32_t>(random.Next()));
    if (std::isnan(a) || std::isnan(b)) continue;
    EXPECT_EQ(F32OfOrder(OrderOfF32(a)), a);
    EXPECT_EQ(OrderOfF32(a) < OrderOfF32(b), a < b);
  }
  EXPECT_EQ(OrderOfF32(0.0f), OrderOfF32(-0.0f));
}

// The frequencies of sampled tokens must follow their probabilities.
TEST(SamplerTest, DrawsFollowTheDistribution) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f};
  SamplingParams params;
  params.temperature = 0.7;
  Sampler sampler;
  std::vector<int> count(logits.size());
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) ++count[sampler.Sample(logits, params, 99, i)];
  double mass = 0.0;
  for (float l : logits) mass += std::exp(l / 0.7);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] / 0.7) / mass;
    EXPECT_NEAR(count[i], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << i;
  }
}

// Compares frequencies with probabilities for a vocabulary of many blocks, by a chi-square test
// over groups of tokens.
TEST(SamplerTest, DrawsFollowALargeDistribution) {
  constexpr int kSize = 3000, kGroups = 60, kDraws = 30000;
  Random random(11);
  const std::vector<float> logits = random.Normals(kSize);
  std::vector<double> probability(kGroups), count(kGroups);
  double mass = 0.0;
  for (float l : logits) mass += std::exp(static_cast<double>(l));
  for (int i = 0; i < kSize; ++i) probability[i * kGroups / kSize] += std::exp(logits[i]) / mass;
  Sampler sampler;
  const SamplingParams params;
  for (int i = 0; i < kDraws; ++i) {
    count[sampler.Sample(logits, params, 5, i) * kGroups / kSize] += 1.0;
  }
  double chi_square = 0.0;
  for (int g = 0; g < kGroups; ++g) {
    const double expected = kDraws * probability[g];
    chi_square += (count[g] - expected) * (count[g] - expected) / expected;
  }
  // With 59 degrees of freedom, chi-square is below 98 with probability 99.9 %, and above 58 with
  // probability one half.
  EXPECT_LT(chi_square, 98.0);
  EXPECT_GT(chi_square, 25.0);
}

}  // namespace
}  // namespace moeserve::testing
