// Read-only mapping of a file, and the reader of text files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve {

// Distinguishes states of a file without reading it.
struct FileStamp {
  uint64_t size = 0;
  int64_t modified_ns = 0;  // last change of the content; a program can set it
  int64_t changed_ns = 0;   // last change of content or attributes; only the system sets it
};

// A whole file mapped into memory, unmapped by the last owner.
//
// The size is read once, on opening. The file must not be truncated while it is mapped: reading
// past the new end raises SIGBUS, which no check can prevent. Replacing the file by rename is safe.
class MappedFile {
 public:
  // NotFound if there is no such file, InvalidArgument if it is not a regular file, else a code for
  // the system's error. Messages contain only the last component of the path.
  static Result<std::shared_ptr<const MappedFile>> Open(const std::filesystem::path& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(data_), stamp_.size}; }
  // The stamp at the time of opening.
  const FileStamp& stamp() const { return stamp_; }

 private:
  MappedFile(void* data, const FileStamp& stamp) : data_(data), stamp_(stamp) {}

  void* data_;  // null for an empty file
  FileStamp stamp_;
};

// The contents of a regular file of at most `max_bytes`. Errors as above.
Result<std::string> ReadTextFile(const std::filesystem::path& path, uint64_t max_bytes);

// Whether there is anything of that name, dangling links included: opening one reports the fault.
bool Exists(const std::filesystem::path& path);

}  // namespace moeserve
