// Read-only view of a file, and the one way in which the loaders read text files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve {

// Tells one state of a file from another without reading it.
struct FileStamp {
  uint64_t size = 0;
  int64_t modified_ns = 0;  // of its content, as its writer may have set it
  int64_t changed_ns = 0;   // of anything about it; the system alone sets it
};

// A whole file mapped into memory, unmapped when the last owner goes.
//
// The size is taken once, when the file is opened. A file must not be truncated while it is mapped:
// the system then answers a read past the new end with SIGBUS, which no check can prevent.
// Replacing it by rename is safe.
class MappedFile {
 public:
  // NotFound if there is no such file, InvalidArgument if it is not a regular file, otherwise the
  // code that fits the system's error. Messages name the last path component only.
  static Result<std::shared_ptr<const MappedFile>> Open(const std::filesystem::path& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(data_), stamp_.size}; }
  // When it was opened.
  const FileStamp& stamp() const { return stamp_; }

 private:
  MappedFile(void* data, const FileStamp& stamp) : data_(data), stamp_(stamp) {}

  void* data_;  // null for an empty file
  FileStamp stamp_;
};

// The contents of a regular file of at most `max_bytes`. Errors as above.
Result<std::string> ReadTextFile(const std::filesystem::path& path, uint64_t max_bytes);

// Whether something of that name exists, whatever it is (a dangling link counts: opening it then
// says what is wrong).
bool Exists(const std::filesystem::path& path);

}  // namespace moeserve
