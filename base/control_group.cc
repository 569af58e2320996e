#include "base/control_group.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>

namespace moeserve {
namespace {

namespace fs = std::filesystem;

template <typename T>
void TakeSmaller(std::optional<T>& limit, T value) {
  limit = std::min(limit.value_or(value), value);
}

// Version 2 writes "QUOTA PERIOD", both in microseconds, or "max PERIOD".
void ReadCpuMax(const fs::path& group, ControlGroupLimits& limits) {
  std::ifstream file(group / "cpu.max");
  double quota = 0, period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) TakeSmaller(limits.cores, quota / period);
}

// Version 1 has a file for each of the two; a quota of -1 is none.
void ReadCpuQuota(const fs::path& group, ControlGroupLimits& limits) {
  std::ifstream quota_file(group / "cpu.cfs_quota_us"), period_file(group / "cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) {
    TakeSmaller(limits.cores, quota / period);
  }
}

void ReadMemory(const fs::path& file, ControlGroupLimits& limits) {
  // Version 1 writes "no limit" as the largest whole number of pages.
  constexpr uint64_t kUnlimited = uint64_t{1} << 62;
  std::ifstream in(file);
  uint64_t bytes = 0;  // not a number in version 2 if there is no limit: "max"
  if (in >> bytes && bytes < kUnlimited) TakeSmaller(limits.memory_bytes, bytes);
}

// Calls `read` with the folder of the group `path` below `root`, and with those of all groups
// around it. In a container whose view begins at its own group, only `root` exists.
template <typename F>
void ForEachGroup(const fs::path& root, const fs::path& path, const F& read) {
  fs::path group = path.relative_path().lexically_normal();
  const bool outside = !group.empty() && *group.begin() == "..";
  while (!outside && !group.empty() && group != ".") {
    read(root / group);
    group = group.parent_path();
  }
  read(root);
}

bool Contains(std::string_view list, std::string_view name) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == name) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace

ControlGroupLimits ReadControlGroupLimits(const ControlGroupPlaces& places) {
  ControlGroupLimits limits;
  std::ifstream membership(places.membership);
  // A line is "HIERARCHY:CONTROLLERS:PATH"; version 2 has no controllers there.
  for (std::string line; std::getline(membership, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      ForEachGroup(places.mount, path, [&](const fs::path& group) {
        ReadCpuMax(group, limits);
        ReadMemory(group / "memory.max", limits);
      });
    }
    if (Contains(controllers, "cpu")) {
      ForEachGroup(places.mount / "cpu", path,
                   [&](const fs::path& group) { ReadCpuQuota(group, limits); });
    }
    if (Contains(controllers, "memory")) {
      ForEachGroup(places.mount / "memory", path, [&](const fs::path& group) {
        ReadMemory(group / "memory.limit_in_bytes", limits);
      });
    }
  }
  return limits;
}

int AvailableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // The call fails on machines with more cores than the set has.
  const int affine = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  const double limit = ReadControlGroupLimits().cores.value_or(affine);
  return std::max(1, static_cast<int>(std::min<double>(affine, limit)));
}

}  // namespace moeserve
