// A model loaded from the packed cache must equal the model loaded from its checkpoint, whatever
// files the cache's folder contains.

#include "engine/weights/packed_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>

#include "engine/memory/paged_pool.h"
#include "engine/model/model.h"
#include "engine/step/batch.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/write/quantize_folder.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

struct Types {
  DType compute;
  Quantization quantization;
};
constexpr Types kPackedTypes[] = {
    {DType::kF32, Quantization::kNone},  {DType::kBF16, Quantization::kNone},
    {DType::kBF16, Quantization::kInt8}, {DType::kBF16, Quantization::kInt8Channel},
    {DType::kBF16, Quantization::kInt4}, {DType::kBF16, Quantization::kInt4K}};
constexpr Types kF32Run = kPackedTypes[0];

// A weight source that records the names of the requested tensors.
class CountingSource : public WeightSource {
 public:
  explicit CountingSource(WeightSource& source) : source_(source) {}
  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override {
    names.emplace_back(name);
    return source_.Get(name, shape);
  }
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override {
    names.emplace_back(name);
    return source_.GetQuantized(name, shape, type);
  }
  Result<std::vector<int32_t>> GetIds(std::string_view name,
                                      const std::vector<int64_t>& shape) override {
    names.emplace_back(name);
    return source_.GetIds(name, shape);
  }
  Quantization StoredQuantization() const override { return source_.StoredQuantization(); }
  absl::Status Check() const override { return source_.Check(); }
  DType DominantDType() const override { return source_.DominantDType(); }

  std::vector<std::string> names;

 private:
  WeightSource& source_;
};

struct Outcome {
  std::vector<float> logits;
  std::vector<std::string> fetched;
  std::vector<std::string> warnings;
  int found = 0;
  int stored = 0;
  int64_t weight_bytes = 0;
};

// Loads a model, with the packed cache in `folder` unless that is empty, and runs 24 tokens.
Outcome RunModel(const fs::path& model_folder, const fs::path& folder, Types types,
                 const std::string& isa = "auto") {
  Outcome out;
  auto checkpoint = LoadCheckpoint(model_folder, {.require_tokenizer = false});
  auto backend = CreateBackend({.device = "cpu", .threads = 2, .cpu_isa = isa});
  EXPECT_TRUE(checkpoint.ok() && backend.ok()) << checkpoint.status() << backend.status();
  if (!checkpoint.ok() || !backend.ok()) return out;
  std::unique_ptr<PackedCache> cache;
  if (!folder.empty()) {
    auto opened =
        PackedCache::Open({.folder = folder,
                           .place = checkpoint->identity.place,
                           .state = checkpoint->identity.state,
                           .warn = [&](const std::string& w) { out.warnings.push_back(w); }},
                          **backend);
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (!opened.ok()) return out;
    cache = *std::move(opened);
  }
  CountingSource source(*checkpoint->weights);
  auto model = Model::Create(checkpoint->spec,
                             {.compute = types.compute, .quantization = types.quantization}, source,
                             **backend, cache.get());
  EXPECT_TRUE(model.ok()) << model.status();
  if (!model.ok()) return out;
  out.fetched = source.names;
  if (cache != nullptr) {
    out.found = cache->found();
    out.stored = cache->stored();
  }
  cache.reset();
  out.weight_bytes = (*model)->weight_bytes();
  const ModelSpec& spec = (*model)->spec();
  auto kv = (*backend)->NewKvCache(CacheShapes(spec), KvCacheTypeOf(types.compute), {2});
  EXPECT_TRUE(kv.ok());
  const std::vector<int32_t> table = {0, 1};
  Batch batch;
  batch.page_tables = {table};
  for (int i = 0; i < 24; ++i) {
    batch.logit_rows.push_back(batch.num_tokens());
    batch.tokens.push_back((i * 37 + 11) % spec.vocab_size);
    batch.positions.push_back(i);
    batch.sequence.push_back(0);
    batch.phase.push_back(Phase::kPrefill);
  }
  out.logits.resize(24 * static_cast<size_t>(spec.vocab_size));
  (*model)->Forward(batch, **kv, {}, {.logits = out.logits});
  return out;
}

