// The sampler against one written to be obviously right, in double precision.

#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "engine/output_text.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kVocab = 50;
constexpr double kNever = -std::numeric_limits<double>::infinity();

// Logits after biases, masks and penalties.
std::vector<double> Changed(const std::vector<float>& logits, const SamplingParams& p,
                            const std::vector<TokenId>& prompt, const std::vector<TokenId>& output,
                            const std::vector<TokenId>& eos) {
  std::vector<double> x(logits.begin(), logits.end());
  for (const auto& [id, bias] : p.logit_bias) x[id] += bias;
  if (!p.allowed_token_ids.empty()) {
    const std::set<TokenId> allowed(p.allowed_token_ids.begin(), p.allowed_token_ids.end());
    for (int i = 0; i < kVocab; ++i) x[i] = allowed.contains(i) ? x[i] : kNever;
  }
  std::vector<TokenId> history = prompt;
  history.insert(history.end(), output.begin(), output.end());
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
  double margin = 0.0;  // distance of any decision from its border
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
  if (sometimes()) p.min_tokens = random.Below(12);
  if (sometimes()) p.stop_token_ids = {random.Below(kVocab)};
  p.max_tokens = 100;
  p.sample_index = random.Below(4);
  return p;
}

TEST(SamplerTest, EqualsTheObviousOne) {
  Sampler sampler;
  int compared = 0, close = 0;
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
  EXPECT_GT(compared, 35000);
  EXPECT_LT(close, compared / 100);
}

// Frequencies of draws follow the probabilities.
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

}  // namespace
}  // namespace moeserve::testing
