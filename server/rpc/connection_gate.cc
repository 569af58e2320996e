#include "server/rpc/connection_gate.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstdint>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/message.h"
#include "kernels/base/descriptor.h"

namespace moeserve::server::rpc {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

// A connection without data for so long may be closed for a new one.
constexpr int64_t kSilentMs = 3000;
constexpr std::chrono::milliseconds kPauseWithoutDescriptors{50};

// Returns the milliseconds since data went over the connection in either direction.
int64_t SilentFor(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return std::min(info.tcpi_last_data_recv, info.tcpi_last_data_sent);
}

}  // namespace

class ConnectionGate::Impl {
 public:
  Impl(int max_connections, std::atomic<int64_t>& open)
      : max_connections_(max_connections),
        open_(open),
        acceptor_(io_),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  ~Impl() {
    Stop();
    for (const int watch : watches_) close(watch);
  }

  absl::Status Listen(const std::string& host, int port) {
    boost::system::error_code error;
    const auto address = asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, error);
    const tcp::endpoint endpoint(address, static_cast<uint16_t>(port));
    if (!error) acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) acceptor_.native_non_blocking(true, error);
    if (!error) port_ = acceptor_.local_endpoint(error).port();
    if (!error && (!Watch(acceptor_.native_handle(), EPOLLIN) || !Watch(stop_.get(), EPOLLIN))) {
      error = boost::system::error_code(errno, boost::system::system_category());
    }
    if (error) {
      return absl::UnavailableError(
          Concat("cannot listen on ", host, ':', port, " for gRPC: ", error.message()));
    }
    return absl::OkStatus();
  }

  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
    handler_ = std::move(acceptor);
    thread_ = std::thread([this] { Run(); });
  }

  void Stop() {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof(one));
    thread_.join();
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    handler_.reset();
  }

  int port() const { return port_; }

 private:
  bool Watch(int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  void Run() {
    std::array<epoll_event, 64> events{};
    while (true) {
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
      for (int i = 0; i < count; ++i) {
        const int fd = events[static_cast<size_t>(i)].data.fd;
        if (fd == stop_.get()) return;
        if (fd == acceptor_.native_handle()) {
          Accept();
        } else {
          Forget(fd);
        }
      }
    }
  }

  void Accept() {
    const int accepted =
        accept4(acceptor_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (accepted < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // The connection stays in the queue. Closing another one may let it in.
        CloseMostSilent();
        std::this_thread::sleep_for(kPauseWithoutDescriptors);
      }
      return;
    }
    if (static_cast<int>(watches_.size()) >= max_connections_ && !CloseMostSilent()) {
      close(accepted);
      return;
    }
    // gRPC shuts the socket down before it closes its descriptor. A second descriptor of the same
    // socket then reports EPOLLHUP, which tells that the connection has ended.
    const int watch = fcntl(accepted, F_DUPFD_CLOEXEC, 0);
    if (watch < 0 || !Watch(watch, 0)) {
      if (watch >= 0) close(watch);
      close(accepted);
      return;
    }
    watches_.insert(watch);
    open_ = static_cast<int64_t>(watches_.size());
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.listener_fd = acceptor_.native_handle();
    parameters.fd = accepted;
    handler_->HandleNewConnection(&parameters);
  }

  // Returns whether a connection was closed.
  bool CloseMostSilent() {
    int most = -1;
    int64_t silent = kSilentMs - 1;
    for (const int watch : watches_) {
      const int64_t ms = SilentFor(watch);
      if (ms > silent) {
        most = watch;
        silent = ms;
      }
    }
    if (most < 0) return false;
    // gRPC reads the end of the stream and closes its descriptor.
    shutdown(most, SHUT_RDWR);
    Forget(most);
    return true;
  }

  void Forget(int watch) {
    if (watches_.erase(watch) == 0) return;  // closed by an event before this one
    // Closing alone would not end the watch while gRPC's descriptor keeps the socket open.
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watch, nullptr);
    close(watch);
    open_ = static_cast<int64_t>(watches_.size());
  }

  const int max_connections_;
  std::atomic<int64_t>& open_;
  asio::io_context io_;  // only the acceptor's constructor needs it
  tcp::acceptor acceptor_;
  const Descriptor epoll_;
  const Descriptor stop_;
  int port_ = 0;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> handler_;
  std::thread thread_;
  // Second descriptors of the open connections. Used by the thread.
  std::unordered_set<int> watches_;
};

ConnectionGate::ConnectionGate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ConnectionGate::~ConnectionGate() = default;

Result<std::unique_ptr<ConnectionGate>> ConnectionGate::Listen(const std::string& host, int port,
                                                               int max_connections,
                                                               std::atomic<int64_t>& open) {
  auto impl = std::make_unique<Impl>(max_connections, open);
  MOESERVE_RETURN_IF_ERROR(impl->Listen(host, port));
  return std::unique_ptr<ConnectionGate>(new ConnectionGate(std::move(impl)));
}

int ConnectionGate::port() const { return impl_->port(); }
void ConnectionGate::Start(
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  impl_->Start(std::move(acceptor));
}
void ConnectionGate::Stop() { impl_->Stop(); }

}  // namespace moeserve::server::rpc
