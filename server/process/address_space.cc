#include "server/process/address_space.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>

#include "base/control_group.h"
#include "base/error_text.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

// Of the listeners, gRPC, the work pools, the engine and the watchers: 24 when the server is idle.
constexpr uint64_t kServerThreads = 32;
constexpr uint64_t kArenaBytes = uint64_t{64} << 20;
constexpr uint64_t kArenasPerCore = 8;  // glibc's limit for 64-bit systems
constexpr uint64_t kUsualStack = uint64_t{8} << 20;

// Returns how many bytes of address space the process has now; 0 if that is not known.
uint64_t UsedBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0;
  if (!(file >> pages)) return 0;
  return pages * static_cast<uint64_t>(std::max(0L, sysconf(_SC_PAGESIZE)));
}

}  // namespace

absl::Status CheckAddressSpace(int threads) {
  rlimit space{};
  if (getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur == RLIM_INFINITY) {
    return absl::OkStatus();
  }
  rlimit stack{};
  const bool limited = getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY;
  const uint64_t stack_bytes = limited ? stack.rlim_cur : kUsualStack;
  const uint64_t all_threads =
      kServerThreads + static_cast<uint64_t>(threads == 0 ? AvailableCores() : threads);
  const auto cores = static_cast<uint64_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  const uint64_t arenas = std::min(all_threads, kArenasPerCore * cores);
  const uint64_t needed = UsedBytes() + all_threads * stack_bytes + arenas * kArenaBytes;
  if (space.rlim_cur >= needed) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      Concat("the address space of the process is limited to ",
             ShowBytes(static_cast<int64_t>(space.rlim_cur)), " (ulimit -v); expected at least ",
             ShowBytes(static_cast<int64_t>(needed)),
             " for the stacks and arenas of threads, and room for the model; raise the limit, or "
             "limit the memory of the process with a control group"));
}

}  // namespace moeserve::server
