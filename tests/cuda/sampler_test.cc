// The device's sampler must draw the same tokens as the engine's sampler on the host.

#include "kernels/cuda/rows/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "engine/sample/sampler.h"
#include "kernels/cuda/device/launch.h"
#include "tests/cuda/device_array.h"
#include "tests/support/random.h"

namespace moeserve::cuda {
namespace {

using ::moeserve::testing::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kLargestUniform = 1.0 - 0x1p-53;

struct SamplerCase {
  std::vector<float> logits;
  SamplingParams params;
  double uniform = 0.5;
  int logprobs = -1;
  std::string name;
  int drawable = 0;  // SampleRow::drawable
};

SampleRow RowOf(const SamplerCase& c, int row) {
  return {SamplingScale(c.params.temperature),
          c.params.top_k,
          c.params.top_p,
          static_cast<float>(c.params.min_p),
          row,
          c.uniform,
          c.logprobs,
          c.drawable};
}

std::string Describe(const SamplerCase& c) {
  const SamplingParams& p = c.params;
  return c.name + ", V " + std::to_string(c.logits.size()) + ", temperature " +
         std::to_string(p.temperature) + ", top_k " + std::to_string(p.top_k) + ", top_p " +
         std::to_string(p.top_p) + ", min_p " + std::to_string(p.min_p) + ", uniform " +
         std::to_string(c.uniform) + ", logprobs " + std::to_string(c.logprobs);
}

// Samples all cases in one launch, with `blocks` blocks per row (0: the default). The rows are in
// memory in reverse order, with NaN between them.
std::vector<SampleResult> Sample(const std::vector<SamplerCase>& cases, int blocks = 0) {
  const size_t n = cases.size(), vocabulary = cases[0].logits.size(), stride = vocabulary + 3;
  std::vector<float> logits(n * stride, kNan);
  std::vector<SampleRow> rows;
  for (size_t i = 0; i < n; ++i) {
    const size_t row = n - 1 - i;
    std::copy(cases[i].logits.begin(), cases[i].logits.end(),
              logits.begin() + static_cast<int64_t>(row * stride));
    rows.push_back(RowOf(cases[i], static_cast<int>(row)));
  }
  DeviceArray<float> device_logits(logits);
  DeviceArray<SampleRow> device_rows(rows);
  DeviceArray<SampleResult> results(n);
  LaunchSample({device_rows.data(), results.data(), static_cast<int>(n), device_logits.data(),
                static_cast<int64_t>(stride), static_cast<int>(vocabulary), blocks},
               nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return results.Read();
}

void ExpectClose(float value, float expected, const std::string& what) {
  if (std::isfinite(expected)) {
    EXPECT_NEAR(value, expected, 2e-6f * (1.0f + std::abs(expected))) << what;
  } else if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(value)) << what;
  } else {
    EXPECT_EQ(value, expected) << what;
  }
}

void ExpectEqualsHost(const SamplerCase& c, const SampleResult& result) {
  Sampler sampler;
  const std::span<const float> all(c.logits);
  const auto drawable = c.drawable == 0 ? all : all.first(static_cast<size_t>(c.drawable));
  const TokenId token = sampler.Sample(drawable, c.params, c.uniform);
  ASSERT_EQ(result.token, token) << Describe(c);
  const bool finite =
      std::all_of(c.logits.begin(), c.logits.end(), [](float l) { return std::isfinite(l); });
  EXPECT_EQ(result.finite, finite ? 1 : 0) << Describe(c);
  SampleResult untouched;
  std::memset(&untouched, 0xff, sizeof(untouched));
  size_t alternatives = 0;
  if (c.logprobs >= 0) {
    const TokenLogprob wanted = Logprob(c.logits, token, c.logprobs, drawable);
    ExpectClose(result.logprob, wanted.logprob, Describe(c));
    EXPECT_EQ(result.rank, wanted.rank) << Describe(c);
    alternatives = wanted.top.size();
    for (size_t i = 0; i < alternatives; ++i) {
      EXPECT_EQ(result.top_token[i], wanted.top[i].first) << i << ": " << Describe(c);
      ExpectClose(result.top_logprob[i], wanted.top[i].second, Describe(c));
    }
  }
  EXPECT_EQ(std::memcmp(result.top_token + alternatives, untouched.top_token + alternatives,
                        (kMaxAlternatives - alternatives) * sizeof(int32_t)),
            0)
      << Describe(c);
}

void ExpectEqualHost(const std::vector<SamplerCase>& cases, int blocks = 0) {
  const std::vector<SampleResult> results = Sample(cases, blocks);
  for (size_t i = 0; i < cases.size(); ++i) ExpectEqualsHost(cases[i], results[i]);
}

// One block per row and every size of clusters must give the host's tokens and equal bytes.
void ExpectEqualForAllBlockCounts(const std::vector<SamplerCase>& cases) {
  const std::vector<SampleResult> expected = Sample(cases, 1);
  for (size_t i = 0; i < cases.size(); ++i) ExpectEqualsHost(cases[i], expected[i]);
  for (const int blocks : SampleBlockCounts(static_cast<int>(cases[0].logits.size()))) {
    if (blocks == 1) continue;
    const std::vector<SampleResult> results = Sample(cases, blocks);
    for (size_t i = 0; i < cases.size(); ++i) {
      ASSERT_EQ(std::memcmp(&results[i], &expected[i], sizeof(SampleResult)), 0)
          << blocks << " blocks: " << Describe(cases[i]);
    }
  }
}

// Returns a row of logits of one of kKinds kinds, many of which are difficult.
constexpr int kSamplerKinds = 13;
std::vector<float> Logits(int kind, int vocabulary, Random& random, std::string* name) {
  std::vector<float> l = random.Normals(vocabulary);
  const auto each = [&](auto f) {
    for (float& v : l) v = f(v);
  };
  const auto pick = [&] { return static_cast<size_t>(random.Below(vocabulary)); };
  switch (kind) {
    case 0:
      *name = "normal";
      break;
    case 1:
      *name = "wide", each([](float v) { return 5.0f * v; });
      break;
    case 2:
      *name = "far from zero", each([](float v) { return 1000.0f + 3.0f * v; });
      break;
    case 3:
      *name = "few values", each([](float v) { return std::round(2.0f * v); });
      break;
    case 4:
      *name = "all equal", each([](float) { return -3.25f; });
      break;
    case 5:
      *name = "mostly -infinity";
      each([&](float v) { return random.Below(4) == 0 ? v : -kInfinity; });
      l[pick()] = 1.0f;
      break;
    case 6:
      *name = "one finite", each([](float) { return -kInfinity; });
      l[pick()] = -7.0f;
      break;
    case 7:
      *name = "all -infinity", each([](float) { return -kInfinity; });
      break;
    case 8:
      *name = "huge", each([](float v) { return v * 1.5e38f; });
      break;
    case 9:
      *name = "subnormal", each([](float v) { return v * 1e-39f; });
      break;
    case 10:
      *name = "zeros of both signs", each([](float v) { return v > 1.0f ? v : v * 0.0f; });
      break;
    case 11:
      *name = "two neighbours",
      each([](float v) { return v > 0.0f ? 8.0f : std::nextafter(8.0f, 0.0f); });
      break;
    default:
      *name = "a sure one", each([](float v) { return v - 40.0f; });
      l[pick()] = 0.0f;
      break;
  }
  return l;
}

template <typename T>
T OneOf(Random& random, const std::vector<T>& values) {
  return values[static_cast<size_t>(random.Below(static_cast<int>(values.size())))];
}

SamplerCase RandomCase(int kind, int vocabulary, Random& random) {
  SamplerCase c;
  c.logits = Logits(kind, vocabulary, random, &c.name);
  SamplingParams& p = c.params;
  p.temperature = OneOf<double>(random, {0.0, 1e-300, 1e-3, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0});
  if (random.Below(2) == 0) {
    p.top_k = OneOf<int>(random, {1, 2, 3, vocabulary / 2, vocabulary - 1, vocabulary,
                                  vocabulary + 5, 1 + random.Below(vocabulary)});
  }
  if (random.Below(2) == 0) {
    p.top_p =
        OneOf<double>(random, {0.0, 1e-12, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-12, kLargestUniform});
  }
  if (random.Below(3) == 0) p.min_p = OneOf<double>(random, {1e-9, 0.05, 0.5, 1.0});
  c.uniform = OneOf<double>(random, {0.0, kLargestUniform, random.Uniform(), random.Uniform(),
                                     random.Uniform(), random.Uniform()});
  c.logprobs = OneOf<int>(random, {-1, -1, 0, 1, 5, kMaxAlternatives});
  return c;
}

TEST(CudaSampler, EqualsTheHost) {
  for (const int vocabulary : {1, 2, 3, 31, 32, 33, 255, 256, 257, 1000, 5003}) {
    Random random(static_cast<uint64_t>(vocabulary));
    std::vector<SamplerCase> cases;
    const int rounds = vocabulary < 500 ? 12 : 4;
    for (int i = 0; i < rounds * kSamplerKinds; ++i) {
      cases.push_back(RandomCase(i % kSamplerKinds, vocabulary, random));
    }
    ExpectEqualHost(cases);
    if (HasFatalFailure()) return;
  }
}

TEST(CudaSampler, ClustersEqualOneBlock) {
  for (const int vocabulary : {1, 33, 1000}) {
    Random random(static_cast<uint64_t>(vocabulary + 1));
    std::vector<SamplerCase> cases;
    for (int i = 0; i < 2 * kSamplerKinds; ++i) {
      cases.push_back(RandomCase(i % kSamplerKinds, vocabulary, random));
      cases.back().drawable = OneOf<int>(random, {0, 0, 1, (vocabulary + 1) / 2});
    }
    ExpectEqualForAllBlockCounts(cases);
    if (HasFatalFailure()) return;
  }
}

// The sizes of published vocabularies.
TEST(CudaSampler, ClustersEqualOneBlockOnLongRows) {
  for (const int vocabulary : {32000, 128256, 151936}) {
    Random random(static_cast<uint64_t>(vocabulary));
    std::vector<SamplerCase> cases;
    for (const int kind : {0, 3}) {
      if (kind == 0 && vocabulary > 130000) continue;  // takes long
      SamplerCase c;
      c.logits = Logits(kind, vocabulary, random, &c.name);
      c.params.top_k = kind == 0 ? 50 : vocabulary / 3;
      c.params.top_p = 0.9;
      c.uniform = random.Uniform();
      c.logprobs = kind == 0 ? 2 : -1;
      cases.push_back(std::move(c));
    }
    ExpectEqualForAllBlockCounts(cases);
    if (HasFatalFailure()) return;
  }
}

// Equal logits on both sides of the borders between the blocks of a cluster.
TEST(CudaSampler, ClustersKeepTheLowestIdsOfTiesOverTheirBorders) {
  constexpr int kVocabulary = 515;
  std::vector<SamplerCase> cases;
  for (const int blocks : {4, 8, 16}) {
    const int per_block = (kVocabulary + 32 * blocks - 1) / (32 * blocks) * 32;
    for (const int border : {per_block, 2 * per_block, 3 * per_block}) {
      for (int kept = 1; kept <= 5; ++kept) {
        SamplerCase c;
        c.name = "ties at " + std::to_string(border);
        c.logits.assign(kVocabulary, -4.0f);
        for (int i = -2; i < 3 && border + i < kVocabulary; ++i) {
          c.logits[static_cast<size_t>(border + i)] = 1.0f;
        }
        c.params.top_k = kept;
        c.uniform = kLargestUniform;  // draws the kept token with the highest id
        c.logprobs = 6;
        cases.push_back(std::move(c));
      }
    }
  }
  ExpectEqualForAllBlockCounts(cases);
}

TEST(CudaSampler, TheNumberOfBlocksFollowsRowsAndDevice) {
  for (const int vocabulary : {1, 32000, 128256, 151936, 1 << 23}) {
    const std::vector<int> counts = SampleBlockCounts(vocabulary);
    EXPECT_EQ(counts.front(), 1);
    for (const int rows : {1, 17, 500}) {
      EXPECT_EQ(std::count(counts.begin(), counts.end(), ChooseSampleBlocks(rows, vocabulary)), 1);
    }
  }
#if defined(MOESERVE_CUDA_EMULATION)
  if (DeviceAttribute(cudaDevAttrMultiProcessorCount) != 132) return;
  EXPECT_EQ(SampleBlockCounts(128256), (std::vector<int>{1, 4, 8, 16}));
  EXPECT_EQ(SampleBlockCounts(262144), (std::vector<int>{1, 8, 16}));
  EXPECT_EQ(SampleBlockCounts(1 << 23), (std::vector<int>{1}));
  EXPECT_EQ(ChooseSampleBlocks(1, 1000), 1);
  EXPECT_EQ(ChooseSampleBlocks(1, 128256), 8);
  EXPECT_EQ(ChooseSampleBlocks(1, 500000), 16);
  EXPECT_EQ(ChooseSampleBlocks(64, 128256), 4);
  SetEmulatedCapability(8);
  EXPECT_EQ(SampleBlockCounts(128256), (std::vector<int>{1}));
  EXPECT_EQ(ChooseSampleBlocks(1, 128256), 1);
  SetEmulatedCapability(9);
#endif
}

// Only the first ids may be drawn.
TEST(CudaSampler, EqualsTheHostOnAPartOfTheRow) {
  for (const int vocabulary : {2, 33, 257, 1000, 5003, 60001}) {
    Random random(static_cast<uint64_t>(vocabulary));
    std::vector<SamplerCase> cases;
    for (int i = 0; i < (vocabulary < 10000 ? 3 : 1) * kSamplerKinds; ++i) {
      SamplerCase c = RandomCase(i % kSamplerKinds, vocabulary, random);
      c.drawable = OneOf<int>(random, {1, vocabulary / 2, vocabulary - 1, vocabulary});
      // The other ids are the most probable ones.
      for (int id = c.drawable; id < vocabulary; id += 3) {
        c.logits[static_cast<size_t>(id)] += 20.0f;
      }
      cases.push_back(std::move(c));
    }
    ExpectEqualHost(cases);
    if (HasFatalFailure()) return;
  }
}

// Keeps every possible number of tokens, with ties to break.
TEST(CudaSampler, KeepsTheLowestIdsOfTies) {
  constexpr int kVocabulary = 70;
  Random random(3);
  std::vector<SamplerCase> cases;
  for (int k = 1; k <= kVocabulary; ++k) {
    for (const int kind : {3, 4}) {
      for (const bool by_weight : {false, true}) {
        SamplerCase c;
        c.logits = Logits(kind, kVocabulary, random, &c.name);
        c.uniform = kLargestUniform;  // draws the kept token with the highest id
        if (by_weight) {
          c.params.top_p = (k - 0.5) / kVocabulary;
        } else {
          c.params.top_k = k;
        }
        cases.push_back(std::move(c));
      }
    }
  }
  ExpectEqualHost(cases);
}

// Rows that do not fit into shared memory.
TEST(CudaSampler, EqualsTheHostOnLongRows) {
  constexpr int kVocabulary = 60001;
  Random random(5);
  std::vector<SamplerCase> cases;
  for (const int kind : {0, 1, 3, 4}) {
    SamplerCase c = RandomCase(kind, kVocabulary, random);
    c.params = {};
    c.uniform = random.Uniform();
    c.logprobs = 3;
    cases.push_back(c);
    c.logprobs = -1;
    c.params.top_p = 0.9;
    cases.push_back(c);
    c.params.top_k = 1 + random.Below(kVocabulary);
    cases.push_back(c);
  }
  ExpectEqualHost(cases);
}

TEST(CudaSampler, ReportsWhatIsNotFinite) {
  for (const int vocabulary : {1, 40, 300}) {
    Random random(1);
    std::vector<SamplerCase> cases;
    for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      for (const int at : {0, vocabulary / 2, vocabulary - 1}) {
        for (const double temperature : {0.0, 1.0}) {
          SamplerCase c;
          c.logits = random.Normals(vocabulary);
          c.logits[static_cast<size_t>(at)] = bad;
          c.params.temperature = temperature;
          c.logprobs = 2;
          cases.push_back(c);
        }
      }
    }
    const std::vector<SampleResult> results = Sample(cases);
    for (size_t i = 0; i < cases.size(); ++i) {
      EXPECT_EQ(results[i].finite, 0) << i;
      if (i < 12) {
        EXPECT_EQ(results[i].token, -1) << i;
      } else {
        Sampler sampler;
        EXPECT_EQ(results[i].token,
                  sampler.Sample(cases[i].logits, cases[i].params, cases[i].uniform))
            << i;
      }
    }
  }
}

