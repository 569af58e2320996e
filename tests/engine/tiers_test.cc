// Experts beyond the memory: what is requested, and that no policy changes a bit.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "engine/tiers/expert_tiers.h"
#include "engine/weights/packed_cache.h"
#include "tests/support/golden.h"
#include "tests/support/memory_group.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"
#include "tests/support/tier_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kTierExperts = 6;
constexpr uint64_t kTierExpertBytes = uint64_t{64} << 10;

// Pages that are in memory if the test says so, and notes of what is asked of them.
class FakePages final : public WeightPages {
 public:
  void ExpertsOf(const RoutingPlan&, std::vector<int>& experts) override { experts = chosen; }
  void ForEach(int64_t count, const std::function<void(int64_t)>& run) override {
    for (int64_t i = 0; i < count; ++i) run(i);
  }
  void Advise(std::span<const char> bytes, PageAdvice advice) override {
    if (advice == PageAdvice::kRequest) requested.push_back(bytes.data());
    if (advice == PageAdvice::kCold) cold.push_back(bytes.data());
    if (advice == PageAdvice::kRandom) ++random;
    if (advice == PageAdvice::kNormal) ++normal;
  }
  int64_t Resident(std::span<const char> bytes) override {
    return missing.contains(bytes.data()) ? 0 : std::ssize(bytes);
  }
  bool Lock(std::span<const char> bytes) override {
    locked.push_back(bytes.data());
    return true;
  }

  std::vector<int> chosen;
  std::set<const char*> missing;
  std::vector<const char*> requested, cold, locked;
  int random = 0, normal = 0;
};

// Two banks of a block and a dense layer.
class BlockTierTest : public ::testing::Test {
 protected:
  std::shared_ptr<PackedExperts> MakeFile(int experts) {
    const fs::path path = folder_.path() / std::to_string(files_++);
    std::vector<PackedPart> parts =
        PackedParts(std::vector<uint64_t>(static_cast<size_t>(experts), kTierExpertBytes));
    const std::string bytes(kTierExpertBytes * static_cast<uint64_t>(experts), 'x');
    for (PackedPart& part : parts) {
      part.checksum = PackedChecksum({bytes.data() + part.offset, part.bytes});
    }
    WriteFile(path, bytes);
    const int fd = open(path.c_str(), O_RDONLY);
    std::shared_ptr<const GuardedMapping> owner = GuardedMapping::Map(fd, bytes.size(), path);
    close(fd);
    const std::span<const char> payload(owner->data(), owner->size());
    return std::make_shared<PackedExperts>(owner, payload, std::move(parts), path, "bank");
  }
  void Start(const TierOptions& options, const std::vector<bool>& here = {}) {
    tiers_ = std::make_unique<ExpertTiers>(&pages_, options);
    up_ = MakeFile(kTierExperts);
    down_ = MakeFile(kTierExperts);
    dense_ = MakeFile(1);
    // The banks are only keys.
    auto* const first = reinterpret_cast<LinearBank*>(&up_);
    auto* const second = reinterpret_cast<LinearBank*>(&down_);
    tiers_->Add(first, up_, here);
    tiers_->Add(second, down_, here);
    tiers_->AddDense(dense_);
    ASSERT_TRUE(tiers_->FinishLoading(tiers_->bytes() + 1000).ok());
    block_ = tiers_->NewBlock({first, second});
    ASSERT_NE(block_, nullptr);
    plan_.num_experts = kTierExperts;
  }
  // Runs a step with one block; returns the order of its experts.
  std::vector<int32_t> Step(std::vector<int> chosen, bool prompt = false) {
    pages_.chosen = std::move(chosen);
    plan_.order = nullptr;
    plan_.num_early = 0;
    tiers_->BeginStep();
    block_->BeforeProducts(plan_, prompt);
    std::vector<int32_t> order;
    if (plan_.order != nullptr) order.assign(plan_.order, plan_.order + kTierExperts);
    block_->AfterProducts();
    tiers_->EndStep();
    return order;
  }
  void Miss(const std::vector<int>& experts) {
    for (const int e : experts) {
      pages_.missing.insert(up_->bytes(e).data());
      pages_.missing.insert(down_->bytes(e).data());
    }
  }

  TempFolder folder_;
  int files_ = 0;
  FakePages pages_;
  std::shared_ptr<PackedExperts> up_, down_, dense_;
  std::unique_ptr<ExpertTiers> tiers_;
  std::unique_ptr<BlockTier> block_;
  RoutingPlan plan_;
};

