// Files of packed experts: opening reads no expert, and a damaged one is named when it is used.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "engine/memory/paged_pool.h"
#include "engine/model/model.h"
#include "engine/step/batch.h"
#include "engine/weights/packed_cache.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPageBytes = 4096;

// A cache with one bank of six experts [kInputs -> its width] with biases. The third has no matrix.
class PackedExpertsTest : public ::testing::Test {
 protected:
  static constexpr int kInputs = 100;
  const std::vector<int> widths_ = {640, 16, 0, 5, 320, 33};

  void SetUp() override {
    backend_ = *CreateBackend({.device = "cpu", .threads = 2});
    key_.tensors = {"layer.up.weight", "layer.up.bias"};
    key_.shape.in_features = {kInputs};
    key_.shape.out_features = widths_;
    key_.shape.bias = true;
    LinearBankShape shape = key_.shape;
    shape.weight_dtype = DType::kF32;
    bank_ = *backend_->NewLinearBank(shape);
    std::vector<float> values(640 * kInputs);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.5f * static_cast<float>(i % 1013);
    for (int e = 0; e < 6; ++e) {
      const int width = widths_[static_cast<size_t>(e)];
      if (width == 0) continue;
      for (float& v : values) v += 1.0f;
      bank_->LoadWeight(e, LinearBank::Half::kMain, 0,
                        {values.data(), DType::kF32, {width, kInputs}, nullptr});
      bank_->LoadBias(e, LinearBank::Half::kMain, 0,
                      {values.data(), DType::kF32, {width}, nullptr});
    }
    Store();
    path_ = fs::directory_iterator(folder_.path())->path();
  }
  std::unique_ptr<PackedCache> Open() {
    return *PackedCache::Open({.folder = folder_.path(),
                               .place = "/place",
                               .state = "state",
                               .warn = [this](const std::string& w) { warnings_.push_back(w); }},
                              *backend_);
  }
  void Store() {
    auto cache = Open();
    cache->Store(key_, *bank_);
    ASSERT_EQ(cache->stored(), 1);
  }
  // Returns the offset of expert e in the file.
  size_t OffsetOf(int e) {
    const auto found = Open()->Find(key_, false);
    return static_cast<size_t>(found.experts->bytes(e).data() - found.experts->owner()->data());
  }
  void Damage(size_t offset) {
    std::string bytes = ReadFile(path_);
    bytes[offset] = static_cast<char>(bytes[offset] ^ 4);
    WriteFile(path_, bytes);
  }

  TempFolder folder_;
  std::unique_ptr<Backend> backend_;
  PackedBankKey key_;
  std::unique_ptr<LinearBank> bank_;
  fs::path path_;
  std::vector<std::string> warnings_;
};

bool SameExpertBytes(const LinearBank& a, const LinearBank& b, int e) {
  const auto x = a.packed_bytes(e), y = b.packed_bytes(e);
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size()) == 0;
}

