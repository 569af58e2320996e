// Paths of models: folders, folders of Hugging Face's cache, and files.

#include "model_loaders/checkpoint/model_path.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/support.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using testing::Mentions;
using testing::TempFolder;

void Write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// A cache folder with two snapshots, whose files are links to blobs, as in Hugging Face's cache.
class CacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = temp_.path() / "models--org--some--model";
    fs::create_directories(folder_ / "blobs");
    for (const char* revision : {"aaa", "bbb"}) {
      fs::create_directories(folder_ / "snapshots" / revision);
      const fs::path golden = fs::path(MOESERVE_FAMILIES_DIR) / "llama";
      for (const char* file : {"config.json", "model.safetensors"}) {
        const fs::path blob = folder_ / "blobs" / (std::string(revision) + file);
        fs::copy_file(golden / file, blob);
        fs::create_symlink(fs::path("../../blobs") / blob.filename(),
                           folder_ / "snapshots" / revision / file);
      }
    }
  }

  TempFolder temp_;
  fs::path folder_;
};

TEST_F(CacheTest, LinksMayLeadToTheBlobsOfTheSameModelOnly) {
  Write(folder_ / "refs" / "main", "aaa");
  EXPECT_TRUE(LoadCheckpoint(folder_, {.require_tokenizer = false}).ok());
  const fs::path other = temp_.path() / "models--org--other" / "blobs";
  fs::create_directories(other);
  fs::copy_file(folder_ / "blobs" / "aaamodel.safetensors", other / "x");
  const fs::path link = folder_ / "snapshots" / "aaa" / "model.safetensors";
  fs::remove(link);
  fs::create_symlink("../../../models--org--other/blobs/x", link);
  const absl::Status status = LoadCheckpoint(folder_, {.require_tokenizer = false}).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
}

TEST_F(CacheTest, TheRefChoosesTheSnapshot) {
  for (const std::string revision : {"aaa", "bbb"}) {
    for (const char* end : {"", "\n", "\r\n"}) {
      Write(folder_ / "refs" / "main", revision + end);
      const auto path = ResolveModelPath(folder_);
      ASSERT_TRUE(path.ok()) << path.status();
      EXPECT_EQ(path->path, folder_ / "snapshots" / revision);
      EXPECT_EQ(path->name, "some--model");
    }
  }
  const auto checkpoint = LoadCheckpoint(folder_, {.require_tokenizer = false});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->directory_name, "some--model");
}

TEST_F(CacheTest, WithoutARefThereIsOneSnapshot) {
  EXPECT_TRUE(Mentions(ResolveModelPath(folder_).status(),
                       {"snapshots: expected one folder, or a file refs/main", "found aaa, bbb"}));
  fs::remove_all(folder_ / "snapshots" / "aaa");
  const auto path = ResolveModelPath(folder_);
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(path->path, folder_ / "snapshots" / "bbb");
  fs::remove_all(folder_ / "snapshots" / "bbb");
  EXPECT_TRUE(Mentions(ResolveModelPath(folder_).status(), {"found none"}));
}

TEST_F(CacheTest, ARefDoesNotLeaveTheFolder) {
  for (const std::string& ref : {std::string(".."), std::string("../../x"), std::string(),
                                 std::string("a\0b", 3), std::string(200, 'a')}) {
    Write(folder_ / "refs" / "main", ref);
    EXPECT_TRUE(Mentions(ResolveModelPath(folder_).status(),
                         {"refs/main: expected the name of a snapshot, found "}));
  }
  Write(folder_ / "refs" / "main", "ccc");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder_).status(), {"snapshots/ccc", "found nothing"}));
}

TEST_F(CacheTest, AFileOfAFolderStandsForTheFolder) {
  const fs::path snapshot = folder_ / "snapshots" / "aaa";
  for (const char* file : {"config.json", "model.safetensors"}) {
    const auto path = ResolveModelPath(snapshot / file);
    ASSERT_TRUE(path.ok()) << path.status();
    EXPECT_EQ(path->path, snapshot);
    EXPECT_TRUE(LoadCheckpoint(snapshot / file, {.require_tokenizer = false}).ok());
  }
  Write(snapshot / "model-00001-of-00002.safetensors", "");
  EXPECT_TRUE(Mentions(ResolveModelPath(snapshot / "model-00001-of-00002.safetensors").status(),
                       {"expected model.safetensors, pytorch_model.bin, a .gguf file or a folder",
                        "one of several"}));
}

TEST_F(CacheTest, OtherPathsStandForThemselves) {
  const fs::path plain = folder_ / "snapshots" / "aaa";
  EXPECT_EQ(ResolveModelPath(plain)->path, plain);
  EXPECT_EQ(ResolveModelPath(plain / "")->name, "aaa");
  EXPECT_EQ(ResolveModelPath(folder_ / "nothing")->path, folder_ / "nothing");
  Write(folder_ / "model.gguf", "");
  EXPECT_EQ(ResolveModelPath(folder_ / "model.gguf")->path, folder_ / "model.gguf");
}

}  // namespace
}  // namespace moeserve
