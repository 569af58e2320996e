// Several ranks compute the bits of one process, wherever the experts are.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <thread>

#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

struct RanksSetup {
  std::string name;
  std::filesystem::path model;
  std::filesystem::path golden;  // empty: a family
  DType compute = DType::kF32;
  Quantization quantization = Quantization::kNone;
  bool fp8 = false;  // experts are rounded to FP8 and kept so
};
void PrintTo(const RanksSetup& s, std::ostream* out) { *out << s.name; }

std::vector<RanksSetup> RanksSetups() {
  std::vector<RanksSetup> setups;
  for (const GoldenModel& m : GoldenModels()) {
    setups.push_back({m.name + "_f32", m.model, m.golden});
    // The random models vary the settings of layers, which do not depend on the type of weights.
    if (m.name.starts_with("tiny-")) continue;
    setups.push_back({m.name + "_bf16", m.model, m.golden, DType::kBF16});
    setups.push_back(
        {m.name + "_int8_channel", m.model, m.golden, DType::kBF16, Quantization::kInt8Channel});
    setups.push_back({m.name + "_int4_k", m.model, m.golden, DType::kBF16, Quantization::kInt4K});
  }
  for (const FamilyCase& c : FamilyCases()) {
    setups.push_back({TestName(c), c.folder, ""});
    // Numbers of four and eight bits, which not every device stores.
    if (c.name == "gpt-oss-mxfp4")
      setups.push_back({TestName(c) + "_bf16", c.folder, "", DType::kBF16});
    if (c.name == "qwen3-moe-fp8") {
      setups.push_back(
          {TestName(c) + "_kept", c.folder, "", DType::kBF16, Quantization::kNone, /*fp8=*/true});
    }
  }
  for (RanksSetup& s : setups) std::ranges::replace(s.name, '-', '_');
  return setups;
}

ExpertPlacement::Blocks BlocksOf(const ModelSpec& spec, int ranks) {
  return ExpertPlacement::Balanced(spec, ranks).blocks();
}

// Two ranks hold each expert.
ExpertPlacement Copies(const ModelSpec& spec, int ranks) {
  ExpertPlacement::Blocks blocks = BlocksOf(spec, ranks);
  for (auto& [block, holders] : blocks) {
    for (HolderSet& h : holders) h |= (h << 1 | h >> (ranks - 1)) & ((HolderSet{1} << ranks) - 1);
  }
  return {ranks, std::move(blocks)};
}

// The last rank holds everything.
ExpertPlacement AllOnTheLast(const ModelSpec& spec, int ranks) {
  ExpertPlacement::Blocks blocks = BlocksOf(spec, ranks);
  for (auto& [block, holders] : blocks) {
    for (HolderSet& h : holders) h = h == 0 ? 0 : HolderSet{1} << (ranks - 1);
  }
  return {ranks, std::move(blocks)};
}

class RanksInvarianceTest : public ::testing::TestWithParam<RanksSetup> {
 protected:
  struct Outcome {
    std::vector<float> logits;
    int64_t weight_bytes = 0;
  };

  void SetUp() override {
    if (GetParam().golden.empty()) {
      const auto answers = ReadFamilyAnswers(GetParam().model);
      ASSERT_TRUE(answers.ok()) << answers.status();
      prompt_ = answers->Prompt(0);
      other_ = answers->Prompt(answers->prompts - 1);
    } else {
      const auto golden = ReadGolden(GetParam().golden);
      ASSERT_TRUE(golden.ok()) << golden.status();
      prompt_ = golden->Prompt(0);
      other_ = golden->Prompt(golden->prompts - 1);
    }
    prompt_.resize(std::min<size_t>(prompt_.size(), on_cpu_ ? 40 : 21));
  }

  RunnerOptions Options() const {
    return {.compute = GetParam().compute,
            .quantization = GetParam().quantization,
            .threads = 1,
            .cache_tokens = 2048,
            .keep_fp8 = GetParam().fp8,
            .round_to_fp8 = GetParam().fp8};
  }

