// Reads files again when they have changed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"

namespace moeserve::server {

// What stat() tells about a version of a file; all zero if there is none.
struct FileVersion {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t modified = 0;  // nanoseconds
  int64_t changed = 0;   // nanoseconds
  bool operator==(const FileVersion&) const = default;
};

// Follows symbolic links.
std::vector<FileVersion> LookAtFiles(const std::vector<std::filesystem::path>& files);

// Checks once a second, on its own thread, whether any of the files has changed. Changed files are
// read when they were the same at two checks, so that a file that is being written is not read too
// early. Files that cannot be used are not read again until they change.
class FileWatcher {
 public:
  // `loaded` is what LookAtFiles() returned before the files were read. The thread calls `read`,
  // which may throw, and then `ended` with the status of it. What they use must outlive the
  // watcher.
  FileWatcher(std::vector<std::filesystem::path> files, std::vector<FileVersion> loaded,
              std::function<absl::Status()> read, std::function<void(const absl::Status&)> ended);

  FileWatcher(const FileWatcher&) = delete;
  FileWatcher& operator=(const FileWatcher&) = delete;

  // Makes the thread read the files now, changed or not. Thread-safe.
  void RequestReload();

 private:
  void Run(const std::stop_token& stop);

  const std::vector<std::filesystem::path> files_;
  const std::function<absl::Status()> read_;
  const std::function<void(const absl::Status&)> ended_;
  Mutex mutex_;
  std::condition_variable_any changed_;
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<FileVersion> loaded_;
  std::jthread thread_;
};

}  // namespace moeserve::server
