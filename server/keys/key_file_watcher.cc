#include "server/keys/key_file_watcher.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
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

std::unique_ptr<FileWatcher> WatchKeyFile(const std::filesystem::path& file,
                                          std::vector<FileVersion> loaded,
                                          const std::vector<std::string>& served_names,
                                          KeyStore& store) {
  const auto read = [file, served_names, &store]() -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(auto keys, ReadKeyFile(file));
    WarnAboutKeys(file, keys, served_names);
    const size_t count = keys.size();
    store.Replace(std::move(keys));
    LogInfo("keys", Concat("reloaded the key file: ", count, " keys"));
    return absl::OkStatus();
  };
  const auto ended = [&store](const absl::Status& status) {
    store.CountReload(status.ok());
    if (status.ok()) return;
    LogError("keys", Concat("the old keys stay in force: ",
                            Printable(std::string(status.message()), 1000)));
  };
  return std::make_unique<FileWatcher>(std::vector{file}, std::move(loaded), read, ended);
}

}  // namespace moeserve::server
