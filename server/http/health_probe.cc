#include "server/http/health_probe.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/message.h"
#include "base/steady_clock.h"
#include "kernels/base/descriptor.h"

namespace moeserve::server {
namespace {

constexpr size_t kMaxStatusLineBytes = 1024;

HostPort Reachable(const HostPort& address) {
  if (address.host == "0.0.0.0") return {"127.0.0.1", address.port};
  if (address.host == "::") return {"::1", address.port};
  return address;
}

// Waits until a non-blocking socket is ready for one of `events`.
absl::Status Await(int fd, short events, absl::Time deadline) {
  while (true) {
    const int64_t left = std::max<int64_t>(0, absl::ToInt64Milliseconds(deadline - SteadyNow()));
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left + 1, 1'000'000)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return absl::UnavailableError(std::strerror(errno));
    if (left == 0) return absl::UnavailableError("no answer in time");
  }
}

Result<Descriptor> ConnectTo(const addrinfo& target, absl::Time deadline) {
  Descriptor connection(
      socket(target.ai_family, target.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) return absl::UnavailableError(std::strerror(errno));
  if (connect(connection.get(), target.ai_addr, target.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return absl::UnavailableError(std::strerror(errno));
    MOESERVE_RETURN_IF_ERROR(Await(connection.get(), POLLOUT, deadline));
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return absl::UnavailableError(std::strerror(error));
  }
  return connection;
}

Result<Descriptor> ConnectTo(const HostPort& address, absl::Time deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
  absl::Status last;
  for (const addrinfo* target = list.get(); target != nullptr; target = target->ai_next) {
    auto connection = ConnectTo(*target, deadline);
    if (connection.ok()) return connection;
    last = connection.status();
  }
  return last;
}

absl::Status SendAll(int fd, std::string_view bytes, absl::Time deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      MOESERVE_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    }
  }
  return absl::OkStatus();
}

Result<std::string> ReadStatusLine(int fd, absl::Time deadline) {
  std::string line;
  while (line.size() < kMaxStatusLineBytes) {
    MOESERVE_RETURN_IF_ERROR(Await(fd, POLLIN, deadline));
    char buffer[kMaxStatusLineBytes];
    const ssize_t count = recv(fd, buffer, sizeof(buffer), 0);
    if (count == 0) return absl::UnavailableError("the connection was closed without an answer");
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) continue;
      return absl::UnavailableError(std::strerror(errno));
    }
    line.append(buffer, static_cast<size_t>(count));
    const size_t end = line.find("\r\n");
    if (end != std::string::npos) return line.substr(0, end);
  }
  return absl::UnavailableError("the answer is not HTTP");
}

absl::Status Probe(const HostPort& address, absl::Time deadline) {
  MOESERVE_ASSIGN_OR_RETURN(const Descriptor connection, ConnectTo(address, deadline));
  MOESERVE_RETURN_IF_ERROR(SendAll(
      connection.get(),
      "GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", deadline));
  MOESERVE_ASSIGN_OR_RETURN(const std::string line, ReadStatusLine(connection.get(), deadline));
  const std::string_view status(line);
  const bool http = status.starts_with("HTTP/1.1 ") || status.starts_with("HTTP/1.0 ");
  if (!http) return absl::UnavailableError("the answer is not HTTP");
  const std::string_view code = status.substr(9);
  if (code == "200" || code.starts_with("200 ")) return absl::OkStatus();
  return absl::UnavailableError(Concat("it answered ", Printable(std::string(code), 64)));
}

}  // namespace

absl::Status ProbeReadiness(const HostPort& address, absl::Duration timeout) {
  const HostPort target = Reachable(address);
  const absl::Status status = Probe(target, SteadyNow() + timeout);
  if (status.ok()) return status;
  const bool bracket = target.host.find(':') != std::string::npos;
  return absl::UnavailableError(Concat("the server at ", bracket ? "[" : "", target.host,
                                       bracket ? "]:" : ":", target.port,
                                       " is not ready: ", std::string(status.message())));
}

}  // namespace moeserve::server