TEST_F(BlockTierTest, NothingIsAskedIfAllFits) {
  for (const TierOptions& options :
       {TierOptions{}, TierOptions{.policy = TierPolicy::kAhead},
        TierOptions{.policy = TierPolicy::kAhead, .memory = 2 * kTierExperts * kTierExpertBytes},
        TierOptions{.policy = TierPolicy::kAhead,
        .total = 2 * kTierExperts * kTierExpertBytes + 1000}}) {
    Start(options);
    Miss({1, 3});
    EXPECT_TRUE(Step({1, 3}).empty());
    EXPECT_FALSE(tiers_->counts().in_force);
    EXPECT_EQ(tiers_->counts().hit_bytes + tiers_->counts().read_bytes, 0u);
    EXPECT_TRUE(pages_.requested.empty() && pages_.locked.empty() && pages_.random == 0);
    EXPECT_TRUE(up_->verified(1) && down_->verified(3) && !up_->verified(0));
  }
}

TEST_F(BlockTierTest, InForceBeyondTheMemory) {
  Start({.policy = TierPolicy::kAhead, .memory = 2 * kTierExperts * kTierExpertBytes - 1});
  EXPECT_TRUE(tiers_->counts().in_force);
  EXPECT_EQ(pages_.locked, (std::vector<const char*>{dense_->bytes(0).data()}));
  Start({.policy = TierPolicy::kAhead, .total = 2 * kTierExperts * kTierExpertBytes + 999});
  EXPECT_TRUE(tiers_->counts().in_force) << "the other weights leave too little";
  // A rank counts what it reads.
  Start({.memory = 3 * kTierExpertBytes}, {true, false, false, true, false, false});
  EXPECT_EQ(tiers_->bytes(), static_cast<int64_t>(4 * kTierExpertBytes));
  EXPECT_TRUE(tiers_->counts().in_force);
}

TEST_F(BlockTierTest, MapCountsAndAsksNothing) {
  Start({.policy = TierPolicy::kMap, .memory = 1});
  Miss({1, 3});
  EXPECT_TRUE(Step({0, 1, 3}).empty());
  EXPECT_EQ(tiers_->counts().hit_bytes, 2 * kTierExpertBytes);
  EXPECT_EQ(tiers_->counts().read_bytes, 4 * kTierExpertBytes);
  EXPECT_TRUE(pages_.requested.empty() && pages_.random == 0);
}

TEST_F(BlockTierTest, AheadRequestsWhatIsMissingAndComputesItLast) {
  Start({.policy = TierPolicy::kAhead, .memory = 1});
  Miss({1, 3});
  const std::vector<int32_t> order = Step({1, 2, 3, 5});
  EXPECT_EQ(pages_.random, 2) << "the advice for both files";
  EXPECT_EQ(pages_.requested,
            (std::vector<const char*>{up_->bytes(1).data(), up_->bytes(3).data(),
                                      down_->bytes(1).data(), down_->bytes(3).data()}));
  EXPECT_EQ(order, (std::vector<int32_t>{0, 2, 4, 5, 1, 3}));
  EXPECT_EQ(plan_.num_early, 4);
  EXPECT_EQ(tiers_->counts().hit_bytes, 4 * kTierExpertBytes);
  EXPECT_EQ(tiers_->counts().read_bytes, 4 * kTierExpertBytes);
  pages_.missing.clear();
  EXPECT_TRUE(Step({1, 2, 3, 5}).empty()) << "nothing is missing";
  EXPECT_EQ(pages_.requested.size(), 4u);
  EXPECT_EQ(pages_.random, 2) << "the advice is given once";
}

TEST_F(BlockTierTest, APromptWithMostExpertsLeavesThoseThatItReadCold) {
  Start({.policy = TierPolicy::kAhead, .memory = 1});
  Miss({1, 3});
  Step({1, 2, 3}, true);
  EXPECT_TRUE(pages_.cold.empty()) << "half of the experts";
  Step({1, 2, 3, 5}, false);
  EXPECT_TRUE(pages_.cold.empty()) << "no prompt";
  Step({1, 2, 3, 5}, true);
  std::vector<const char*> expected;
  for (const int e : {1, 3}) {
    expected.push_back(up_->bytes(e).data());
    expected.push_back(down_->bytes(e).data());
  }
  EXPECT_EQ(pages_.cold, expected);
}

