// Tells whether a file has changed.
#pragma once

#include <cstdint>
#include <filesystem>

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
FileVersion LookAtFile(const std::filesystem::path& file);

}  // namespace moeserve::server
