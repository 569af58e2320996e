// Reloads the key file while the server runs.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "server/base/file_watcher.h"
#include "server/keys/key_store.h"

namespace moeserve::server {

// Logs a warning if others may read the file, and for each key that may use none of
// `served_names`.
void WarnAboutKeys(const std::filesystem::path& file, const std::vector<KeySpec>& keys,
                   const std::vector<std::string>& served_names);

// Watches the key file. If the new file cannot be used, the old keys stay in force, and an error is
// logged and counted. `store` must outlive the watcher. `loaded` is what LookAtFiles() returned
// before the file was read.
std::unique_ptr<FileWatcher> WatchKeyFile(const std::filesystem::path& file,
                                          std::vector<FileVersion> loaded,
                                          const std::vector<std::string>& served_names,
                                          KeyStore& store);

}  // namespace moeserve::server
