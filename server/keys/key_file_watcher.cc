#include "server/keys/key_file_watcher.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/message.h"
#include "server/keys/key_file.h"
#include "server/logging/logging.h"

namespace moeserve::server {

void WarnAboutKeys(const std::filesystem::path& file, const std::vector<KeySpec>& keys,
                   const std::vector<std::string>& served_names) {
  if (ReadableByOthers(file)) {
    LogWarning("keys", Concat("every user of this machine can read the key file ", file.string(),
                              ": give it the mode 0600"));
  }
  for (const KeySpec& key : keys) {
    if (!key.limits.models) continue;
    const auto served = [&](const std::string& name) {
      return std::find(served_names.begin(), served_names.end(), name) != served_names.end();
    };
    if (std::any_of(key.limits.models->begin(), key.limits.models->end(), served)) continue;
    LogWarning("keys", Concat("the key ", key.name, " may use none of the models served here"));
  }
}

KeyFileWatcher::KeyFileWatcher(std::filesystem::path file, FileVersion loaded,
                               std::vector<std::string> served_names, KeyStore& store)
    : file_(std::move(file)),
      served_names_(std::move(served_names)),
      store_(store),
      loaded_(loaded),
      thread_([this](const std::stop_token& stop) { Run(stop); }) {}

void KeyFileWatcher::RequestReload() {
  {
    MutexLock lock(mutex_);
    requested_ = true;
  }
  changed_.notify_all();
}

void KeyFileWatcher::Run(const std::stop_token& stop) {
  FileVersion previous = loaded_;
  while (true) {
    bool requested = false;
    {
      MutexLock lock(mutex_);
      changed_.wait_for(lock, stop, std::chrono::seconds(1),
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return requested_; });
      requested = std::exchange(requested_, false);
    }
    if (stop.stop_requested()) return;
    const FileVersion version = LookAtFile(file_);
    const bool settled = version == std::exchange(previous, version);
    if (!requested && (version == loaded_ || !settled)) continue;
    // A file that cannot be used is not read again until it changes.
    loaded_ = version;
    Reload();
  }
}

void KeyFileWatcher::Reload() {
  absl::Status status;
  try {
    auto keys = ReadKeyFile(file_);
    status = keys.status();
    if (status.ok()) {
      WarnAboutKeys(file_, *keys, served_names_);
      const size_t count = keys->size();
      store_.Replace(*std::move(keys));
      LogInfo("keys", Concat("reloaded the key file: ", count, " keys"));
    }
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  store_.CountReload(status.ok());
  if (status.ok()) return;
  LogError("keys",
           Concat("the old keys stay in force: ", Printable(std::string(status.message()), 1000)));
}

}  // namespace moeserve::server