TEST_F(PackedExpertsTest, TheBankHasTheBytesOfEachExpert) {
  for (const bool verify : {true, false}) {
    const auto found = Open()->Find(key_, verify);
    ASSERT_NE(found.bank, nullptr);
    for (int e = 0; e < 6; ++e) {
      EXPECT_EQ(found.bank->packed_bytes(e).empty(), e == 2);
      EXPECT_TRUE(SameExpertBytes(*found.bank, *bank_, e)) << e;
      EXPECT_EQ(found.experts->verified(e), verify && e != 2) << e;
      EXPECT_TRUE(found.experts->Verify(e).ok());
      EXPECT_TRUE(found.experts->verified(e));
    }
  }
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(PackedExpertsTest, LargeExpertsBeginAtPages) {
  for (int e = 0; e < 6; ++e) {
    const bool large = bank_->packed_bytes(e).size() >= 65536;
    EXPECT_EQ(large, e == 0 || e == 4);
    EXPECT_EQ(OffsetOf(e) % (large ? kPageBytes : 64), 0u) << e;
  }
}

TEST_F(PackedExpertsTest, ABankMayLackExperts) {
  const auto found = Open()->Find(key_, true, {true, false, true, true, false, true});
  ASSERT_NE(found.bank, nullptr);
  EXPECT_EQ(found.bank->shape().out_features, (std::vector<int>{640, 0, 0, 5, 0, 33}));
  for (const int e : {0, 3, 5}) EXPECT_TRUE(SameExpertBytes(*found.bank, *bank_, e)) << e;
  for (const int e : {1, 4}) {
    EXPECT_TRUE(found.bank->packed_bytes(e).empty());
    EXPECT_FALSE(found.experts->verified(e)) << "nobody reads it";
  }
  // Damage of an expert that is not wanted does not matter.
  Damage(OffsetOf(4));
  EXPECT_NE(Open()->Find(key_, true, {true, false, true, true, false, true}).bank, nullptr);
  EXPECT_EQ(Open()->Find(key_, true).bank, nullptr);
}

TEST_F(PackedExpertsTest, OpeningReadsNoExpert) {
  const int fd = open(path_.c_str(), O_RDONLY);
  ASSERT_EQ(fdatasync(fd), 0);
  ASSERT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  const size_t size = fs::file_size(path_);
  const auto resident = [&] {
    void* const map = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    std::vector<unsigned char> pages((size + kPageBytes - 1) / kPageBytes);
    EXPECT_EQ(mincore(map, size, pages.data()), 0);
    munmap(map, size);
    size_t count = 0;
    for (const unsigned char page : pages) count += page & 1;
    return count;
  };
  const size_t before = resident();
  if (before > 0) {
    close(fd);
    GTEST_SKIP() << "this file system keeps pages in memory";
  }
  const auto found = Open()->Find(key_, false);
  ASSERT_NE(found.bank, nullptr);
  EXPECT_LE(resident(), 2u);
  ASSERT_GT(size / kPageBytes, 80u);
  ASSERT_TRUE(found.experts->Verify(4).ok());
  EXPECT_GE(resident(), found.experts->bytes(4).size() / kPageBytes);
  close(fd);
}

TEST_F(PackedExpertsTest, ADamagedExpertIsNamedAndTheFileRemoved) {
  for (const int e : {0, 1, 3, 4, 5}) {
    for (const bool last : {false, true}) {
      Damage(OffsetOf(e) + (last ? bank_->packed_bytes(e).size() - 1 : 0));
      const auto found = Open()->Find(key_, false);
      ASSERT_NE(found.bank, nullptr) << "opening does not read experts";
      EXPECT_TRUE(warnings_.empty());
      for (int other = 0; other < 6; ++other) {
        EXPECT_TRUE(other == e || found.experts->Verify(other).ok()) << other;
      }
      EXPECT_TRUE(fs::exists(path_));
      const absl::Status status = found.experts->Verify(e);
      EXPECT_TRUE(absl::IsInternal(status));
      for (const std::string& part : {"expert " + std::to_string(e) + " of",
                                      std::string("layer.up.weight"), path_.filename().string()}) {
        EXPECT_NE(status.message().find(part), std::string::npos) << status << " lacks " << part;
      }
      EXPECT_FALSE(found.experts->verified(e));
      EXPECT_FALSE(fs::exists(path_));
      Store();
      EXPECT_TRUE(Open()->Find(key_, true).bank != nullptr);
    }
  }
}

TEST_F(PackedExpertsTest, AFileThatHasReplacedTheDamagedOneStays) {
  Damage(OffsetOf(1));
  const auto found = Open()->Find(key_, false);
  Store();
  EXPECT_FALSE(found.experts->Verify(1).ok());
  EXPECT_NE(Open()->Find(key_, true).bank, nullptr);
}

TEST_F(PackedExpertsTest, AnExpertIsVerifiedOnce) {
  const auto found = Open()->Find(key_, false);
  ASSERT_TRUE(found.experts->Verify(1).ok());
  const int fd = open(path_.c_str(), O_WRONLY);
  const char other = 'x';
  ASSERT_EQ(pwrite(fd, &other, 1, static_cast<off_t>(OffsetOf(1))), 1);
  ASSERT_EQ(pwrite(fd, &other, 1, static_cast<off_t>(OffsetOf(3))), 1);
  close(fd);
  EXPECT_TRUE(found.experts->Verify(1).ok());
  EXPECT_FALSE(found.experts->Verify(3).ok());
}

// The first version had one checksum for all experts.
TEST_F(PackedExpertsTest, AFileOfTheFirstVersionIsReplacedInSilence) {
  std::string old = ReadFile(path_);
  const uint32_t version = 1;
  std::memcpy(old.data() + 8, &version, sizeof version);
  WriteFile(path_, old);
  EXPECT_EQ(Open()->Find(key_, false).bank, nullptr);
  EXPECT_TRUE(warnings_.empty());
  Store();
  EXPECT_NE(Open()->Find(key_, true).bank, nullptr);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(PackedExpertsTest, PartsFollowFromSizesAlone) {
  const std::vector<uint64_t> sizes = {10, 0, 64, 65536, 1, 65535, 70000};
  const std::vector<PackedPart> parts = PackedParts(sizes);
  const std::vector<uint64_t> expected = {0, 64, 64, 4096, 69632, 69696, 139264};
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(parts[i].offset, expected[i]) << i;
    EXPECT_EQ(parts[i].bytes, sizes[i]);
  }
}

// A model whose linear layers are read from a packed cache.
struct CachedModel {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;
  std::vector<std::string> warnings;
  int found = 0, stored = 0;

  // Runs tokens; returns their logits.
  std::vector<float> Run(int tokens) {
    const ModelSpec& spec = model->spec();
    auto kv = *backend->NewKvCache(CacheShapes(spec), KvCacheTypeOf(DType::kF32), {2});
    const std::vector<int32_t> table = {0, 1};
    Batch batch;
    batch.page_tables = {table};
    for (int i = 0; i < tokens; ++i) {
      batch.logit_rows.push_back(i);
      batch.tokens.push_back((i * 37 + 11) % spec.vocab_size);
      batch.positions.push_back(i);
      batch.sequence.push_back(0);
      batch.phase.push_back(Phase::kPrefill);
    }
    std::vector<float> logits(static_cast<size_t>(tokens) * static_cast<size_t>(spec.vocab_size));
    model->Forward(batch, *kv, {}, {.logits = logits});
    return logits;
  }
};

CachedModel LoadCached(const fs::path& model_folder, const fs::path& folder) {
  CachedModel out;
  auto checkpoint = *LoadCheckpoint(model_folder, {.require_tokenizer = false});
  out.backend = *CreateBackend({.device = "cpu", .threads = 2});
  auto cache =
      *PackedCache::Open({.folder = folder,
                          .place = checkpoint.identity.place,
                          .state = checkpoint.identity.state,
                          .warn = [&out](const std::string& w) { out.warnings.push_back(w); }},
                         *out.backend);
  out.model = *Model::Create(checkpoint.spec, {}, *checkpoint.weights, *out.backend, cache.get());
  out.found = cache->found();
  out.stored = cache->stored();
  return out;
}

// Damage of a dense layer shows when the file is opened, that of an expert when a step uses it. In
// both cases the next start has intact files.
TEST(PackedExperts, DamagedFilesAreWrittenAnew) {
  const TempFolder model, parent;
  WriteNativeModel(model.path(), TinyConfig());
  const fs::path folder = parent.path() / "cache";
  CachedModel cold = LoadCached(model.path(), folder);
  const std::vector<float> expected = cold.Run(24);
  const int files = cold.stored;
  int at_start = 0, in_step = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const fs::path file = entry.path();
    SCOPED_TRACE(file.filename());
    const std::string intact = ReadFile(file);
    std::string bytes = intact;
    for (size_t i = kPageBytes; i < bytes.size(); i += 64) {
      bytes[i] = static_cast<char>(bytes[i] ^ 16);
    }
    WriteFile(file, bytes);
    CachedModel damaged = LoadCached(model.path(), folder);
    EXPECT_TRUE(damaged.model->CheckFiles().ok());
    const std::vector<float> logits = damaged.Run(24);
    const absl::Status status = damaged.model->CheckFiles();
    EXPECT_EQ(status.ok(), damaged.stored == 1) << status;
    EXPECT_EQ(damaged.warnings.size(), static_cast<size_t>(damaged.stored));
    EXPECT_EQ(status.ok(), logits == expected);
    ++(status.ok() ? at_start : in_step);
    if (!status.ok()) {
      EXPECT_NE(status.message().find(file.filename().string()), std::string::npos) << status;
      EXPECT_EQ(damaged.model->CheckFiles(), status) << "the error stays";
      CachedModel repaired = LoadCached(model.path(), folder);
      EXPECT_EQ(repaired.stored, 1);
      EXPECT_EQ(repaired.Run(24), expected);
      EXPECT_TRUE(repaired.model->CheckFiles().ok());
    }
    EXPECT_EQ(ReadFile(file), intact);
  }
  EXPECT_GT(at_start, 3);
  EXPECT_EQ(in_step, 6) << "two banks of three routed blocks";
  EXPECT_EQ(LoadCached(model.path(), folder).found, files);
}

}  // namespace
}  // namespace moeserve::testing
