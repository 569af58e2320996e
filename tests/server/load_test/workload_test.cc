#include "server/bench/load_test/workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace moeserve::server {
namespace {

constexpr int kMany = 20'000;

Workload Make(WorkloadOptions options) {
  if (options.vocab_size == 0) options.vocab_size = 1000;
  auto workload = Workload::Create(std::move(options));
  EXPECT_TRUE(workload.ok()) << workload.status();
  return *std::move(workload);
}

TEST(WorkloadTest, RequestsDependOnSeedAndNumberAlone) {
  const Workload a = Make({.seed = 7, .long_share = 0.3, .prefix_tokens = 5, .prefix_share = 0.5});
  const Workload b = Make({.seed = 7, .long_share = 0.3, .prefix_tokens = 5, .prefix_share = 0.5});
  const Workload other =
      Make({.seed = 8, .long_share = 0.3, .prefix_tokens = 5, .prefix_share = 0.5});
  std::set<std::vector<TokenId>> prompts;
  for (int i = 199; i >= -200; --i) {
    const LoadRequest x = a.Make(i), y = b.Make(i);
    EXPECT_EQ(x.prompt, y.prompt);
    EXPECT_EQ(x.output_tokens, y.output_tokens);
    EXPECT_EQ(x.long_prompt, y.long_prompt);
    EXPECT_EQ(x.index, i);
    EXPECT_NE(x.prompt, other.Make(i).prompt);
    prompts.insert(x.prompt);
  }
  EXPECT_EQ(prompts.size(), 400u);
}

TEST(WorkloadTest, UniformLengthsReachBothEndsEvenly) {
  const Workload workload = Make({.prompt = {10, 19}, .output = {1, 4}});
  std::vector<int> prompts(20), outputs(5);
  for (int i = 0; i < kMany; ++i) {
    const LoadRequest request = workload.Make(i);
    ASSERT_GE(request.prompt.size(), 10u);
    ASSERT_LE(request.prompt.size(), 19u);
    ASSERT_GE(request.output_tokens, 1);
    ASSERT_LE(request.output_tokens, 4);
    ++prompts[request.prompt.size()];
    ++outputs[request.output_tokens];
  }
  // The tolerance is six standard deviations of a binomially distributed count.
  const double tenth = 6.0 * std::sqrt(kMany * 0.1 * 0.9);
  for (int n = 10; n <= 19; ++n) EXPECT_NEAR(prompts[n], kMany / 10.0, tenth) << n;
  const double quarter = 6.0 * std::sqrt(kMany * 0.25 * 0.75);
  for (int n = 1; n <= 4; ++n) EXPECT_NEAR(outputs[n], kMany / 4.0, quarter) << n;
}

TEST(WorkloadTest, LogUniformLengthsFillEveryOctaveEvenly) {
  const Workload workload =
      Make({.prompt = {16, 1023}, .lengths = LengthDistribution::kLogUniform});
  std::vector<int> octaves(10);
  for (int i = 0; i < kMany; ++i) {
    const size_t length = workload.Make(i).prompt.size();
    ASSERT_GE(length, 16u);
    ASSERT_LE(length, 1023u);
    ++octaves[static_cast<int>(std::log2(static_cast<double>(length)))];
  }
  const double bound = 6.0 * std::sqrt(kMany * (1.0 / 6.0) * (5.0 / 6.0));
  for (int octave = 4; octave < 10; ++octave) {
    EXPECT_NEAR(octaves[octave], kMany / 6.0, bound) << octave;
  }
}

TEST(WorkloadTest, SharesAreKeptAndPrefixesShared) {
  const Workload workload = Make({.prompt = {4, 8},
                                  .long_share = 0.25,
                                  .long_prompt = {50, 60},
                                  .prefix_tokens = 12,
                                  .prefix_share = 0.4});
  int long_prompts = 0, prefixes = 0, both = 0;
  std::vector<TokenId> prefix;
  for (int i = 0; i < kMany; ++i) {
    const LoadRequest request = workload.Make(i);
    const size_t own = request.prompt.size() - (request.shared_prefix ? 12 : 0);
    ASSERT_GE(own, request.long_prompt ? 50u : 4u);
    ASSERT_LE(own, request.long_prompt ? 60u : 8u);
    long_prompts += request.long_prompt;
    prefixes += request.shared_prefix;
    both += request.long_prompt && request.shared_prefix;
    if (!request.shared_prefix) continue;
    const std::vector<TokenId> begin(request.prompt.begin(), request.prompt.begin() + 12);
    if (prefix.empty()) prefix = begin;
    ASSERT_EQ(begin, prefix);
  }
  const auto near = [](int count, double share) {
    EXPECT_NEAR(count, kMany * share, 6.0 * std::sqrt(kMany * share * (1.0 - share)));
  };
  near(long_prompts, 0.25);
  near(prefixes, 0.4);
  near(both, 0.1);  // both draws are independent of each other
}

TEST(WorkloadTest, IdsCoverTheVocabularyAndNoMore) {
  const Workload workload = Make({.vocab_size = 7});
  std::set<TokenId> seen;
  for (int i = 0; i < 100; ++i) {
    const LoadRequest request = workload.Make(i);
    seen.insert(request.prompt.begin(), request.prompt.end());
  }
  EXPECT_EQ(seen, (std::set<TokenId>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(WorkloadTest, TextsReplaceIds) {
  const Workload workload = Make({.output = {3, 3}, .texts = {"a", "b", "c"}});
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const LoadRequest request = workload.Make(i);
    EXPECT_TRUE(request.prompt.empty());
    EXPECT_EQ(request.output_tokens, 3);
    seen.insert(request.text);
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(WorkloadTest, RefusesWhatMakesNoSense) {
  const auto refused = [](WorkloadOptions options) {
    return absl::IsInvalidArgument(Workload::Create(std::move(options)).status());
  };
  EXPECT_TRUE(refused({}));  // there is no vocabulary
  EXPECT_TRUE(refused({.prompt = {0, 4}, .vocab_size = 9}));
  EXPECT_TRUE(refused({.output = {5, 4}, .vocab_size = 9}));
  EXPECT_TRUE(refused({.long_share = 1.5, .vocab_size = 9}));
  EXPECT_TRUE(refused({.prefix_share = std::nan(""), .vocab_size = 9}));
  EXPECT_TRUE(refused({.prefix_tokens = -1, .vocab_size = 9}));
  EXPECT_TRUE(refused({.prefix_tokens = 3, .texts = {"a"}}));
}

TEST(LengthRangeTest, ReadsNumbersAndRanges) {
  EXPECT_EQ(ParseLengthRange("128")->min, 128);
  EXPECT_EQ(ParseLengthRange("128")->max, 128);
  EXPECT_EQ(ParseLengthRange("16:512")->min, 16);
  EXPECT_EQ(ParseLengthRange("16:512")->max, 512);
  for (const char* bad : {"", ":", "1:", ":1", "0", "0:4", "5:4", "-1:4", "1:2:3", "1.5", "1 :2",
                          "99999999", "99999999999999999999"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseLengthRange(bad).status())) << bad;
  }
}

TEST(PoissonArrivalsTest, GapsAreExponentialAndIndependent) {
  const double rate = 25.0;
  PoissonArrivals arrivals(rate, 3), same(rate, 3);
  std::vector<double> gaps;
  double last = 0.0;
  for (int i = 0; i < kMany; ++i) {
    const double next = arrivals.Next();
    EXPECT_EQ(next, same.Next());
    ASSERT_GT(next, last);
    gaps.push_back((next - last) * rate);
    last = next;
  }
  double mean = 0.0, square = 0.0, neighbours = 0.0;
  for (int i = 0; i < kMany; ++i) {
    mean += gaps[i] / kMany;
    square += gaps[i] * gaps[i] / kMany;
    if (i > 0) neighbours += (gaps[i] - 1.0) * (gaps[i - 1] - 1.0) / kMany;
  }
  const double deviation = 1.0 / std::sqrt(kMany);
  EXPECT_NEAR(mean, 1.0, 6.0 * deviation);
  EXPECT_NEAR(square, 2.0, 6.0 * std::sqrt(20.0) * deviation);
  EXPECT_NEAR(neighbours, 0.0, 6.0 * deviation);
  // Compares the whole distribution (Kolmogorov-Smirnov): the largest distance from 1 - exp(-x)
  // exceeds 2 / sqrt(n) in one case in a thousand.
  std::sort(gaps.begin(), gaps.end());
  double distance = 0.0;
  for (int i = 0; i < kMany; ++i) {
    distance = std::max(distance, std::abs((i + 0.5) / kMany + std::expm1(-gaps[i])));
  }
  EXPECT_LT(distance, 2.0 * deviation);
  EXPECT_NE(PoissonArrivals(rate, 4).Next(), PoissonArrivals(rate, 3).Next());
}

}  // namespace
}  // namespace moeserve::server
