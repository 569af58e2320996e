#include "kernels/exchange/tcp/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/steady_clock.h"

namespace moeserve {
namespace {

// Whether a socket is connected to itself, which happens if nothing listens on a port of this
// machine and the socket was given just that port.
bool IsOwnEnd(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof(own);
  socklen_t peer_size = sizeof(peer);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

}  // namespace

std::string SystemError() { return std::strerror(errno); }

int PollMilliseconds(absl::Duration duration) {
  return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration) + 1, 0, 60'000));
}

bool WaitForEvent(int fd, short events, absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  for (;;) {
    pollfd waited{.fd = fd, .events = events, .revents = 0};
    const int found = poll(&waited, 1, PollMilliseconds(deadline - SteadyNow()));
    if (found > 0) return true;
    if (found == 0 || errno != EINTR) return false;
  }
}

void SetSocketOptions(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

std::string EachAddress(const std::string& host, int port, int flags,
                        const std::function<bool(const addrinfo&)>& use) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  const int error =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &found);
  if (error != 0) return gai_strerror(error);
  bool used = false;
  std::string reason;
  for (const addrinfo* at = found; at != nullptr && !used; at = at->ai_next) {
    used = use(*at);
    if (!used) reason = SystemError();
  }
  freeaddrinfo(found);
  return used ? "" : reason;
}

Descriptor ListenAt(const addrinfo& address, int& port) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) return Descriptor(-1);
  const int on = 1;
  // A port on which a process that has ended was connected can be used at once.
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) {
    setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  }
  sockaddr_storage bound{};
  std::memcpy(&bound, address.ai_addr, address.ai_addrlen);
  // Both families listen on one port, the one that the first got.
  auto& number = address.ai_family == AF_INET ? reinterpret_cast<sockaddr_in&>(bound).sin_port
                                              : reinterpret_cast<sockaddr_in6&>(bound).sin6_port;
  number = htons(static_cast<uint16_t>(port));
  socklen_t size = address.ai_addrlen;
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&bound), size) != 0 ||
      listen(socket.get(), 64) != 0 ||
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return Descriptor(-1);
  }
  port = ntohs(number);
  SetSocketOptions(socket.get());
  return socket;
}

Descriptor ConnectTo(const addrinfo& address, absl::Duration timeout) {
  Descriptor socket(
      ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (socket.get() < 0) return Descriptor(-1);
  if (connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return Descriptor(-1);
    if (!WaitForEvent(socket.get(), POLLOUT, timeout)) {
      errno = ETIMEDOUT;
      return Descriptor(-1);
    }
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      return Descriptor(-1);
    }
  }
  if (IsOwnEnd(socket.get())) {
    errno = ECONNREFUSED;
    return Descriptor(-1);
  }
  SetSocketOptions(socket.get());
  return socket;
}

}  // namespace moeserve