TEST_F(BlockTierTest, ReadsAheadWhatTheStepBeforeChoseInTheNextBlock) {
  // Room for two experts of a bank.
  Start({.policy = TierPolicy::kAhead, .memory = 1, .read_ahead = 2 * kTierExpertBytes});
  const std::shared_ptr<PackedExperts> file = MakeFile(kTierExperts);
  auto* const bank =
      reinterpret_cast<LinearBank*>(const_cast<std::shared_ptr<PackedExperts>*>(&file));
  tiers_->Add(bank, file, {});
  const std::unique_ptr<BlockTier> next = tiers_->NewBlock({bank});
  const auto run_next = [&](std::vector<int> chosen) {
    pages_.chosen = std::move(chosen);
    next->BeforeProducts(plan_, false);
    next->AfterProducts();
  };
  const auto missing_of_next = [&] {
    pages_.requested.clear();
    for (int e = 0; e < kTierExperts; ++e) pages_.missing.insert(file->bytes(e).data());
  };
  Step({0});
  EXPECT_TRUE(pages_.requested.empty()) << "no step before";
  run_next({1, 2, 4});
  missing_of_next();
  pages_.missing.erase(file->bytes(1).data());
  Step({0});
  EXPECT_EQ(pages_.requested,
            (std::vector<const char*>{file->bytes(2).data(), file->bytes(4).data()}))
      << "not what is in memory";
  missing_of_next();
  Step({0});
  EXPECT_EQ(pages_.requested,
            (std::vector<const char*>{file->bytes(1).data(), file->bytes(2).data()}))
      << "not more than there is room for";
  missing_of_next();
  Step({0}, true);
  EXPECT_TRUE(pages_.requested.empty()) << "a prompt";
}

TEST_F(BlockTierTest, AutoTriesBothPolicies) {
  Start({.memory = 1});
  Miss({1});
  std::string policies;
  for (int i = 0; i < 64; ++i) {
    policies += tiers_->counts().policy == TierPolicy::kAhead ? 'a' : 'm';
    Step({1, 2});
  }
  EXPECT_EQ(std::ranges::count(policies, 'a'), 32);
  EXPECT_EQ(pages_.random, 2 * 4);
  EXPECT_GE(pages_.normal, 2 * 3);
}

// Drops the pages of all packed files that this process has mapped.
void PageOutPackedFiles() {
#ifdef MADV_PAGEOUT
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with(".packed")) continue;
    const uintptr_t begin = std::stoull(line, nullptr, 16);
    const uintptr_t end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT);
  }
#endif
}

struct TierSetup {
  std::string name;
  fs::path model;
  fs::path golden;
  DType compute;
  Quantization quantization;
};
void PrintTo(const TierSetup& s, std::ostream* out) { *out << s.name; }

std::vector<TierSetup> TierSetups() {
  std::vector<TierSetup> setups;
  for (const GoldenModel& m : GoldenModels()) {
    setups.push_back({m.name + "_f32", m.model, m.golden, DType::kF32, Quantization::kNone});
    if (m.name.starts_with("tiny-")) continue;
    setups.push_back({m.name + "_bf16", m.model, m.golden, DType::kBF16, Quantization::kNone});
    setups.push_back({m.name + "_int4", m.model, m.golden, DType::kBF16, Quantization::kInt4});
  }
  for (TierSetup& s : setups) std::ranges::replace(s.name, '-', '_');
  return setups;
}

class TierBitsTest : public ::testing::TestWithParam<TierSetup> {};

TEST_P(TierBitsTest, NoPolicyChangesABit) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "packed files are of CPUs";
  const auto golden = ReadGolden(GetParam().golden);
  ASSERT_TRUE(golden.ok()) << golden.status();
  std::vector<int32_t> prompt = golden->Prompt(0);
  prompt.resize(std::min<size_t>(prompt.size(), 24));
  TempFolder folder;
  // Returns the logits of a prompt and of single tokens; all pages are dropped in between.
  const auto run = [&](const TierOptions& tiers, int rounds, bool packed) {
    RunnerOptions options{.compute = GetParam().compute, .quantization = GetParam().quantization};
    if (packed) options.packed_folder = folder.path();
    options.tiers = tiers;
    auto loaded = ModelRunner::Load(GetParam().model, options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    std::vector<float> all;
    if (!loaded.ok()) return all;
    ModelRunner& runner = **loaded;
    for (int round = 0; round < rounds; ++round) {
      if (packed) PageOutPackedFiles();
      std::vector<float> logits = runner.Run(prompt, static_cast<int>(prompt.size()), 0, {}, 0);
      for (int begin = 0; begin + 8 <= std::ssize(prompt); begin += 8) {
        if (packed) PageOutPackedFiles();
        const std::vector<int32_t> part(prompt.begin() + begin, prompt.begin() + begin + 8);
        const std::vector<float> next = runner.Run(part, 1, begin, {}, 1);
        logits.insert(logits.end(), next.begin(), next.end());
      }
      EXPECT_TRUE(round == 0 || logits == all) << "round " << round;
      all = std::move(logits);
    }
    EXPECT_TRUE(runner.model().CheckFiles().ok()) << runner.model().CheckFiles();
    return all;
  };
  const std::vector<float> expected = run({}, 1, false);
  ASSERT_FALSE(expected.empty());
  run({}, 1, true);  // writes the files
  const auto same = [&](const std::vector<float>& found) {
    return found.size() == expected.size() &&
           std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0;
  };
  EXPECT_TRUE(same(run({.policy = TierPolicy::kMap, .memory = 0}, 1, true)));
  EXPECT_TRUE(same(run({.policy = TierPolicy::kAhead, .memory = 0}, 1, true)));
  EXPECT_TRUE(same(run({.memory = 0}, 4, true)));  // 100 steps: both policies are tried
}

