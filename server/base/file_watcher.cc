#include "server/base/file_watcher.h"

#include <sys/stat.h>

#include <chrono>
#include <utility>

#include "server/base/status_conversion.h"

namespace moeserve::server {
namespace {

FileVersion LookAtFile(const std::filesystem::path& file) {
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) return {};
  const auto nanoseconds = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  return {.device = status.st_dev,
          .inode = status.st_ino,
          .size = status.st_size,
          .modified = nanoseconds(status.st_mtim),
          .changed = nanoseconds(status.st_ctim)};
}

}  // namespace

std::vector<FileVersion> LookAtFiles(const std::vector<std::filesystem::path>& files) {
  std::vector<FileVersion> versions;
  for (const auto& file : files) versions.push_back(LookAtFile(file));
  return versions;
}

FileWatcher::FileWatcher(std::vector<std::filesystem::path> files, std::vector<FileVersion> loaded,
                         std::function<absl::Status()> read,
                         std::function<void(const absl::Status&)> ended)
    : files_(std::move(files)),
      read_(std::move(read)),
      ended_(std::move(ended)),
      loaded_(std::move(loaded)),
      thread_([this](const std::stop_token& stop) { Run(stop); }) {}

void FileWatcher::RequestReload() {
  {
    MutexLock lock(mutex_);
    requested_ = true;
  }
  changed_.notify_all();
}

void FileWatcher::Run(const std::stop_token& stop) {
  std::vector<FileVersion> previous = loaded_;
  while (true) {
    bool requested = false;
    {
      MutexLock lock(mutex_);
      changed_.wait_for(lock, stop, std::chrono::seconds(1),
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return requested_; });
      requested = std::exchange(requested_, false);
    }
    if (stop.stop_requested()) return;
    const std::vector<FileVersion> versions = LookAtFiles(files_);
    const bool settled = versions == std::exchange(previous, versions);
    if (!requested && (versions == loaded_ || !settled)) continue;
    loaded_ = versions;
    ended_(Caught(read_));
  }
}

}  // namespace moeserve::server
