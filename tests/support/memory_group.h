// Limits the memory of a process of a test by a control group, version 1 or 2.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "base/status.h"

namespace moeserve::testing {

// A new control group with the calling process in it. The destructor moves the process back.
class MemoryGroup {
 public:
  // Unavailable, with the reason, if the process may not make such a group. `bytes` limits memory
  // and page cache, but not what was charged to other groups before.
  static Result<std::unique_ptr<MemoryGroup>> Enter(int64_t bytes);
  ~MemoryGroup();
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

 private:
  MemoryGroup(std::filesystem::path group, std::filesystem::path parent)
      : group_(std::move(group)), parent_(std::move(parent)) {}
  std::filesystem::path group_, parent_;
};

// Lets the system forget the pages of a file, so that whoever reads them next is charged for them.
void DropPages(const std::filesystem::path& file);

}  // namespace moeserve::testing