INSTANTIATE_TEST_SUITE_P(Models, TierBitsTest, ::testing::ValuesIn(TierSetups()),
                         [](const auto& info) { return info.param.name; });

// Runs `run` in a process of its own; returns its exit status, 255 if it was killed.
int InProcess(const std::function<int()>& run) {
  const pid_t child = fork();
  if (child == 0) _exit(run());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

// A model three times as large as the memory of its process.
TEST(TiersInAGroup, AnswersHaveTheSameBits) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "packed files are of CPUs";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more memory than the group has";
#endif
  const TempFolder folder;
  const ModelSpec spec = TierSpec({});
  const auto steps = [](TierModel& model) {
    std::vector<float> all = model.Step(40);
    for (int i = 0; i < 70; ++i) {
      const std::vector<float> logits = model.Step(1);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  };
  std::vector<float> expected;
  ASSERT_EQ(InProcess([&] {
              auto model = TierModel::Load(spec, folder.path(), {});
              if (!model.ok()) return 1;
              expected = steps(**model);
              std::ofstream out(folder.path() / "expected", std::ios::binary);
              out.write(reinterpret_cast<const char*>(expected.data()),
                        std::ssize(expected) * static_cast<std::streamsize>(sizeof(float)));
              return out ? 0 : 1;
            }),
            0);
  const std::string bytes = ReadFile(folder.path() / "expected");
  int64_t packed = 0;
  for (const auto& file : fs::directory_iterator(folder.path())) {
    packed += static_cast<int64_t>(file.file_size());
    DropPages(file.path());
  }
  enum Outcome : int { kSame = 0, kNotLoaded, kOtherBits, kNoReads, kDamaged, kNoRights = 77 };
  const auto limited = [&](const TierOptions& tiers) {
    return InProcess([&]() -> int {
      const auto group = MemoryGroup::Enter(packed / 3);
      if (!group.ok()) {
        std::fprintf(stderr, "%s\n", std::string(group.status().message()).c_str());
        return kNoRights;
      }
      auto model = TierModel::Load(spec, folder.path(), tiers);
      if (!model.ok()) return kNotLoaded;
      const std::vector<float> found = steps(**model);
      if (!(*model)->model().CheckFiles().ok()) return kDamaged;
      if (found.size() * sizeof(float) != bytes.size() ||
          std::memcmp(found.data(), bytes.data(), bytes.size()) != 0) {
        return kOtherBits;
      }
      return (*model)->model().tier_counts().read_bytes > 0 ? kSame : kNoReads;
    });
  };
  for (const TierOptions& tiers : {TierOptions{.policy = TierPolicy::kMap, .memory = packed / 3},
                                   TierOptions{.policy = TierPolicy::kAhead, .memory = packed / 3},
                                   TierOptions{.memory = packed / 3}}) {
    const int outcome = limited(tiers);
    if (outcome == kNoRights) GTEST_SKIP() << "no rights to limit the memory of a process";
    EXPECT_EQ(outcome, kSame);
  }
  // A damaged expert is noticed there, too.
  for (const auto& file : fs::directory_iterator(folder.path())) {
    const std::string name = file.path().filename();
    if (!name.starts_with("blocks.1.feed_forward.experts.0.down")) continue;
    std::string damaged = ReadFile(file.path());
    for (size_t i = 8192; i < damaged.size(); i += 4096) damaged[i] ^= 1;
    WriteFile(file.path(), damaged);
    DropPages(file.path());
    EXPECT_EQ(limited({.policy = TierPolicy::kAhead, .memory = packed / 3}), kDamaged);
    EXPECT_FALSE(fs::exists(file.path()));
    return;
  }
  FAIL() << "no file of experts";
}

}  // namespace
}  // namespace moeserve::testing
