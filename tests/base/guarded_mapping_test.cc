// A mapped file that is cut short is an error of its reader; any other SIGBUS ends the process.

#include "base/guarded_mapping.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/descriptor.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

class GuardedMappingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "guarded-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path Write(const std::string& name, size_t bytes) {
    const fs::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << std::string(bytes, 'x');
    return path;
  }
  static std::unique_ptr<const GuardedMapping> Map(const fs::path& path) {
    const Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    return GuardedMapping::Map(fd.get(), fs::file_size(path), path);
  }
  static int Sum(const GuardedMapping& mapping) {
    int sum = 0;
    for (size_t i = 0; i < mapping.size(); ++i) sum += mapping.data()[i] == 'x';
    return sum;
  }

  const size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  fs::path folder_;
};

TEST_F(GuardedMappingTest, LostPagesReadAsZerosAndAreReported) {
  const fs::path path = Write("weights.bin", 8 * page_);
  const auto mapping = Map(path);
  const auto other = Map(Write("other.bin", 8 * page_));
  ASSERT_NE(mapping, nullptr);
  EXPECT_TRUE(mapping->Check().ok());
  fs::resize_file(path, 3 * page_);
  EXPECT_EQ(Sum(*mapping), static_cast<int>(3 * page_));
  const absl::Status status = mapping->CheckAccesses();
  EXPECT_TRUE(absl::IsInternal(status));
  EXPECT_NE(status.message().find("the file weights.bin changed while it was in use"),
            std::string::npos)
      << status;
  EXPECT_EQ(Sum(*other), static_cast<int>(8 * page_));
  EXPECT_TRUE(other->Check().ok());
  fs::resize_file(path, 8 * page_);  // what was lost stays lost
  EXPECT_FALSE(mapping->Check().ok());
}

// A file that is cut a second time, before the place of the first cut.
TEST_F(GuardedMappingTest, SurvivesSeveralCutsFromSeveralThreads) {
  const fs::path path = Write("weights.bin", 64 * page_);
  const auto mapping = Map(path);
  for (const size_t pages : {40, 20, 0}) {
    fs::resize_file(path, pages * page_);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] { EXPECT_EQ(Sum(*mapping), static_cast<int>(pages * page_)); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_FALSE(mapping->Check().ok());
}

TEST_F(GuardedMappingTest, ACutInsideAPageIsReported) {
  const fs::path path = Write("weights.bin", 4 * page_);
  const auto mapping = Map(path);
  fs::resize_file(path, 4 * page_ - 10);
  EXPECT_EQ(Sum(*mapping), static_cast<int>(4 * page_ - 10));  // raises no signal
  EXPECT_TRUE(mapping->CheckAccesses().ok());
  EXPECT_FALSE(mapping->Check().ok());
}

TEST_F(GuardedMappingTest, AnotherFileOfTheSameNameIsNoDamage) {
  const fs::path path = Write("weights.bin", 4 * page_);
  const auto mapping = Map(path);
  fs::rename(Write("new.bin", 10), path);
  EXPECT_TRUE(mapping->Check().ok());
  EXPECT_EQ(Sum(*mapping), static_cast<int>(4 * page_));
  fs::remove(path);
  EXPECT_TRUE(mapping->Check().ok());
}

TEST_F(GuardedMappingTest, ManyMappingsComeAndGo) {
  std::vector<std::unique_ptr<const GuardedMapping>> mappings;
  for (int round = 0; round < 2; ++round) {
    mappings.clear();
    for (int i = 0; i < 600; ++i) {
      mappings.push_back(Map(Write("f" + std::to_string(i), page_)));
    }
  }
  fs::resize_file(folder_ / "f555", 0);
  EXPECT_EQ(Sum(*mappings[555]), 0);
  for (int i = 0; i < 600; ++i) EXPECT_EQ(mappings[i]->CheckAccesses().ok(), i != 555) << i;
}

TEST_F(GuardedMappingTest, AWatchFindsTheMappingOfAnAddress) {
  const fs::path path = Write("weights.bin", 4 * page_);
  const auto mapping = Map(path);
  const auto other = Map(Write("other.bin", 4 * page_));
  WatchedMappings watch, watch_other;
  int local = 0;
  watch.Add(&local);
  watch.Add(nullptr);
  EXPECT_TRUE(watch.empty());
  watch.Add(mapping->data() + page_ + 7);
  watch_other.Add(other->data());
  EXPECT_TRUE(watch.Check().ok());
  fs::resize_file(path, 0);
  EXPECT_EQ(Sum(*mapping), 0);
  EXPECT_FALSE(watch.Check().ok());  // at once
  EXPECT_TRUE(watch_other.Check().ok());
}

using GuardedMappingDeathTest = GuardedMappingTest;

TEST_F(GuardedMappingDeathTest, OtherBusErrorsEndTheProcess) {
  const auto mapping = Map(Write("weights.bin", page_));
  const fs::path path = Write("foreign.bin", 2 * page_);
  EXPECT_DEATH(
      {
        const Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
        const auto* foreign =
            static_cast<const char*>(mmap(nullptr, 2 * page_, PROT_READ, MAP_PRIVATE, fd.get(), 0));
        fs::resize_file(path, 0);
        std::printf("%d\n", *static_cast<const volatile char*>(foreign + page_));
      },
      "");
  EXPECT_DEATH(raise(SIGBUS), "");
}

}  // namespace
}  // namespace moeserve
