// The limits that Linux control groups, of which a container is made, set for this process.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace moeserve {

// Where the system tells about control groups; tests use other places.
struct ControlGroupPlaces {
  std::filesystem::path membership = "/proc/self/cgroup";
  std::filesystem::path mount = "/sys/fs/cgroup";
};

// The limits of the process's own group and of all groups around it that can be seen, of which the
// smallest counts. Version 1 and version 2 of control groups are read. Files that cannot be read
// limit nothing.
struct ControlGroupLimits {
  std::optional<double> cores;           // processor time per time; absent: unlimited
  std::optional<uint64_t> memory_bytes;  // absent: unlimited
};
ControlGroupLimits ReadControlGroupLimits(const ControlGroupPlaces& places = {});

// Returns how many threads of this process can run all the time: the cores that its affinity
// allows, and no more than the limit of its control group. A fraction of the limit is left for
// other threads, since a group that exceeds its limit stands still for the rest of a period. At
// least 1.
int AvailableCores();

}  // namespace moeserve
