#include "server/http/health_probe.h"

#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/descriptor.h"
#include "base/error_text.h"
#include "base/steady_clock.h"

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

// Calls `receive` with a buffer and its size, which returns how many bytes it has received, until
// there is a whole line.
template <typename Receive>
Result<std::string> ReadStatusLine(const Receive& receive) {
  std::string line;
  while (line.size() < kMaxStatusLineBytes) {
    char buffer[kMaxStatusLineBytes];
    MOESERVE_ASSIGN_OR_RETURN(const size_t count, receive(buffer, sizeof(buffer)));
    line.append(buffer, count);
    const size_t end = line.find("\r\n");
    if (end != std::string::npos) return line.substr(0, end);
  }
  return absl::UnavailableError("the answer is not HTTP");
}

Result<size_t> Receive(int fd, char* buffer, size_t size, absl::Time deadline) {
  while (true) {
    MOESERVE_RETURN_IF_ERROR(Await(fd, POLLIN, deadline));
    const ssize_t count = recv(fd, buffer, size, 0);
    if (count > 0) return static_cast<size_t>(count);
    if (count == 0) return absl::UnavailableError("the connection was closed without an answer");
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    }
  }
}

// A TLS connection over a connected, non-blocking socket.
class SecureLink {
 public:
  explicit SecureLink(int fd)
      : fd_(fd),
        context_(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free),
        ssl_(SSL_new(context_.get()), &SSL_free) {
    SSL_set_fd(ssl_.get(), fd);
  }

  // Returns Unavailable unless the server shows the first certificate of `file`.
  absl::Status Connect(const std::string& file, absl::Time deadline) {
    const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new_file(file.c_str(), "r"), &BIO_free);
    const Certificate expected(
        bio != nullptr ? PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr) : nullptr,
        &X509_free);
    if (expected == nullptr) {
      return absl::InvalidArgumentError(Concat(file, ": expected a certificate in PEM"));
    }
    MOESERVE_RETURN_IF_ERROR(
        Repeat([&] { return SSL_connect(ssl_.get()); }, deadline, "the TLS handshake failed"));
    const Certificate shown(SSL_get1_peer_certificate(ssl_.get()), &X509_free);
    if (shown == nullptr || X509_cmp(shown.get(), expected.get()) != 0) {
      return absl::UnavailableError(Concat("it shows another certificate than that in ", file));
    }
    return absl::OkStatus();
  }

  absl::Status Send(std::string_view bytes, absl::Time deadline) {
    return Repeat(
        [&] { return SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size())); },
        deadline, "the connection was closed");
  }

  Result<size_t> Receive(char* buffer, size_t size, absl::Time deadline) {
    int count = 0;
    MOESERVE_RETURN_IF_ERROR(
        Repeat([&] { return count = SSL_read(ssl_.get(), buffer, static_cast<int>(size)); },
               deadline, "the connection was closed without an answer"));
    return static_cast<size_t>(count);
  }

 private:
  using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

  // Calls `step` until it succeeds, and waits for the socket in between.
  template <typename Step>
  absl::Status Repeat(const Step& step, absl::Time deadline, const char* failed) {
    while (true) {
      ERR_clear_error();
      const int result = step();
      if (result > 0) return absl::OkStatus();
      const int error = SSL_get_error(ssl_.get(), result);
      if (error == SSL_ERROR_WANT_READ) {
        MOESERVE_RETURN_IF_ERROR(Await(fd_, POLLIN, deadline));
      } else if (error == SSL_ERROR_WANT_WRITE) {
        MOESERVE_RETURN_IF_ERROR(Await(fd_, POLLOUT, deadline));
      } else {
        return absl::UnavailableError(failed);
      }
    }
  }

  const int fd_;
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
};

absl::Status Probe(const HostPort& address, absl::Time deadline, const std::string& certificate) {
  MOESERVE_ASSIGN_OR_RETURN(const Descriptor connection, ConnectTo(address, deadline));
  constexpr std::string_view kRequest =
      "GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  std::string line;
  if (certificate.empty()) {
    MOESERVE_RETURN_IF_ERROR(SendAll(connection.get(), kRequest, deadline));
    MOESERVE_ASSIGN_OR_RETURN(line, ReadStatusLine([&](char* buffer, size_t size) {
                                return Receive(connection.get(), buffer, size, deadline);
                              }));
  } else {
    SecureLink link(connection.get());
    MOESERVE_RETURN_IF_ERROR(link.Connect(certificate, deadline));
    MOESERVE_RETURN_IF_ERROR(link.Send(kRequest, deadline));
    MOESERVE_ASSIGN_OR_RETURN(line, ReadStatusLine([&](char* buffer, size_t size) {
                                return link.Receive(buffer, size, deadline);
                              }));
  }
  const std::string_view status(line);
  const bool http = status.starts_with("HTTP/1.1 ") || status.starts_with("HTTP/1.0 ");
  if (!http) return absl::UnavailableError("the answer is not HTTP");
  const std::string_view code = status.substr(9);
  if (code == "200" || code.starts_with("200 ")) return absl::OkStatus();
  return absl::UnavailableError(Concat("it answered ", Printable(std::string(code), 64)));
}

}  // namespace

absl::Status ProbeReadiness(const HostPort& address, absl::Duration timeout,
                            const std::string& certificate) {
  // A server that closes the connection early must not end the process.
  std::signal(SIGPIPE, SIG_IGN);
  const HostPort target = Reachable(address);
  const absl::Status status = Probe(target, SteadyNow() + timeout, certificate);
  if (status.ok()) return status;
  const bool bracket = target.host.find(':') != std::string::npos;
  return absl::UnavailableError(Concat("the server at ", bracket ? "[" : "", target.host,
                                       bracket ? "]:" : ":", target.port,
                                       " is not ready: ", std::string(status.message())));
}

}  // namespace moeserve::server
