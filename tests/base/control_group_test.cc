// Reads the limits of control groups from folders that look like those of the system.
#include "base/control_group.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

class ControlGroupTest : public ::testing::Test {
 protected:
  ControlGroupTest()
      : root_(fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~ControlGroupTest() override { fs::remove_all(root_); }

  void Write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  ControlGroupLimits Read() { return ReadControlGroupLimits({root_ / "self", root_ / "mount"}); }

 private:
  const fs::path root_;
};

TEST_F(ControlGroupTest, ReadsVersion2) {
  Write("self", "0::/pod/container\n");
  Write("mount/pod/container/cpu.max", "150000 100000\n");
  Write("mount/pod/container/memory.max", "max\n");
  Write("mount/pod/memory.max", "1073741824\n");
  EXPECT_EQ(Read().cores, 1.5);
  EXPECT_EQ(Read().memory_bytes, uint64_t{1} << 30);
}

TEST_F(ControlGroupTest, TheSmallestOfAllGroupsCounts) {
  Write("self", "0::/pod/container\n");
  Write("mount/pod/container/cpu.max", "400000 100000\n");
  Write("mount/pod/cpu.max", "50000 25000\n");
  Write("mount/cpu.max", "max 100000\n");
  EXPECT_EQ(Read().cores, 2.0);
}

TEST_F(ControlGroupTest, AContainerSeesItsGroupAtTheRoot) {
  Write("self", "0::/\n");
  Write("mount/cpu.max", "300000 100000\n");
  EXPECT_EQ(Read().cores, 3.0);
  // Without a view of its own, the path names folders that the container does not have.
  Write("self", "0::/docker/4711\n");
  EXPECT_EQ(Read().cores, 3.0);
  Write("self", "0::/../outside\n");
  Write("outside/cpu.max", "100000 100000\n");
  EXPECT_EQ(Read().cores, 3.0);
}

TEST_F(ControlGroupTest, ReadsVersion1) {
  Write("self", "5:memory:/a\n4:cpu,cpuacct:/b\n3:cpuset:/c\n0::/\n");
  Write("mount/cpu/b/cpu.cfs_quota_us", "250000\n");
  Write("mount/cpu/b/cpu.cfs_period_us", "100000\n");
  Write("mount/cpu/cpu.cfs_quota_us", "-1\n");
  Write("mount/cpu/cpu.cfs_period_us", "100000\n");
  Write("mount/memory/a/memory.limit_in_bytes", "734003200\n");
  Write("mount/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Read().cores, 2.5);
  EXPECT_EQ(Read().memory_bytes, uint64_t{700} << 20);
}

TEST_F(ControlGroupTest, NothingIsLimitedByFilesThatCannotBeRead) {
  EXPECT_FALSE(Read().cores.has_value());
  Write("self", "\nno colons\n0::\n0::/x\n");
  Write("mount/x/cpu.max", "0 0\n");
  Write("mount/cpu.max", "-5 100000\n");
  Write("mount/memory.max", "many\n");
  EXPECT_FALSE(Read().cores.has_value());
  EXPECT_FALSE(Read().memory_bytes.has_value());
}

TEST(AvailableCoresTest, IsAtLeastOne) { EXPECT_GE(AvailableCores(), 1); }

}  // namespace
}  // namespace moeserve
