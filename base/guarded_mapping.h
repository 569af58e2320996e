// Read-only mappings of files that survive a file that is cut short while it is mapped.
#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace moeserve {

// The first bytes of a file, mapped read-only. The mapping ends with the object.
//
// If the file is cut short, or its disk fails, an access to the missing pages raises SIGBUS, which
// would end the process. The first object installs a handler for this signal, for the rest of the
// process. The handler puts pages of zeros in the place of the missing ones and marks the mapping
// as damaged. Whoever computes something from the bytes must therefore call Check() after the last
// access and before the result is used. A SIGBUS that no mapping of this class explains has the
// effect that it had before.
//
// All functions may be called by any thread.
class GuardedMapping {
 public:
  // Maps `size` bytes, at least 1, of the open file `fd`. `path` is that of the file. Returns null
  // and sets errno if that is not possible.
  static std::unique_ptr<const GuardedMapping> Map(int fd, size_t size,
                                                   const std::filesystem::path& path);
  ~GuardedMapping();
  GuardedMapping(const GuardedMapping&) = delete;
  GuardedMapping& operator=(const GuardedMapping&) = delete;

  const char* data() const { return data_; }
  size_t size() const { return size_; }

  // Returns Internal with the name of the file if bytes of it have been lost since it was mapped:
  // if an access found pages missing, or if the file at the path of Map() is the same file and is
  // now shorter. The second rule covers the page in which a file was cut: its end reads as zeros
  // without a signal. The error stays when the file grows again.
  absl::Status Check() const;
  // Returns whether the file at `path` is the one that is mapped.
  bool IsFileAt(const std::filesystem::path& path) const;
  // Checks only whether an access found pages missing. Takes a few instructions.
  absl::Status CheckAccesses() const;

  // A place in the table that the signal handler searches. Internal.
  struct Slot;

 private:
  GuardedMapping(const char* data, size_t size, const std::filesystem::path& path);
  absl::Status Damaged() const;

  const char* data_;
  size_t size_;
  std::filesystem::path path_;
  unsigned long device_ = 0;  // of the file, with `inode_`; 0 if unknown
  unsigned long inode_ = 0;
  Slot* slot_;
};

// The mappings that a computation reads in place. The mappings must outlive the object. Not
// thread-safe.
class WatchedMappings {
 public:
  // Watches the mapping that contains `address`, if there is one.
  void Add(const void* address);

  // Returns the first error of the mappings. Asks the system for the size of the files at most
  // every 20 ms, unless `now`; accesses to missing pages are noticed at every call.
  absl::Status Check(bool now = false);

  bool empty() const { return mappings_.empty(); }

 private:
  std::vector<const GuardedMapping*> mappings_;
  long long last_look_ns_ = 0;  // steady clock
};

}  // namespace moeserve
