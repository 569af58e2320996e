#include "server/process/packed_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace moeserve::server {
namespace {

namespace fs = std::filesystem;

// Returns the first path in the variable; empty if it is not absolute.
fs::path FirstPath(const char* variable) {
  const char* const value = std::getenv(variable);
  const std::string_view text = value == nullptr ? "" : value;
  const fs::path path = text.substr(0, text.find(':'));
  return path.is_absolute() ? path : fs::path();
}

fs::path CacheFolder() {
  if (const fs::path of_service = FirstPath("CACHE_DIRECTORY"); !of_service.empty()) {
    return of_service;
  }
  if (const fs::path of_user = FirstPath("XDG_CACHE_HOME"); !of_user.empty()) return of_user;
  const fs::path home = FirstPath("HOME");
  return home.empty() ? home : home / ".cache";
}

// Returns the folder moeserve/NAME in the cache folder.
std::optional<fs::path> Subfolder(std::string_view name) {
  const fs::path base = CacheFolder();
  if (base.empty()) return std::nullopt;
  const fs::path folder = base / "moeserve" / name;
  for (const fs::path& part : {base, base / "moeserve", folder}) {
    mkdir(part.c_str(), 0700);  // whether that worked is seen below
  }
  if (access(folder.c_str(), R_OK | X_OK) != 0) return std::nullopt;
  return folder;
}

}  // namespace

std::optional<fs::path> DefaultPackedFolder() { return Subfolder("packed"); }

std::optional<fs::path> DefaultKernelFolder() { return Subfolder("kernels"); }

}  // namespace moeserve::server
