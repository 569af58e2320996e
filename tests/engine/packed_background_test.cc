// Packed weights that are written after the model was loaded, in the background.

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/model/model.h"
#include "engine/weights/packed_cache.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;

struct Loaded {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<PackedCache> cache;
  std::unique_ptr<Model> model;
  std::vector<std::string> warnings;
};

// Loads a model with a packed cache in `folder`.
void Load(const fs::path& folder, bool defer, Loaded& out, uint64_t least_free = 0) {
  auto checkpoint = LoadCheckpoint(SourcePath("deploy/models/mh-moe"), {});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  out.backend = *CreateBackend({.device = "cpu", .threads = 2});
  out.cache =
      *PackedCache::Open({.folder = folder,
                          .place = checkpoint->identity.place,
                          .state = checkpoint->identity.state,
                          .warn = [&out](const std::string& w) { out.warnings.push_back(w); },
                          .defer = defer,
                          .least_free = least_free},
                         *out.backend);
  out.model = *Model::Create(checkpoint->spec, {.compute = DType::kBF16}, *checkpoint->weights,
                             *out.backend, out.cache.get());
}

int PackedFilesIn(const fs::path& folder) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files += entry.path().extension() == ".packed";
  }
  return files;
}

TEST(PackedInBackground, TheNextStartFindsWhatWasWritten) {
  const TempFolder folder;
  Loaded first;
  Load(folder.path(), true, first);
  EXPECT_EQ(first.cache->found(), 0);
  EXPECT_EQ(PackedFilesIn(folder.path()), 0) << "nothing is written while the model is loaded";
  ASSERT_TRUE(first.cache->has_deferred());
  first.model->WriteInBackground(std::move(first.cache));
  Loaded now;
  Load(folder.path() / "other", false, now);
  const int all = now.cache->stored();
  ASSERT_GT(all, 3);
  for (int i = 0; i < 500 && PackedFilesIn(folder.path()) < all; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  Loaded second;
  Load(folder.path(), true, second);
  EXPECT_EQ(second.cache->found(), all);
  EXPECT_FALSE(second.cache->has_deferred());
  second.model->WriteInBackground(std::move(second.cache));  // has nothing to do
}

TEST(PackedInBackground, AModelThatIsDestroyedStopsTheWriter) {
  const TempFolder folder;
  for (int i = 0; i < 20; ++i) {
    Loaded loaded;
    Load(folder.path(), true, loaded);
    if (loaded.cache->has_deferred()) loaded.model->WriteInBackground(std::move(loaded.cache));
    // The model is destroyed while the writer is at work, and files are whole or absent.
    EXPECT_TRUE(loaded.warnings.empty());
  }
  Loaded last;
  Load(folder.path(), false, last);
  EXPECT_TRUE(last.warnings.empty());
}

TEST(PackedInBackground, StopsWhenItIsTold) {
  const TempFolder folder;
  Loaded loaded;
  Load(folder.path(), true, loaded);
  int asked = 0;
  loaded.cache->WriteDeferred([&asked] { return ++asked > 4; });
  EXPECT_LT(loaded.cache->stored(), 3);
  EXPECT_FALSE(loaded.cache->has_deferred());
  EXPECT_TRUE(loaded.warnings.empty());
}

TEST(PackedInBackground, AnAlmostFullDiskIsLeftAlone) {
  const TempFolder folder;
  Loaded loaded;
  Load(folder.path(), false, loaded, uint64_t{1} << 60);
  EXPECT_EQ(loaded.cache->stored(), 0);
  ASSERT_EQ(loaded.warnings.size(), 1u);
  EXPECT_NE(loaded.warnings[0].find("the disk is almost full"), std::string::npos);
}

TEST(PackedInBackground, FilesThatNobodyUsesAreRemoved) {
  const TempFolder folder;
  Loaded loaded;
  Load(folder.path(), false, loaded);
  const int all = PackedFilesIn(folder.path());
  const auto old = fs::file_time_type::clock::now() - hours(48);
  const fs::path left = folder.path() / "a.packed.new", other = folder.path() / "other";
  for (const fs::path& file : {left, other}) std::ofstream(file) << "x";
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    fs::last_write_time(entry.path(), old);
  }
  Loaded again;
  Load(folder.path(), false, again);  // uses all of its files
  PackedCache::RemoveUnused(folder.path(), hours(24));
  EXPECT_EQ(PackedFilesIn(folder.path()), all);
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(other));
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    fs::last_write_time(entry.path(), old);
  }
  PackedCache::RemoveUnused(folder.path(), hours(24));
  EXPECT_EQ(PackedFilesIn(folder.path()), 0);
  PackedCache::RemoveUnused(folder.path() / "missing", hours(24));
}

}  // namespace
}  // namespace moeserve::testing
