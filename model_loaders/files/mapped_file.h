// A read-only mapping of a file, and a reader for text files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/guarded_mapping.h"
#include "base/status.h"

namespace moeserve {

// Size and times of a file, which change when the file changes. Comparing them needs no reading.
struct FileStamp {
  uint64_t size = 0;
  int64_t modified_ns = 0;  // last change of the contents; programs can set it
  int64_t changed_ns = 0;   // last change of contents or attributes; only the system sets it
};

// A whole file mapped into memory. The mapping ends with the last shared owner.
//
// The size is read once, when the file is opened. If the file is cut short while it is mapped, the
// missing bytes read as zeros and Check() returns the error; see GuardedMapping. Replacing the file
// by a rename is safe.
class MappedFile {
 public:
  // NotFound if the file does not exist, InvalidArgument if it is not a regular file, else an error
  // code for the system's error. Error messages contain only the last component of the path.
  static Result<std::shared_ptr<const MappedFile>> Open(const std::filesystem::path& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Returns an owner of `file` for `part`, a part of its bytes. When the last copy of the owner is
  // destroyed, the part no longer counts as memory of this process; reading it again is valid. Can
  // be called by several threads.
  static std::shared_ptr<const void> ReadOnce(std::shared_ptr<const MappedFile> file,
                                              std::string_view part);

  std::string_view bytes() const {
    return mapping_ == nullptr ? std::string_view()
                               : std::string_view(mapping_->data(), mapping_->size());
  }
  // Returns Internal with the file's name if bytes of the file have been lost since it was opened.
  // Must be called after the last access to bytes() and before a result computed from them is used.
  absl::Status Check() const { return mapping_ == nullptr ? absl::OkStatus() : mapping_->Check(); }
  // Returns the stamp at the time of opening.
  const FileStamp& stamp() const { return stamp_; }

 private:
  MappedFile(std::unique_ptr<const GuardedMapping> mapping, const FileStamp& stamp)
      : mapping_(std::move(mapping)), stamp_(stamp) {}

  std::unique_ptr<const GuardedMapping> mapping_;  // null for an empty file
  FileStamp stamp_;
};

// The largest size of a JSON file of a checkpoint that describes the model.
inline constexpr uint64_t kMaxConfigFileBytes = uint64_t{64} << 20;

// Returns the contents of a regular file. InvalidArgument if it is larger than `max_bytes` or of a
// kind that CheckFileKind() refuses;
// otherwise the same errors as MappedFile::Open().
Result<std::string> ReadTextFile(const std::filesystem::path& path, uint64_t max_bytes);

// Returns whether `path` exists. A dangling symbolic link counts, because opening it then reports
// the error.
bool Exists(const std::filesystem::path& path);

}  // namespace moeserve