bool Untouched(const SampleResult& result) {
  SampleResult poison;
  std::memset(&poison, 0xff, sizeof(poison));
  return std::memcmp(&result, &poison, sizeof(result)) == 0;
}

TEST(CudaSampler, SkipsRowsAndIsIndependentOfOthers) {
  constexpr int kVocabulary = 777;
  Random random(8);
  std::vector<SamplerCase> cases;
  for (int i = 0; i < 9; ++i) {
    cases.push_back(RandomCase(i % 2, kVocabulary, random));
    cases.back().logprobs = i;
  }
  const std::vector<SampleResult> together = Sample(cases);
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::vector<SampleResult> alone = Sample({cases[i]});
    EXPECT_EQ(std::memcmp(&together[i], &alone[0], sizeof(SampleResult)), 0) << i;
  }
  std::vector<SampleRow> rows = {RowOf(cases[0], -1), RowOf(cases[0], 0), RowOf(cases[0], -1)};
  DeviceArray<SampleRow> device_rows(rows);
  DeviceArray<float> logits(cases[0].logits);
  DeviceArray<SampleResult> results(3);
  LaunchSample({device_rows.data(), results.data(), 3, logits.data(), kVocabulary, kVocabulary},
               nullptr);
  const std::vector<SampleResult> read = results.Read();
  EXPECT_TRUE(Untouched(read[0]));
  EXPECT_EQ(std::memcmp(&read[1], &together[0], sizeof(SampleResult)), 0);
  EXPECT_TRUE(Untouched(read[2]));
}

