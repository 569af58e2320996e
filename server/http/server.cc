#include "server/http/server.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <condition_variable>
#include <exception>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error_text.h"
#include "base/mutex.h"
#include "base/steady_clock.h"
#include "server/http/connection.h"
#include "server/logging/logging.h"

namespace moeserve::server::http {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr int kHandlerThreads = 3;
constexpr size_t kMaxWaitingHandlers = 256;
constexpr std::chrono::seconds kOldBody{5};
// How long the I/O thread waits after an exception that escaped, which is mostly a lack of memory.
constexpr std::chrono::milliseconds kFaultPause{10};
// How long Stop() waits for requests that are still arriving.
constexpr absl::Duration kUnfinishedRequest = absl::Seconds(5);

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const HttpServerOptions& options, const Router& router, Metrics& metrics,
       std::shared_ptr<MemoryBudget> memory)
      : environment_(std::make_shared<ConnectionEnvironment>()),
        io_(std::make_shared<asio::io_context>(1)),
        acceptor_(*io_),
        work_(asio::make_work_guard(*io_)),
        clients_(options.address_limit) {
    environment_->io = io_;
    environment_->pool = std::make_shared<WorkPool>(kHandlerThreads, kMaxWaitingHandlers);
    environment_->router = &router;
    environment_->metrics = &metrics;
    environment_->limits = options.limits;
    environment_->hosts = options.hosts;
    environment_->cors = options.cors;
    environment_->tls = options.tls;
    environment_->memory = std::move(memory);
    environment_->observer =
        options.observer != nullptr ? options.observer : std::make_shared<RequestObserver>();
    environment_->address_limit = options.address_limit;
    environment_->paces = AddressPaces(options.address_limit);
    environment_->reclaim = [this] { CloseLongestBody(); };
  }

  absl::Status Bind(const HttpServerOptions& options) {
    error_code error;
    const auto address =
        asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, error);
    if (error) {
      return absl::InvalidArgumentError(Concat(
          "the HTTP host must be a numeric address or localhost, found ", Quoted(options.host)));
    }
    const tcp::endpoint endpoint(address, static_cast<uint16_t>(options.port));
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) endpoint_ = acceptor_.local_endpoint(error);
    if (error) {
      return absl::UnavailableError(
          Concat("cannot listen on ", options.host, ':', options.port, ": ", error.message()));
    }
    return absl::OkStatus();
  }

  void Run() {
    StartAccepting();
    thread_ = std::thread([this] {
      while (!RunOnce()) {
      }
    });
  }

  void BeginDrain() { environment_->stopping = true; }

  void Stop(absl::Duration grace) {
    if (stopped_) return;
    stopped_ = true;
    BeginDrain();
    asio::post(*io_, [this] {
      error_code ignored;
      acceptor_.close(ignored);
      for (auto& [key, open] : connections_) {
        if (const auto connection = open.connection.lock()) connection->CloseWhenIdle();
      }
    });
    WaitForClosed(std::min(grace, kUnfinishedRequest));
    asio::post(*io_, [this] {
      for (auto& [key, open] : connections_) {
        const auto connection = open.connection.lock();
        if (connection != nullptr && connection->waiting()) connection->Close();
      }
    });
    WaitForClosed(grace - std::min(grace, kUnfinishedRequest));
    asio::post(*io_, [this] {
      for (auto& [key, open] : connections_) {
        if (const auto connection = open.connection.lock()) connection->Close();
      }
    });
    WaitForClosed(absl::Seconds(2));
    work_.reset();
    {
      // If no connection is open, the I/O thread ends by itself after the functions that are posted
      // to the I/O context.
      MutexLock lock(mutex_);
      if (open_ > 0) {
        ending_ = true;
        io_->stop();
      }
    }
    thread_.join();
    // A function posted to the I/O context that will never run may own a connection. The connection
    // owns the environment, which owns the I/O context. Releasing the context and the pool here
    // breaks that cycle.
    environment_->io.reset();
    environment_->pool.reset();
  }

  void WaitForHandlers(absl::Time deadline) {
    environment_->pool->WaitUntilIdle(ToSteadyTimePoint(deadline));
  }

  const tcp::endpoint& endpoint() const { return endpoint_; }

 private:
  // Runs the I/O context until it has nothing left to do or Stop() ends it; then returns true.
  // False if an exception or a lost wake-up has interrupted it.
  bool RunOnce() {
    // Handlers catch their exceptions; one that escapes, such as std::bad_alloc within Asio, must
    // not stop the other connections.
    try {
      io_->run();
      if (ending_ || !environment_->wake_lost.exchange(false)) return true;
      io_->restart();
      if (ending_) return true;
      Recover();
    } catch (const std::exception& error) {
      LogError("http", error.what());
      environment_->wake_lost = true;
      std::this_thread::sleep_for(kFaultPause);
      io_->stop();
    }
    return false;
  }

  // Puts right what a failed allocation may have left: wake-ups that are lost, connections whose
  // coroutine has ended without a call of its completion handler, and Accept().
  void Recover() {
    io_->poll();  // Asio destroys the frame of a coroutine in a handler of its own
    for (auto it = connections_.begin(); it != connections_.end();) {
      const auto next = std::next(it);
      const auto connection = it->second.connection.lock();
      if (!it->second.runs.expired()) {
        connection->Wake();
      } else {
        // Timers and reads that have not ended may keep the connection.
        if (connection != nullptr) connection->Fail();
        Ended(it->first);
      }
      it = next;
    }
    if (accepting_.expired() && acceptor_.is_open()) StartAccepting();
  }

  void StartAccepting() {
    // The coroutine's frame has the only other reference, and loses it however it ends.
    auto runs = std::make_shared<bool>();
    accepting_ = runs;
    asio::co_spawn(
        *io_, [this, runs = std::move(runs)] { return Accept(); },
        [this](const std::exception_ptr& error) {
          accepting_.reset();
          if (error) std::rethrow_exception(error);  // RunOnce() lets it start again
        });
  }

  // Waits at most for `timeout`, a finite time, until no connection is open.
  void WaitForClosed(absl::Duration timeout) {
    MutexLock lock(mutex_);
    all_closed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                         [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_ == 0; });
  }

  asio::awaitable<void> Accept() {
    while (acceptor_.is_open()) {
      auto [error, socket] = co_await acceptor_.async_accept(asio::as_tuple(asio::use_awaitable));
      if (error == asio::error::operation_aborted) break;
      if (error) {
        // For example, no file descriptors are left: try again a little later.
        MakeRoom();
        asio::steady_timer pause(*io_, std::chrono::milliseconds(50));
        co_await pause.async_wait(asio::as_tuple(asio::use_awaitable));
        continue;
      }
      const tcp::endpoint client = socket.remote_endpoint(error);
      if (error) continue;  // the connection has ended
      Admit(std::move(socket), ClientAddress(client.address()));
    }
  }

  // Serves the connection if there is room. Destroying the socket closes it.
  void Admit(tcp::socket socket, const ClientAddress& client) {
    Metrics::OverLimit& over_limit = environment_->metrics->http_over_limit;
    // Dropping the connections of a flood at once costs less than making their requests wait.
    if (environment_->paces.Flooding(client, std::chrono::steady_clock::now())) {
      over_limit.address.fetch_add(1);
      return;
    }
    if (clients_.Full(client)) {
      over_limit.address.fetch_add(1);
      if (!MakeRoom(&client)) return;
    }
    const HttpLimits& limits = environment_->limits;
    if (Serving() >= limits.max_connections) {
      over_limit.server.fetch_add(1);
      MakeRoom();
    }
    const int serving = Serving();
    if (serving >= limits.max_connections + limits.reserved_connections) return;
    Start(std::move(socket), client, serving >= limits.max_connections);
  }

  // Returns the number of connections that have not been closed to make room.
  int Serving() const { return static_cast<int>(connections_.size() - closed_for_room_.size()); }

  // Closes the connection, of `client` if that is not null, that has waited for its client for
  // longest. Connections whose request is being answered are left alone. Returns whether there was
  // one.
  bool MakeRoom(const ClientAddress* client = nullptr) {
    std::shared_ptr<Connection> longest;
    ClientAddress address;
    for (auto& [key, open] : connections_) {
      if (client != nullptr && open.client != *client) continue;
      auto connection = open.connection.lock();
      if (connection == nullptr || !connection->waiting_since()) continue;
      if (longest == nullptr || *connection->waiting_since() < *longest->waiting_since()) {
        longest = std::move(connection);
        address = open.client;
      }
    }
    if (longest == nullptr) return false;
    longest->Close();
    clients_.Remove(address);
    closed_for_room_.insert(longest.get());
    return true;
  }

  // Closes the connection whose body has been arriving for longest, if that is at least
  // kOldBody: it holds memory that another request could use.
  void CloseLongestBody() {
    std::shared_ptr<Connection> longest;
    for (auto& [key, open] : connections_) {
      auto connection = open.connection.lock();
      if (connection == nullptr || !connection->body_since()) continue;
      if (longest == nullptr || *connection->body_since() < *longest->body_since()) {
        longest = std::move(connection);
      }
    }
    if (longest == nullptr) return;
    if (std::chrono::steady_clock::now() - *longest->body_since() >= kOldBody) longest->Close();
  }

  void Start(tcp::socket socket, const ClientAddress& client, bool reserved) {
    auto connection =
        std::make_shared<Connection>(std::move(socket), client, environment_, reserved);
    const uint64_t key = next_key_++;
    auto runs = std::make_shared<bool>();
    clients_.Add(client);
    try {
      connections_.emplace(key, Open{connection, runs, connection.get(), client});
    } catch (...) {
      clients_.Remove(client);
      throw;
    }
    {
      MutexLock lock(mutex_);
      ++open_;
    }
    asio::co_spawn(
        *io_,
        // As parameters, they live as long as the frame.
        [connection, runs = std::move(runs)]() { return Serve(connection, runs); },
        [this, key](const std::exception_ptr& error) {
          if (error) Report(error);
          Ended(key);
        });
  }

  static asio::awaitable<void> Serve(std::shared_ptr<Connection> connection,
                                     std::shared_ptr<bool> runs) {
    (void)runs;
    co_await connection->Run();
  }

  void Ended(uint64_t key) {
    const auto it = connections_.find(key);
    if (it == connections_.end()) return;
    const Open open = std::move(it->second);
    connections_.erase(it);
    if (closed_for_room_.erase(open.id) == 0) clients_.Remove(open.client);
    MutexLock lock(mutex_);
    if (--open_ == 0) all_closed_.notify_all();
  }

  static void Report(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      LogError("http", e.what());
    }
  }

  const std::shared_ptr<ConnectionEnvironment> environment_;
  const std::shared_ptr<asio::io_context> io_;
  tcp::acceptor acceptor_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  tcp::endpoint endpoint_;
  std::thread thread_;
  bool stopped_ = false;
  std::atomic<bool> ending_{false};  // Stop() has stopped io_
  std::weak_ptr<bool> accepting_;    // expired unless Accept() runs

  struct Open {
    std::weak_ptr<Connection> connection;
    std::weak_ptr<bool> runs;  // expired unless its coroutine runs, which owns the connection
    const Connection* id = nullptr;
    ClientAddress client;
  };

  // The I/O thread alone uses these members.
  std::unordered_map<uint64_t, Open> connections_;
  uint64_t next_key_ = 0;
  // Connections that MakeRoom() closed and that have not ended yet.
  std::unordered_set<const Connection*> closed_for_room_;
  AddressCounter clients_;  // of the other connections

  Mutex mutex_;
  std::condition_variable all_closed_;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() { Stop(absl::ZeroDuration()); }

Result<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpServerOptions& options,
                                                      const Router& router, Metrics& metrics,
                                                      std::shared_ptr<MemoryBudget> memory) {
  auto impl = std::make_unique<Impl>(options, router, metrics, std::move(memory));
  MOESERVE_RETURN_IF_ERROR(impl->Bind(options));
  impl->Run();
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

std::string HttpServer::address() const {
  const tcp::endpoint& endpoint = impl_->endpoint();
  const std::string host = endpoint.address().to_string();
  return Concat(endpoint.address().is_v6() ? Concat('[', host, ']') : host, ':', port());
}

int HttpServer::port() const { return impl_->endpoint().port(); }

void HttpServer::WaitForHandlers(absl::Time deadline) { impl_->WaitForHandlers(deadline); }

void HttpServer::BeginDrain() { impl_->BeginDrain(); }

void HttpServer::Stop(absl::Duration grace) { impl_->Stop(grace); }

}  // namespace moeserve::server::http
