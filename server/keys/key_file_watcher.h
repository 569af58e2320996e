// Reloads the key file while the server runs.
#pragma once

#include <condition_variable>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "server/base/file_version.h"
#include "server/keys/key_store.h"

namespace moeserve::server {

// Logs a warning if others may read the file, and for each key that may use none of
// `served_names`.
void WarnAboutKeys(const std::filesystem::path& file, const std::vector<KeySpec>& keys,
                   const std::vector<std::string>& served_names);

// Checks once a second whether the file has changed, on its own thread. A changed file is read when
// it was the same at two checks, so that a file that is being written is not read too early. If the
// new file cannot be used, the old keys stay in force, and an error is logged and counted.
class KeyFileWatcher {
 public:
  // `store` must outlive the watcher. `loaded` is what LookAtFile() returned before the file
  // was read.
  KeyFileWatcher(std::filesystem::path file, FileVersion loaded,
                 std::vector<std::string> served_names, KeyStore& store);

  KeyFileWatcher(const KeyFileWatcher&) = delete;
  KeyFileWatcher& operator=(const KeyFileWatcher&) = delete;

  // Makes the thread read the file now, changed or not. Thread-safe.
  void RequestReload();

 private:
  void Run(const std::stop_token& stop);
  void Reload();

  const std::filesystem::path file_;
  const std::vector<std::string> served_names_;
  KeyStore& store_;
  Mutex mutex_;
  std::condition_variable_any changed_;
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  FileVersion loaded_;
  std::jthread thread_;
};

}  // namespace moeserve::server
