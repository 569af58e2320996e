#include "server/process/connection_limits.h"

#include <sys/resource.h>

#include <algorithm>

namespace moeserve::server {
namespace {

constexpr rlim_t kEnough = 65536;
// For the model's files, the log, the event queues of both listeners, and connections that are
// accepted only to be refused.
constexpr int kReserve = 128;
constexpr int kMostConnections = 4096;
constexpr int kFewestConnections = 8;

}  // namespace

int RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  const rlim_t wanted = std::min(limit.rlim_max, kEnough);
  if (limit.rlim_cur < wanted) {
    const rlimit raised{wanted, limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit.rlim_cur = wanted;
  }
  return static_cast<int>(std::min(limit.rlim_cur, kEnough));
}

ConnectionLimits ShareDescriptors(int descriptors) {
  const int shared = std::max(0, descriptors - kReserve);
  const auto limit = [](int connections) {
    return std::clamp(connections, kFewestConnections, kMostConnections);
  };
  return {.http = limit(shared / 2), .grpc = limit(shared / 6)};
}

ConnectionLimits LimitMemory(ConnectionLimits limits, size_t bytes_each, size_t bytes_of_port) {
  const int most = static_cast<int>(
      std::clamp<size_t>(bytes_of_port / bytes_each, kFewestConnections, kMostConnections));
  return {.http = std::min(limits.http, most), .grpc = std::min(limits.grpc, most)};
}

}  // namespace moeserve::server