TEST(CudaSampler, ReadsRowsAnewWhereAGraphIsReplayed) {
  constexpr int kVocabulary = 300, kRows = 4;
  DeviceArray<SampleRow> device_rows(kRows);
  DeviceArray<float> logits(size_t{kRows} * kVocabulary);
  DeviceArray<SampleResult> results(kRows);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  LaunchSample({device_rows.data(), results.data(), kRows, logits.data(), kVocabulary, kVocabulary},
               stream);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  Random random(9);
  for (int replay = 0; replay < 5; ++replay) {
    std::vector<SamplerCase> cases;
    std::vector<SampleRow> rows;
    std::vector<float> values;
    for (int i = 0; i < kRows; ++i) {
      cases.push_back(RandomCase((replay + i) % kSamplerKinds, kVocabulary, random));
      rows.push_back(RowOf(cases.back(), i == replay ? -1 : i));
      values.insert(values.end(), cases.back().logits.begin(), cases.back().logits.end());
    }
    device_rows.Write(rows);
    logits.Write(values);
    ASSERT_EQ(cudaMemset(results.data(), 0xff, kRows * sizeof(SampleResult)), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<SampleResult> read = results.Read();
    for (int i = 0; i < kRows; ++i) {
      const auto at = static_cast<size_t>(i);
      if (i == replay) {
        EXPECT_TRUE(Untouched(read[at]));
      } else {
        ExpectEqualsHost(cases[at], read[at]);
      }
    }
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

#if defined(MOESERVE_CUDA_EMULATION)
TEST(CudaSampler, DoesNotDependOnTheOrderOfThreads) {
  constexpr int kVocabulary = 1500;
  for (const emulator::Order order :
       {emulator::Order{emulator::Order::kReverse, 0}, emulator::Order{emulator::Order::kEager, 0},
        emulator::Order{emulator::Order::kRandom, 1},
        emulator::Order{emulator::Order::kRandom, 2}}) {
    emulator::SetOrder(order);
    Random random(4);
    std::vector<SamplerCase> cases;
    for (int i = 0; i < 2 * kSamplerKinds; ++i) {
      cases.push_back(RandomCase(i % kSamplerKinds, kVocabulary, random));
    }
    ExpectEqualForAllBlockCounts(cases);
  }
  emulator::SetOrder({});
}
#endif

}  // namespace
}  // namespace moeserve::cuda
