#include "model_loaders/files/read_ahead.h"

#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "gtest/gtest.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kAheadMiB = ReadAhead::kAhead / kMiB;

// Records what is read instead of reading it. Thread-safe.
class Recorder {
 public:
  ReadAhead::Reader Reader() {
    return [this](std::string_view part) {
      const MutexLock lock(mutex_);
      parts_.push_back(part);
      bytes_ += part.size();
      changed_.notify_all();
    };
  }

  // Waits until so many bytes have been read in all.
  void WaitFor(uint64_t bytes) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return bytes_ >= bytes; });
  }

  // Returns the parts read since the last call, with neighbours joined.
  std::vector<std::string_view> Take() {
    const MutexLock lock(mutex_);
    std::vector<std::string_view> joined;
    for (const std::string_view part : std::exchange(parts_, {})) {
      if (!joined.empty() && joined.back().data() + joined.back().size() == part.data()) {
        joined.back() = {joined.back().data(), joined.back().size() + part.size()};
      } else {
        joined.push_back(part);
      }
    }
    return joined;
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string_view> parts_ ABSL_GUARDED_BY(mutex_);
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Files without contents on the disk, since nothing of them is read.
class ReadAheadTest : public ::testing::Test {
 protected:
  std::string_view Add(uint64_t mib) {
    const std::filesystem::path path = folder_.path() / std::to_string(files_.size());
    WriteFile(path, "");
    std::filesystem::resize_file(path, mib * kMiB);
    files_.push_back(*MappedFile::Open(path));
    return files_.back()->bytes();
  }

  static std::string_view Part(std::string_view bytes, uint64_t first_mib, uint64_t mib) {
    return bytes.substr(first_mib * kMiB, mib * kMiB);
  }

  std::unique_ptr<ReadAhead> Start() {
    return std::make_unique<ReadAhead>(files_, recorder_.Reader());
  }

  TempFolder folder_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  Recorder recorder_;
};

using Parts = std::vector<std::string_view>;

TEST_F(ReadAheadTest, StaysAheadByAtMostItsLimit) {
  const std::string_view bytes = Add(3 * kAheadMiB);
  auto ahead = Start();
  ahead->Use(Part(bytes, 0, 10));
  recorder_.WaitFor((10 + kAheadMiB) * kMiB);
  ahead->Use(Part(bytes, 10, 5));
  recorder_.WaitFor((15 + kAheadMiB) * kMiB);
  ahead.reset();
  EXPECT_EQ(recorder_.Take(), Parts{Part(bytes, 0, 15 + kAheadMiB)});
}

TEST_F(ReadAheadTest, ContinuesWithTheNextFiles) {
  const std::string_view first = Add(20), second = Add(1), third = Add(2 * kAheadMiB);
  auto ahead = Start();
  ahead->Use(Part(first, 10, 5));
  recorder_.WaitFor((5 + kAheadMiB) * kMiB);
  ahead.reset();
  // The files need not be neighbours in memory, but may be.
  Recorder expected;
  expected.Reader()(Part(first, 10, 10));
  expected.Reader()(second);
  expected.Reader()(Part(third, 0, kAheadMiB - 6));
  EXPECT_EQ(recorder_.Take(), expected.Take());
}

TEST_F(ReadAheadTest, EndsWithTheLastFile) {
  const std::string_view bytes = Add(30);
  auto ahead = Start();
  ahead->Use(Part(bytes, 29, 1));
  recorder_.WaitFor(kMiB);
  ahead.reset();
  EXPECT_EQ(recorder_.Take(), Parts{Part(bytes, 29, 1)});
}

TEST_F(ReadAheadTest, FollowsAUseElsewhere) {
  const std::string_view bytes = Add(8 * kAheadMiB);
  auto ahead = Start();
  ahead->Use(Part(bytes, 0, 1));
  recorder_.WaitFor((1 + kAheadMiB) * kMiB);
  ahead->Use(Part(bytes, 4 * kAheadMiB, 1));
  recorder_.WaitFor((2 * (1 + kAheadMiB)) * kMiB);
  ahead->Use(Part(bytes, 2 * kAheadMiB, 1));
  recorder_.WaitFor((3 * (1 + kAheadMiB)) * kMiB);
  ahead.reset();
  EXPECT_EQ(recorder_.Take(),
            (Parts{Part(bytes, 0, 1 + kAheadMiB), Part(bytes, 4 * kAheadMiB, 1 + kAheadMiB),
                   Part(bytes, 2 * kAheadMiB, 1 + kAheadMiB)}));
}

TEST_F(ReadAheadTest, ReadsNothingTwice) {
  const std::string_view bytes = Add(2 * kAheadMiB);
  auto ahead = Start();
  for (const uint64_t place : {3, 2, 5, 0, 4, 1}) ahead->Use(Part(bytes, place, 1));
  recorder_.WaitFor((kAheadMiB + 3) * kMiB);  // from MiB 3 to MiB 6 and the limit
  ahead.reset();
  EXPECT_EQ(recorder_.Take(), Parts{Part(bytes, 3, kAheadMiB + 3)});
}

TEST_F(ReadAheadTest, BeginsAtAPage) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const std::string_view bytes = Add(1);
  auto ahead = Start();
  ahead->Use(bytes.substr(page + 100, 10));
  recorder_.WaitFor(kMiB - page);
  EXPECT_EQ(recorder_.Take(), Parts{bytes.substr(page)});
}

TEST_F(ReadAheadTest, IgnoresOtherMemory) {
  const std::string_view bytes = Add(1);
  const std::string other(100, 'x');
  auto ahead = Start();
  ahead->Use(other);
  ahead->Use(bytes);
  recorder_.WaitFor(kMiB);
  ahead.reset();
  EXPECT_EQ(recorder_.Take(), Parts{bytes});
}

}  // namespace
}  // namespace moeserve::testing
