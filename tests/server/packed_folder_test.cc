// The folder of `--packed-cache auto`.

#include "server/process/packed_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using server::DefaultPackedFolder;

// Sets the three variables; null removes one.
void SetVariables(const char* service, const char* user, const char* home) {
  const auto set = [](const char* name, const char* value) {
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  };
  set("CACHE_DIRECTORY", service);
  set("XDG_CACHE_HOME", user);
  set("HOME", home);
}

TEST(PackedFolder, IsInTheFirstCacheFolderThatIsNamed) {
  const TempFolder folder;
  const std::string a = folder.path() / "a", b = folder.path() / "b", c = folder.path() / "c";
  fs::create_directory(c);
  SetVariables((a + ":/other").c_str(), b.c_str(), c.c_str());
  EXPECT_EQ(DefaultPackedFolder(), fs::path(a) / "moeserve/packed");
  struct stat info {};
  ASSERT_EQ(stat((a + "/moeserve/packed").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  SetVariables(nullptr, b.c_str(), c.c_str());
  EXPECT_EQ(DefaultPackedFolder(), fs::path(b) / "moeserve/packed");
  SetVariables(nullptr, "relative", c.c_str());
  EXPECT_EQ(DefaultPackedFolder(), fs::path(c) / ".cache/moeserve/packed");
  SetVariables("", "", c.c_str());
  EXPECT_EQ(DefaultPackedFolder(), fs::path(c) / ".cache/moeserve/packed");
}

TEST(PackedFolder, IsNoneWithoutAPlaceForIt) {
  const TempFolder folder;
  SetVariables(nullptr, nullptr, nullptr);
  EXPECT_FALSE(DefaultPackedFolder().has_value());
  SetVariables(nullptr, nullptr, "home");
  EXPECT_FALSE(DefaultPackedFolder().has_value());
  SetVariables(nullptr, nullptr, (folder.path() / "missing").c_str());
  EXPECT_FALSE(DefaultPackedFolder().has_value());
  const fs::path file = folder.path() / "file";
  std::ofstream(file) << "x";
  SetVariables(nullptr, file.c_str(), nullptr);
  EXPECT_FALSE(DefaultPackedFolder().has_value());
}

}  // namespace
}  // namespace moeserve::testing