bool SamePackedBits(const std::vector<float>& a, const std::vector<float>& b) {
  return !a.empty() && a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<fs::path> FilesIn(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

// Compares runs without a cache, with an incomplete cache and with a complete one. Returns the last
// of them.
Outcome ExpectSameAnswers(const fs::path& model, const fs::path& folder, Types types) {
  const Outcome plain = RunModel(model, {}, types);
  const Outcome cold = RunModel(model, folder, types);
  EXPECT_GT(cold.stored, 0);
  if (cold.found == 0) {
    EXPECT_EQ(cold.fetched, plain.fetched);
  }
  Outcome warm = RunModel(model, folder, types);
  EXPECT_EQ(warm.found, cold.found + cold.stored);
  EXPECT_EQ(warm.stored, 0);
  for (const Outcome* o : std::initializer_list<const Outcome*>{&cold, &warm}) {
    EXPECT_TRUE(SamePackedBits(o->logits, plain.logits));
    EXPECT_EQ(o->weight_bytes, plain.weight_bytes);
    EXPECT_TRUE(o->warnings.empty()) << o->warnings.front();
  }
  return warm;
}

class PackedCacheTest : public ::testing::Test {
 protected:
  void SetUp() override { WriteNativeModel(model(), TinyConfig()); }
  fs::path model() const { return model_.path(); }
  fs::path folder() const { return parent_.path() / "cache"; }
  Outcome Run(Types types = kF32Run) const { return RunModel(model(), folder(), types); }

 private:
  TempFolder model_;
  TempFolder parent_;
};

TEST_F(PackedCacheTest, AnswersAreTheSameBitForBit) {
  for (const DType stored : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(Name(stored));
    TempFolder source, cache;
    WriteNativeModel(source.path(), TinyConfig(), stored);
    for (const Types types : kPackedTypes) {
      SCOPED_TRACE(std::string(Name(types.compute)) + " " + std::string(Name(types.quantization)));
      const Outcome warm = ExpectSameAnswers(source.path(), cache.path(), types);
      // The run still reads norms, routers and embeddings from the checkpoint, but no weight of a
      // linear layer.
      for (const std::string& name : warm.fetched) {
        EXPECT_TRUE(name.find("norm") != std::string::npos ||
                    name.find("router") != std::string::npos || name == "embed.weight" ||
                    name.find("out_bias") != std::string::npos)
            << name;
      }
    }
  }
}

TEST_F(PackedCacheTest, BundledModelAnswersTheSame) {
  for (const Types types : kPackedTypes) {
    TempFolder cache;
    ExpectSameAnswers(SourcePath("deploy/models/smoe"), cache.path(), types);
  }
}

TEST_F(PackedCacheTest, FolderOfIntegersAnswersTheSame) {
  for (const Quantization type : {Quantization::kInt8, Quantization::kInt8Channel,
                                  Quantization::kInt4, Quantization::kInt4K}) {
    TempFolder parent, cache;
    ASSERT_TRUE(QuantizeFolder(model(), parent.path() / "model", type).ok());
    for (const Types types : kPackedTypes) {
      ExpectSameAnswers(parent.path() / "model", cache.path(), types);
    }
  }
}

TEST_F(PackedCacheTest, InstructionSetsShareFiles) {
  for (const Types types : kPackedTypes) {
    const Outcome cold = RunModel(model(), folder(), types, "auto");
    const Outcome warm = RunModel(model(), folder(), types, "plain");
    EXPECT_EQ(warm.found, cold.found + cold.stored);
    EXPECT_EQ(warm.stored, 0);
    EXPECT_TRUE(SamePackedBits(warm.logits, RunModel(model(), {}, types, "plain").logits));
  }
}

TEST_F(PackedCacheTest, FolderIsMadeForItsUserAlone) {
  Run();
  struct stat info {};
  ASSERT_EQ(stat(folder().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  for (const fs::path& file : FilesIn(folder())) {
    ASSERT_EQ(stat(file.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    EXPECT_EQ(file.extension(), ".packed") << "what was written temporarily is gone";
  }
}

TEST_F(PackedCacheTest, AnotherCheckpointIsNotServedAndReplacesTheFiles) {
  const Outcome before = Run();
  const size_t files = FilesIn(folder()).size();
  // A checkpoint with the same sizes and configuration but other values.
  WriteNativeModel(model(), TinyConfig(), DType::kF32, 2);
  const Outcome after = Run();
  EXPECT_EQ(after.found, 0);
  EXPECT_EQ(after.stored, before.stored);
  EXPECT_FALSE(SamePackedBits(after.logits, before.logits));
  EXPECT_TRUE(SamePackedBits(after.logits, RunModel(model(), {}, kF32Run).logits));
  EXPECT_TRUE(after.warnings.empty());
  EXPECT_EQ(FilesIn(folder()).size(), files);
  EXPECT_EQ(Run().found, before.stored);
}

TEST_F(PackedCacheTest, StateChangesWithTimesSizesAndConfiguration) {
  const auto state = [&] {
    return LoadCheckpoint(model(), {.require_tokenizer = false})->identity.state;
  };
  const fs::path weights = model() / "model.safetensors";
  const std::string first = state();
  EXPECT_EQ(state(), first);
  fs::last_write_time(weights, fs::last_write_time(weights) + std::chrono::nanoseconds(1));
  const std::string touched = state();
  EXPECT_NE(touched, first);
  // The file is rewritten and its old modification time restored, as by a copy that keeps times.
  // The change time, which only the system sets, must reveal it.
  const auto time = fs::last_write_time(weights);
  WriteFile(weights, ReadFile(weights));
  fs::last_write_time(weights, time);
  const std::string copied = state();
  EXPECT_NE(copied, touched);
  WriteFile(model() / "config.json", ReadFile(model() / "config.json") + " ");
  const std::string configured = state();
  EXPECT_NE(configured, copied);
  std::string place = LoadCheckpoint(model(), {.require_tokenizer = false})->identity.place;
  EXPECT_EQ(place, fs::canonical(model()).string());
}

// Runs of different types share no cache files, except for the layers that are bf16 also in a run
// with integer weights.
TEST_F(PackedCacheTest, TypesDoNotShareFiles) {
  std::map<std::vector<float>, int> answers;
  int stored = 0;
  for (int round = 0; round < 2; ++round) {
    for (const Types types : kPackedTypes) {
      const Outcome out = Run(types);
      stored += out.stored;
      if (types.quantization == Quantization::kNone) {
        EXPECT_EQ(out.found == 0, round == 0);
      }
      if (round == 1) {
        EXPECT_EQ(out.stored, 0);
      }
      ++answers[out.logits];
    }
  }
  // int8 and int8-channel round alike, because no row of this model has more than 64 columns.
  EXPECT_EQ(answers.size(), std::size(kPackedTypes) - 1);
  EXPECT_EQ(FilesIn(folder()).size(), static_cast<size_t>(stored));
}

// A cache with one bank of weights [5 -> 20] with a bias. Tests damage the bytes of its file.
class DamageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    backend_ = *CreateBackend({.device = "cpu", .threads = 1});
    key_.tensors = {"layer.weight", "layer.bias"};
    key_.shape.in_features = {5};
    key_.shape.out_features = {20};
    key_.shape.bias = true;
    LinearBankShape shape = key_.shape;
    shape.weight_dtype = DType::kF32;
    auto bank = *backend_->NewLinearBank(shape);
    std::vector<float> values(100);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 50.5f;
    bank->LoadWeight(0, LinearBank::Half::kMain, 0, {values.data(), DType::kF32, {20, 5}, nullptr});
    bank->LoadBias(0, LinearBank::Half::kMain, 0, {values.data(), DType::kF32, {20}, nullptr});
    packed_.assign(bank->packed_bytes(0).begin(), bank->packed_bytes(0).end());
    auto cache = Open();
    cache->Store(key_, *bank);
    ASSERT_EQ(cache->stored(), 1);
    ASSERT_EQ(FilesIn(folder_.path()).size(), 1u);
    path_ = FilesIn(folder_.path()).front();
    bytes_ = ReadFile(path_);
    ASSERT_EQ(bytes_.size(), 4096 + packed_.size());
  }
  std::unique_ptr<PackedCache> Open(const std::string& state = "state") {
    return *PackedCache::Open({.folder = folder_.path(),
                               .place = "/place",
                               .state = state,
                               .warn = [this](const std::string& w) { warnings_.push_back(w); }},
                              *backend_);
  }
  // Returns whether a file with these bytes is accepted. Checks the contents if it is.
  bool Taken(const std::string& bytes) {
    WriteFile(path_, bytes);
    warnings_.clear();
    const auto bank = Open()->Find(key_, true).bank;
    if (bank == nullptr) return false;
    EXPECT_TRUE(std::equal(packed_.begin(), packed_.end(), bank->packed_bytes(0).begin(),
                           bank->packed_bytes(0).end()));
    return true;
  }

  TempFolder folder_;
  std::unique_ptr<Backend> backend_;
  PackedBankKey key_;
  std::string packed_;
  fs::path path_;
  std::string bytes_;
  std::vector<std::string> warnings_;
};

TEST_F(DamageTest, EveryDamagedByteShows) {
  EXPECT_TRUE(Taken(bytes_));
  EXPECT_TRUE(warnings_.empty());
  const auto cache = Open();
  const int fd = open(path_.c_str(), O_RDWR);
  uint32_t random = 1;
  for (size_t i = 0; i < bytes_.size(); ++i) {
    random = random * 1664525 + 1013904223;
    const char damaged = static_cast<char>(bytes_[i] ^ (1 << (random >> 29)));
    const auto offset = static_cast<off_t>(i);
    ASSERT_EQ(pwrite(fd, &damaged, 1, offset), 1);
    warnings_.clear();
    ASSERT_EQ(cache->Find(key_, true).bank, nullptr) << "byte " << i;
    ASSERT_EQ(warnings_.size(), 1u) << "byte " << i;
    EXPECT_EQ(warnings_[0].find('\n'), std::string::npos);
    ASSERT_EQ(pwrite(fd, &bytes_[i], 1, offset), 1);
  }
  EXPECT_NE(cache->Find(key_, true).bank, nullptr);
  close(fd);
}

// Complete headers with other values.
TEST_F(DamageTest, ForgedNumbersAreRefused) {
  uint32_t random = 7;
  for (size_t at = 8; at < 56; at += 4) {
    for (const uint32_t value : {0u, 1u, 2u, 3u, 255u, 4096u, 0x7fffffffu, 0xffffffffu, random}) {
      std::string forged = bytes_;
      uint32_t old;
      std::memcpy(&old, forged.data() + at, sizeof old);
      if (value == old) continue;
      std::memcpy(forged.data() + at, &value, sizeof value);
      const uint64_t sum = PackedChecksum({forged.data(), 4088});
      std::memcpy(forged.data() + 4088, &sum, sizeof sum);
      EXPECT_FALSE(Taken(forged)) << at << ": " << value;
      random = random * 1664525 + 1013904223;
    }
  }
}

TEST_F(DamageTest, EveryOtherLengthShows) {
  for (size_t n = 0; n < bytes_.size(); n += n < 64 || n > 4090 ? 1 : 61) {
    ASSERT_FALSE(Taken(bytes_.substr(0, n))) << n;
    ASSERT_EQ(warnings_.size(), 1u);
  }
  for (const size_t more : {1, 7, 64, 4096}) {
    ASSERT_FALSE(Taken(bytes_ + std::string(more, '\0'))) << more;
    ASSERT_EQ(warnings_.size(), 1u);
  }
  EXPECT_FALSE(Taken(std::string(100'000, '\xff')));
  EXPECT_TRUE(Taken(bytes_));
}

TEST_F(DamageTest, AnotherKeyIsNotServed) {
  const auto found = [&](const PackedBankKey& key, const std::string& state = "state") {
    auto cache = Open(state);
    // Write the file also under the name that the other key would have.
    auto bank = *backend_->NewLinearBank(key_.shape);
    TempFolder aside;
    auto other = *PackedCache::Open(
        {.folder = aside.path(), .place = "/place", .state = state, .warn = {}}, *backend_);
    other->Store(key, *bank);
    for (const fs::path& file : FilesIn(aside.path())) {
      WriteFile(folder_.path() / file.filename(), bytes_);
    }
    return cache->Find(key, true).bank != nullptr;
  };
  EXPECT_TRUE(found(key_));
  EXPECT_FALSE(found(key_, "another state"));
  PackedBankKey key = key_;
  key.tensors[1] = "layer.other";
  EXPECT_FALSE(found(key));
  key = key_;
  key.shape.in_features = {6};
  EXPECT_FALSE(found(key));
  key = key_;
  key.shape.out_features = {19};  // has the same size in bytes
  EXPECT_FALSE(found(key));
  key = key_;
  key.shape.bias = false;
  EXPECT_FALSE(found(key));
  key = key_;
  key.compute = DType::kBF16;
  EXPECT_FALSE(found(key));
}

TEST_F(DamageTest, WhatIsNoFileIsIgnored) {
  fs::remove(path_);
  EXPECT_EQ(Open()->Find(key_, true).bank, nullptr);
  EXPECT_TRUE(warnings_.empty());
  fs::create_directory(path_);
  EXPECT_EQ(Open()->Find(key_, true).bank, nullptr);
  EXPECT_EQ(warnings_.size(), 1u);
  fs::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(Open()->Find(key_, true).bank, nullptr);
  EXPECT_EQ(warnings_.size(), 2u);
}

TEST_F(DamageTest, AWriterAtWorkIsLeftAlone) {
  const fs::path temporary = path_.string() + ".new";
  WriteFile(temporary, "half");
  const int fd = open(temporary.c_str(), O_RDWR);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  auto bank = Open()->Find(key_, true).bank;
  ASSERT_NE(bank, nullptr);
  auto cache = Open();
  cache->Store(key_, *bank);
  EXPECT_EQ(cache->stored(), 0);
  EXPECT_EQ(ReadFile(temporary), "half");
  // A process that has ended leaves its temporary file, which the next writer removes.
  close(fd);
  cache->Store(key_, *bank);
  EXPECT_EQ(cache->stored(), 1);
  EXPECT_FALSE(fs::exists(temporary));
  EXPECT_TRUE(Taken(ReadFile(path_)));
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(DamageTest, AReplacedFileStaysMapped) {
  const auto bank = Open()->Find(key_, true).bank;
  auto cache = Open("another state");
  cache->Store(key_, *bank);
  ASSERT_EQ(cache->stored(), 1);
  fs::remove(path_);
  EXPECT_TRUE(std::equal(packed_.begin(), packed_.end(), bank->packed_bytes(0).begin()));
}

TEST_F(DamageTest, ChecksumSeesEveryBitAndPlace) {
  std::string bytes(200, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * i * 31 >> 3);
  const uint64_t sum = PackedChecksum(bytes);
  EXPECT_EQ(PackedChecksum(bytes), sum);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    EXPECT_NE(PackedChecksum(damaged), sum) << bit;
  }
  for (size_t n = 0; n < bytes.size(); ++n) EXPECT_NE(PackedChecksum({bytes.data(), n}), sum) << n;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    for (size_t j = i + 8; j < bytes.size(); j += 8) {
      std::string swapped = bytes;
      std::swap_ranges(swapped.begin() + i, swapped.begin() + i + 8, swapped.begin() + j);
      EXPECT_NE(PackedChecksum(swapped), sum) << i << " " << j;
    }
  }
}

// A folder cannot be created below a file, and a file cannot replace a folder. (Access rights would
// not do for this test, because a superuser may write anywhere.)
TEST_F(PackedCacheTest, AnUnusableFolderIsOneWarning) {
  const std::vector<float> expected = RunModel(model(), {}, kF32Run).logits;
  WriteFile(folder(), "a file");
  for (const fs::path& place : {folder(), folder() / "below", folder() / "far" / "below"}) {
    const Outcome out = RunModel(model(), place, kF32Run);
    EXPECT_TRUE(SamePackedBits(out.logits, expected));
    EXPECT_EQ(out.stored, 0);
    EXPECT_GE(out.warnings.size(), 1u);
    EXPECT_LE(out.warnings.size(), 2u);
  }
  EXPECT_EQ(ReadFile(folder()), "a file");
}

// Simulates a full disk by a limit on the size of files: writing fails half way.
TEST_F(PackedCacheTest, AFullDiskIsOneWarning) {
  const Outcome expected = RunModel(model(), {}, kF32Run);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 5000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Outcome out = Run();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(SamePackedBits(out.logits, expected.logits));
  ASSERT_EQ(out.warnings.size(), 1u);
  EXPECT_NE(out.warnings[0].find("cannot write"), std::string::npos);
  for (const fs::path& file : FilesIn(folder())) EXPECT_EQ(file.extension(), ".packed");
  const Outcome next = Run();
  EXPECT_GT(next.stored, 0);
  EXPECT_TRUE(SamePackedBits(next.logits, expected.logits));
}

}  // namespace
}  // namespace moeserve::testing