  // The logits of steps with a whole prompt, parts of it, single tokens, and several sequences.
  Outcome RunSteps(const RunnerOptions& options) const {
    auto loaded = ModelRunner::Load(GetParam().model, options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) return {};
    ModelRunner& runner = **loaded;
    std::vector<float> all = runner.Run(prompt_, static_cast<int>(prompt_.size()));
    for (const auto& [chunk, tokens] : {std::pair(13, 40), std::pair(1, on_cpu_ ? 5 : 2)}) {
      std::vector<int32_t> part = prompt_;
      part.resize(std::min(part.size(), static_cast<size_t>(tokens)));
      const std::vector<float> logits = runner.Run(part, chunk, 0, {}, 1 + chunk % 2);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    const std::vector<float> together =
        runner.RunTogether({{3, 0, {prompt_.begin(), prompt_.begin() + 9}},
                            {4, 0, {other_.begin(), other_.begin() + 1}},
                            {5, 0, {other_.begin(), other_.begin() + 11}}});
    all.insert(all.end(), together.begin(), together.end());
    return {std::move(all), runner.backend().weight_bytes()};
  }

  // Runs the steps on ranks. Returns the bytes of weights of all ranks together.
  int64_t RunRanks(int ranks, const Outcome& expected, RunnerOptions options) const {
    std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
    std::vector<Outcome> found(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (size_t r = 0; r < found.size(); ++r) {
      threads.emplace_back([&, r, options]() mutable {
        MessageExchange exchange(std::move(transports[r]),
                                 {.timeout = absl::Seconds(300), .check_order = true});
        options.exchange = &exchange;
        found[r] = RunSteps(options);
        EXPECT_TRUE(exchange.status().ok()) << exchange.status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    int64_t bytes = 0;
    for (size_t r = 0; r < found.size(); ++r) {
      bytes += found[r].weight_bytes;
      EXPECT_EQ(found[r].logits.size(), expected.logits.size());
      if (found[r].logits.size() != expected.logits.size()) continue;
      if (r > 0 && options.split_head != SplitChoice::kOff) continue;
      const auto same = [](float a, float b) { return BitsFromF32(a) == BitsFromF32(b); };
      const auto [at, other] = std::mismatch(expected.logits.begin(), expected.logits.end(),
                                             found[r].logits.begin(), same);
      EXPECT_TRUE(at == expected.logits.end())
          << "rank " << r << " of " << ranks << ", logit " << at - expected.logits.begin() << ": "
          << *other << " instead of " << *at;
    }
    return bytes;
  }

  // Other devices may be emulated, which takes much longer.
  const bool on_cpu_ = TestDevice() == "cpu";
  std::vector<int32_t> prompt_, other_;
};

TEST_P(RanksInvarianceTest, LogitsHaveTheBitsOfOneProcess) {
  constexpr SplitChoice kAuto = SplitChoice::kAuto, kOn = SplitChoice::kOn,
                        kOff = SplitChoice::kOff;
  const Outcome one = RunSteps(Options());
  ASSERT_FALSE(one.logits.empty());
  const auto run = [&](int ranks, SplitChoice rows, SplitChoice head, SplitChoice sums,
                       ExpertPlacement (*placement)(const ModelSpec&, int)) {
    SCOPED_TRACE(ranks);
    RunnerOptions options = Options();
    options.placement = placement;
    options.split_rows = rows;
    options.split_head = head;
    options.owner_sums = sums;
    return RunRanks(ranks, one, options);
  };
  if (on_cpu_) run(1, kOn, kOn, kOn, ExpertPlacement::Balanced);
  const int64_t shared = run(2, kOff, kOff, kOff, ExpertPlacement::Balanced);
  // Of 1 to 3 tokens, some ranks have no row.
  run(4, kOn, kOn, kOff, ExpertPlacement::Balanced);
  run(4, kOff, kOn, kOn, ExpertPlacement::Balanced);
  if (!on_cpu_) {  // may be emulated, which takes long
    EXPECT_LE(shared, 2 * one.weight_bytes);
    return;
  }
  const int64_t copied = run(2, kOn, kOff, kOn, Copies);
  EXPECT_EQ(run(2, kAuto, kOff, kAuto, AllOnTheLast), shared) << "an expert is on one rank";
  // With copies, both ranks have everything.
  EXPECT_EQ(copied, 2 * one.weight_bytes);
  EXPECT_LE(shared, copied);
  run(3, kOn, kAuto, kOn, AllOnTheLast);
}

// The ranks read their experts from files that one process has written.
TEST_P(RanksInvarianceTest, RanksSharePackedFiles) {
  if (!on_cpu_) GTEST_SKIP() << "packed files are of CPUs";
  const TempFolder folder;
  RunnerOptions options = Options();
  options.packed_folder = folder.path();
  const Outcome one = RunSteps(options);
  ASSERT_FALSE(one.logits.empty());
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder.path()),
                         std::filesystem::directory_iterator());
  };
  const auto written = files();
  ASSERT_GT(written, 0);
  const int64_t shared = RunRanks(2, one, options);
  EXPECT_EQ(files(), written);
  EXPECT_EQ(RunRanks(2, one, Options()), shared) << "a rank has its share";
}

INSTANTIATE_TEST_SUITE_P(Models, RanksInvarianceTest, ::testing::ValuesIn(RanksSetups()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
