// Writes a folder that exists under its name only when it is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string_view>

#include "base/status.h"

namespace moeserve {

// A temporary folder next to its destination. Finish() renames it to the destination; without
// Finish(), the destructor removes it.
class UnfinishedFolder {
 public:
  // InvalidArgument if `destination` exists and is not an empty folder. If it is a link to an empty
  // folder, Finish() replaces that folder.
  static Result<std::unique_ptr<UnfinishedFolder>> Create(const std::filesystem::path& destination);
  ~UnfinishedFolder();
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;

  // Returns the path of the temporary folder.
  const std::filesystem::path& path() const { return path_; }

  // Syncs the folder to disk and gives it its name. Its files must have been synced.
  absl::Status Finish();

 private:
  UnfinishedFolder() = default;
  std::filesystem::path path_, target_;
};

// Is told how many bytes of weights have been written to a folder, and how many there will be.
// Called by the thread that writes.
using WriteProgress = std::function<void(int64_t written, int64_t total)>;

// Writes a new file, or copies one, and syncs it to disk. Errors contain the path.
absl::Status WriteNewFile(const std::filesystem::path& path, std::string_view text);
absl::Status CopyToNewFile(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace moeserve
