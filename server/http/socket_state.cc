#include "server/http/socket_state.h"

// A file of its own, because <linux/tcp.h>, which alone declares all members of tcp_info, conflicts
// with <netinet/tcp.h>, which Asio includes.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstddef>

namespace moeserve::server::http {

int UnsentBytes(int socket) {
  int bytes = 0;
  return ioctl(socket, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

std::optional<uint64_t> AcknowledgedBytes(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  constexpr size_t kNeeded = offsetof(tcp_info, tcpi_bytes_acked) + sizeof(info.tcpi_bytes_acked);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || size < kNeeded) {
    return std::nullopt;
  }
  return info.tcpi_bytes_acked;
}

bool HasEnded(int socket) {
  constexpr int kClosed = 7;  // TCP_CLOSE, which <linux/tcp.h> does not declare
  tcp_info info{};
  socklen_t size = sizeof(info);
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state == kClosed;
}

}  // namespace moeserve::server::http
