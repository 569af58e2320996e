#include "server/rpc/http2/connection_gate.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <condition_variable>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/error_text.h"
#include "base/mutex.h"
#include "server/base/await.h"
#include "server/connections/address_paces.h"
#include "server/connections/address_pauses.h"
#include "server/logging/logging.h"
#include "server/rpc/http2/relay.h"
#include "server/tls/tls_store.h"

namespace moeserve::server::rpc {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using asio::local::stream_protocol;
using boost::system::error_code;

// A connection without data for so long may be closed for a new one.
constexpr std::chrono::seconds kSilent{3};
constexpr std::chrono::milliseconds kPauseWithoutDescriptors{50};
constexpr std::chrono::seconds kTimeCheckInterval{1};
// Bytes that the system holds between gRPC and a relay. More would hide that a client reads slowly.
constexpr int kPipeBytes = 64 << 10;

}  // namespace

class ConnectionGate::Impl {
 public:
  Impl(const ConnectionGateOptions& options, const ConnectionCounters& counters)
      : options_(options),
        counters_(counters),
        acceptor_(io_),
        clock_(io_),
        work_(asio::make_work_guard(io_)),
        clients_(options.address_limit),
        pauses_(options.address_limit),
        paces_(options.address_limit) {}

  ~Impl() {
    Stop();
    Close(std::chrono::milliseconds(0));
  }

