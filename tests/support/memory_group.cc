#include "tests/support/memory_group.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

#include "base/descriptor.h"
#include "base/error_text.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

bool Write(const fs::path& file, const std::string& text) {
  const Descriptor fd(open(file.c_str(), O_WRONLY | O_CLOEXEC));
  return fd.get() >= 0 && write(fd.get(), text.data(), text.size()) == std::ssize(text);
}

std::string FirstLine(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

// Returns the path of this process's group; `controllers` is "memory" or, of version 2, "".
std::string OwnGroup(const std::string& controllers) {
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    if (line.substr(first + 1, second - first - 1) == controllers) return line.substr(second + 1);
  }
  return "/";
}

struct Place {
  fs::path own;     // where the process is
  fs::path parent;  // where a group can be made
  const char* limit;
};

Place FindPlace() {
  const fs::path root = "/sys/fs/cgroup";
  if (fs::exists(root / "memory" / "memory.limit_in_bytes")) {
    fs::path own = root / "memory" / fs::path(OwnGroup("memory")).relative_path();
    if (!fs::exists(own)) own = root / "memory";
    return {own, own, "memory.limit_in_bytes"};
  }
  fs::path own = root / fs::path(OwnGroup("")).relative_path();
  if (!fs::exists(own)) own = root;
  // A group with processes has no groups below it that limit memory, unless it is the root.
  const fs::path parent = own == root || !own.has_relative_path() ? root : own.parent_path();
  if (FirstLine(parent / "cgroup.subtree_control").find("memory") == std::string::npos) {
    Write(parent / "cgroup.subtree_control", "+memory");
  }
  return {own, parent, "memory.max"};
}

}  // namespace

Result<std::unique_ptr<MemoryGroup>> MemoryGroup::Enter(int64_t bytes) {
  const Place place = FindPlace();
  const fs::path group = place.parent / Concat("moeserve-test-", getpid());
  if (mkdir(group.c_str(), 0755) != 0) {
    return absl::UnavailableError(
        Concat("no rights to make ", group.string(), ": ", std::generic_category().message(errno)));
  }
  std::unique_ptr<MemoryGroup> made(new MemoryGroup(group, place.own));
  if (!Write(group / place.limit, std::to_string(bytes))) {
    return absl::UnavailableError(Concat("no rights to limit memory in ", group.string()));
  }
  if (!Write(group / "cgroup.procs", std::to_string(getpid()))) {
    return absl::UnavailableError(Concat("no rights to enter ", group.string()));
  }
  return made;
}

MemoryGroup::~MemoryGroup() {
  Write(parent_ / "cgroup.procs", std::to_string(getpid()));
  rmdir(group_.c_str());
}

void DropPages(const fs::path& file) {
  const Descriptor fd(open(file.c_str(), O_RDONLY | O_CLOEXEC));
  fdatasync(fd.get());
  posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
}

}  // namespace moeserve::testing
