// Mapped files that are cut short while a model is loaded from them or reads them in place.

#include <gtest/gtest.h>

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

// A model, whose linear layers are read from the packed cache in `folder` if that is not empty.
struct LoadedModel {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;
  absl::Status status;
};

LoadedModel LoadWithCache(const fs::path& model_folder, const fs::path& folder) {
  LoadedModel out;
  auto checkpoint = *LoadCheckpoint(model_folder, {.require_tokenizer = false});
  out.backend = *CreateBackend({.device = "cpu", .threads = 2});
  std::unique_ptr<PackedCache> cache;
  if (!folder.empty()) {
    cache = *PackedCache::Open({.folder = folder,
                                .place = checkpoint.identity.place,
                                .state = checkpoint.identity.state,
                                .warn = {}},
                               *out.backend);
  }
  auto model = Model::Create(checkpoint.spec, {}, *checkpoint.weights, *out.backend, cache.get());
  out.status = model.status();
  if (model.ok()) out.model = *std::move(model);
  return out;
}

void RunOneToken(LoadedModel& loaded) {
  const ModelSpec& spec = loaded.model->spec();
  auto kv = *loaded.backend->NewKvCache(CacheShapes(spec), KvCacheTypeOf(DType::kF32), {1});
  const std::vector<int32_t> table = {0};
  Batch batch;
  batch.page_tables = {table};
  batch.logit_rows = {0};
  batch.tokens = {spec.vocab_size - 1};
  batch.positions = {0};
  batch.sequence = {0};
  batch.phase = {Phase::kPrefill};
  std::vector<float> logits(static_cast<size_t>(spec.vocab_size));
  loaded.model->Forward(batch, *kv, {}, {.logits = logits});
}

class FilesInUseTest : public ::testing::Test {
 protected:
  void SetUp() override { WriteNativeModel(model(), TinyConfig()); }
  fs::path model() const { return model_.path(); }
  fs::path folder() const { return parent_.path() / "cache"; }

 private:
  TempFolder model_;
  TempFolder parent_;
};

TEST_F(FilesInUseTest, FilesCutShortWhileInUseAreReported) {
  LoadWithCache(model(), folder());  // fills the cache
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder())) files.push_back(entry.path());
  EXPECT_FALSE(files.empty());
  for (const fs::path& file : files) {
    LoadedModel loaded = LoadWithCache(model(), folder());
    RunOneToken(loaded);
    EXPECT_TRUE(loaded.model->CheckFiles().ok());
    const std::string bytes = ReadFile(file);
    fs::resize_file(file, 4096);  // all of the payload goes
    RunOneToken(loaded);
    const absl::Status status = loaded.model->CheckFiles();
    EXPECT_TRUE(absl::IsInternal(status));
    EXPECT_NE(status.message().find(file.filename().string()), std::string::npos) << status;
    WriteFile(file, bytes);
  }
}

TEST_F(FilesInUseTest, AnEmbeddingTableCutShortWhileInUseIsReported) {
  nlohmann::json config = TinyConfig();
  config["tie_word_embeddings"] = false;
  WriteNativeModel(model(), config);
  LoadedModel loaded = LoadWithCache(model(), {});
  RunOneToken(loaded);
  EXPECT_TRUE(loaded.model->CheckFiles().ok());
  fs::resize_file(model() / "model.safetensors", 0);
  RunOneToken(loaded);
  const absl::Status status = loaded.model->CheckFiles();
  EXPECT_NE(status.message().find("the file model.safetensors changed"), std::string::npos)
      << status;
}

// What was packed from zeros is neither used nor stored.
TEST_F(FilesInUseTest, ACheckpointCutShortWhileItIsLoadedIsRefused) {
  auto checkpoint = *LoadCheckpoint(model(), {.require_tokenizer = false});
  auto backend = *CreateBackend({.device = "cpu", .threads = 2});
  auto cache = *PackedCache::Open(
      {.folder = folder(), .place = "/place", .state = "state", .warn = {}}, *backend);
  fs::resize_file(model() / "model.safetensors", 4096);
  const auto loaded =
      Model::Create(checkpoint.spec, {}, *checkpoint.weights, *backend, cache.get());
  EXPECT_TRUE(absl::IsInternal(loaded.status()));
  EXPECT_NE(loaded.status().message().find("the file model.safetensors changed"), std::string::npos)
      << loaded.status();
  EXPECT_EQ(cache->stored(), 0);
}

}  // namespace
}  // namespace moeserve::testing
