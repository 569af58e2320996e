// Files that are not what their names promise are refused with what they are.

#include "model_loaders/files/file_kind.h"

#include <gtest/gtest.h>

#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/torch/torch_file.h"
#include "tests/model_loaders/support.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

struct Kind {
  std::string bytes;
  const char* found;
};

// A tar archive with one empty file, "a".
std::string TarArchive(bool with_magic = true) {
  std::string tar(600, '\0');
  tar.replace(0, 1, "a");
  tar.replace(124, 11, "00000000000");  // the file's size
  if (with_magic) tar.replace(257, 5, "ustar");
  // The sum of the bytes above and of the eight spaces that stand for the checksum.
  const int kSum = 'a' + 11 * '0' + (with_magic ? 'u' + 's' + 't' + 'a' + 'r' : 0) + 8 * ' ';
  char digits[8];
  std::snprintf(digits, sizeof(digits), "%06o", kSum);
  tar.replace(148, 7, digits, 7);
  return tar;
}

std::vector<Kind> Kinds() {
  return {{"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n",
           "found a Git LFS pointer to it; run \"git lfs pull\""},
          {"/annex/objects/SHA256E-s5--ab\n", "found a git-annex pointer"},
          {"<!DOCTYPE html>\n<html><body>404</body></html>", "found an HTML page"},
          {"\xef\xbb\xbf \n<HTML lang=\"en\">", "found an HTML page"},
          {"GGUF" + std::string("\3\0\0\0", 4), "found a GGUF file"},
          {"PK\3\4 and more", "found a zip archive; unpack it"},
          {"\x1f\x8b\x08 and more", "found a gzip archive"},
          {"\x28\xb5\x2f\xfd and more", "found a zstd archive"},
          {TarArchive(), "found a tar archive"},
          {TarArchive(/*with_magic=*/false), "found a tar archive"}};
}

TEST(FileKind, ForeignFilesAreRefusedByName) {
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json",
                           "tokenizer_config.json", "generation_config.json"}) {
    for (const Kind& kind : Kinds()) {
      TempFolder folder;
      WriteNativeModel(folder.path(), TinyConfig());
      ASSERT_TRUE(LoadCheckpoint(folder.path()).ok());
      WriteFile(folder.path() / name, kind.bytes);
      const absl::Status status = LoadCheckpoint(folder.path()).status();
      EXPECT_TRUE(Mentions(status, {name, "expected the file itself", kind.found}));
    }
  }
}

TEST(FileKind, IndexesAndShardsAreCheckedToo) {
  for (const Kind& kind : Kinds()) {
    TempFolder folder;
    WriteNativeModel(folder.path(), TinyConfig());
    fs::remove(folder.path() / "model.safetensors");
    const fs::path index = folder.path() / "model.safetensors.index.json";
    WriteFile(index, kind.bytes);
    EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                         {"model.safetensors.index.json", kind.found}));
    WriteFile(index, R"({"weight_map": {"a": "model-00001-of-00001.safetensors"}})");
    WriteFile(folder.path() / "model-00001-of-00001.safetensors", kind.bytes);
    EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path()).status(),
                         {"model-00001-of-00001.safetensors", kind.found}));
  }
}

TEST(FileKind, OwnFormatsAreAccepted) {
  EXPECT_TRUE(CheckFileKind("pytorch_model.bin", "PK\3\4", OwnFormat::kZip).ok());
  EXPECT_FALSE(CheckFileKind("pytorch_model.bin", "GGUF", OwnFormat::kZip).ok());
  EXPECT_TRUE(CheckFileKind("a.gguf", "GGUF", OwnFormat::kGguf).ok());
  EXPECT_FALSE(CheckFileKind("a.gguf", "PK\3\4", OwnFormat::kGguf).ok());
  EXPECT_TRUE(CheckFileKind("chat_template.jinja", "<html>{{ messages }}").ok());
  for (const char* head : {"", " ", "<", "{}", "version 2", "<h", "PK"}) {
    EXPECT_TRUE(CheckFileKind("config.json", head).ok()) << head;
  }
  // Words where a tar archive has its magic.
  std::string text(600, ' ');
  text.replace(257, 5, "ustar");
  EXPECT_TRUE(CheckFileKind("vocab.json", text).ok());
}

}  // namespace
}  // namespace moeserve::testing