  absl::Status Listen() {
    error_code error;
    const std::string& host = options_.host;
    const auto address = asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, error);
    const tcp::endpoint endpoint(address, static_cast<uint16_t>(options_.port));
    if (!error) acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) port_ = acceptor_.local_endpoint(error).port();
    if (error) {
      return absl::UnavailableError(
          Concat("cannot listen on ", host, ':', options_.port, " for gRPC: ", error.message()));
    }
    return absl::OkStatus();
  }

  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
    handler_ = std::move(acceptor);
    asio::co_spawn(io_, Accept(), asio::detached);
    asio::co_spawn(io_, CheckTimes(), asio::detached);
    thread_ = std::thread([this] {
      // An exception that escapes, such as std::bad_alloc, must not stop the other connections.
      while (true) {
        try {
          io_.run();
          return;
        } catch (const std::exception& error) {
          LogError("grpc", error.what());
        }
      }
    });
  }

  void Stop() {
    if (!thread_.joinable() || std::exchange(stopped_, true)) return;
    asio::post(io_, [this] {
      error_code ignored;
      acceptor_.close(ignored);
      handler_.reset();
      MutexLock lock(mutex_);
      handler_ended_ = true;
      changed_.notify_all();
    });
    MutexLock lock(mutex_);
    changed_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return handler_ended_; });
  }

  void Close(std::chrono::milliseconds grace) {
    if (!thread_.joinable()) return;
    {
      MutexLock lock(mutex_);
      changed_.wait_for(lock, grace, [this] { return counters_.open == 0; });
    }
    asio::post(io_, [this] {
      clock_.cancel();
      closing_ = true;
      for (auto& [key, open] : relays_) open.relay->Close();
      work_.reset();
    });
    thread_.join();
  }

  int port() const { return port_; }

 private:
  asio::awaitable<void> Accept() {
    while (acceptor_.is_open()) {
      auto [error, socket] = co_await acceptor_.async_accept(kAwait);
      if (error == asio::error::operation_aborted || handler_ == nullptr) break;
      if (error) {
        // No descriptors are left. Closing a connection may let the next one in.
        CloseMostSilent();
        asio::steady_timer pause(io_, kPauseWithoutDescriptors);
        co_await pause.async_wait(kAwait);
        continue;
      }
      const tcp::endpoint client = socket.remote_endpoint(error);
      if (error) continue;  // the connection has ended
      Admit(std::move(socket), ClientAddress(client.address()));
    }
  }

  // Starts a relay for the connection if there is room. Destroying the socket closes it.
  void Admit(tcp::socket socket, const ClientAddress& client) {
    const auto now = std::chrono::steady_clock::now();
    if (pauses_.Paused(client, now) || paces_.Flooding(client, now)) {
      counters_.over_limit.address.fetch_add(1);
      return;
    }
    if (clients_.Full(client)) {
      counters_.over_limit.address.fetch_add(1);
      if (!CloseMostSilent(&client)) return;
    }
    if (static_cast<int>(relays_.size()) >= options_.max_connections) {
      counters_.over_limit.server.fetch_add(1);
      if (!CloseMostSilent()) return;
    }
    StartRelay(std::move(socket), client);
  }

  asio::awaitable<void> CheckTimes() {
    while (!closing_) {
      clock_.expires_after(kTimeCheckInterval);
      co_await clock_.async_wait(kAwait);
      const auto relays = relays_;  // a relay that ends leaves the map
      for (const auto& [key, open] : relays) open.relay->CheckTime();
    }
  }

  // Gives gRPC one end of a new local socket and returns the other one.
  std::optional<stream_protocol::socket> ConnectGrpc() {
    std::array<int, 2> pair{};
    if (handler_ == nullptr) return std::nullopt;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair.data()) != 0) {
      CloseMostSilent();
      return std::nullopt;
    }
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &kPipeBytes, sizeof(kPipeBytes));
    stream_protocol::socket server(io_, stream_protocol(), pair[0]);
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.listener_fd = acceptor_.native_handle();
    parameters.fd = pair[1];
    handler_->HandleNewConnection(&parameters);
    return server;
  }

  void StartRelay(tcp::socket client, const ClientAddress& address) {
    error_code ignored;
    client.set_option(tcp::no_delay(true), ignored);
    Relay::Callbacks callbacks;
    auto used = std::make_shared<bool>(false);
    callbacks.connect = [this, used] {
      *used = true;
      return ConnectGrpc();
    };
    callbacks.reclaim = [this](const Relay& relay) { return CloseLargest(relay); };
    callbacks.insecure = [this] { options_.tls->CountFailedHandshake(/*grpc=*/true); };
    callbacks.dropped = [this, address](const Relay&, const absl::Status& reason,
                                        Relay::Cause cause) {
      counters_.dropped.fetch_add(1);
      if (cause == Relay::Cause::kFlood) {
        pauses_.Pause(address, std::chrono::steady_clock::now());
      }
      LogWarning("grpc", Concat("closed a connection: ", std::string(reason.message())));
    };
    callbacks.ended = [this](Relay& relay) { Forget(relay); };
    auto relay = std::make_shared<Relay>(
        std::move(client), options_.tls != nullptr ? options_.tls->grpc() : ConnectionTls{},
        FrameGuard(options_.frames, options_.memory, std::chrono::steady_clock::now()),
        std::move(callbacks));
    relays_.emplace(relay.get(), Open{relay, address, used});
    clients_.Add(address);
    counters_.open = static_cast<int64_t>(relays_.size());
    relay->Start();
  }

  // Closes the connection, of `client` if that is not null, that has been silent for longest, if
  // that is at least for kSilent. Returns whether there was one.
  bool CloseMostSilent(const ClientAddress* client = nullptr) {
    std::shared_ptr<Relay> most;
    for (const auto& [key, open] : relays_) {
      const auto& relay = open.relay;
      if (relay->closed() || (client != nullptr && open.client != *client)) continue;
      if (most == nullptr || relay->last_used() < most->last_used()) most = relay;
    }
    if (most == nullptr) return false;
    if (std::chrono::steady_clock::now() - most->last_used() < kSilent) return false;
    most->Close();
    return true;
  }

  // Closes the connection that holds most memory, unless that is `asking`.
  bool CloseLargest(const Relay& asking) {
    std::shared_ptr<Relay> largest;
    for (const auto& [key, open] : relays_) {
      const auto& relay = open.relay;
      if (relay->closed()) continue;
      if (largest == nullptr || relay->held_bytes() > largest->held_bytes()) largest = relay;
    }
    if (largest == nullptr || largest->held_bytes() <= asking.held_bytes()) return false;
    largest->Drop(absl::ResourceExhaustedError(
                      "its calls hold the most memory, and the calls of others need some"),
                  Relay::Cause::kOther);
    return true;
  }

  void Forget(Relay& relay) {
    const auto found = relays_.find(&relay);
    const ClientAddress& client = found->second.client;
    clients_.Remove(client);
    if (!*found->second.used) {
      paces_.CountRefusal(client, std::chrono::steady_clock::now(),
                          relay.began_handshake() ? RefusalPace::kUnusedHandshake : 1);
    }
    relays_.erase(found);
    MutexLock lock(mutex_);
    counters_.open = static_cast<int64_t>(relays_.size());
    changed_.notify_all();
  }

  const ConnectionGateOptions options_;
  const ConnectionCounters counters_;
  asio::io_context io_{1};
  tcp::acceptor acceptor_;
  asio::steady_timer clock_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  int port_ = 0;
  bool stopped_ = false;
  std::thread thread_;

  struct Open {
    std::shared_ptr<Relay> relay;
    ClientAddress client;
    std::shared_ptr<bool> used;  // whether the client has sent something
  };

  // Used by the thread alone, once it runs.
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> handler_;
  std::unordered_map<const Relay*, Open> relays_;
  AddressCounter clients_;  // of relays_
  AddressPauses pauses_;    // after connections that were dropped because of their client
  AddressPaces paces_;      // after connections on which the client sent nothing
  bool closing_ = false;

  Mutex mutex_;
  std::condition_variable changed_;  // handler_ended_ or the number of open connections
  bool handler_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

ConnectionGate::ConnectionGate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ConnectionGate::~ConnectionGate() = default;

Result<std::unique_ptr<ConnectionGate>> ConnectionGate::Listen(const ConnectionGateOptions& options,
                                                               const ConnectionCounters& counters) {
  auto impl = std::make_unique<Impl>(options, counters);
  MOESERVE_RETURN_IF_ERROR(impl->Listen());
  return std::unique_ptr<ConnectionGate>(new ConnectionGate(std::move(impl)));
}

int ConnectionGate::port() const { return impl_->port(); }
void ConnectionGate::Start(
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  impl_->Start(std::move(acceptor));
}
void ConnectionGate::Stop() { impl_->Stop(); }
void ConnectionGate::Close(std::chrono::milliseconds grace) { impl_->Close(grace); }

}  // namespace moeserve::server::rpc
