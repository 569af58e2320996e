// One client connection: reads requests, runs handlers, writes responses. Internal to
// http/server.cc.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/base/limits.h"
#include "server/base/memory_budget.h"
#include "server/base/work_pool.h"
#include "server/connections/address_limit.h"
#include "server/connections/address_paces.h"
#include "server/http/checks/cors.h"
#include "server/http/checks/host_check.h"
#include "server/http/encoding/gzip.h"
#include "server/http/request_parser.h"
#include "server/http/router.h"
#include "server/metrics/metrics.h"
#include "server/tls/client_stream.h"
#include "server/tls/tls_store.h"
#include "server/tracing/request_observer.h"

namespace moeserve::server::http {

// State that all connections share. Only `stopping` changes.
struct ConnectionEnvironment {
  std::shared_ptr<boost::asio::io_context> io;  // run by one thread
  std::shared_ptr<WorkPool> pool;               // runs handlers that take long
  const Router* router = nullptr;
  Metrics* metrics = nullptr;
  HttpLimits limits;
  HostCheck hosts;
  Cors cors;
  std::shared_ptr<MemoryBudget> memory;  // null: no limit
  std::shared_ptr<RequestObserver> observer;
  AddressLimit address_limit;
  AddressPaces paces{AddressLimit{}};  // used by the I/O thread alone
  TlsStore* tls = nullptr;             // null: no TLS
  // Closes a connection that holds memory without making progress, if there is one.
  std::function<void()> reclaim = [] {};
  // Set if Connection::Wake() could not be posted for lack of memory, just before `io` is stopped:
  // the thread that runs `io` then wakes all connections.
  std::atomic<bool> wake_lost{false};
  std::atomic<bool> stopping{false};
};

// All members run on the I/O thread.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // A `reserved` connection serves routes for operators only.
  Connection(boost::asio::ip::tcp::socket socket, const ClientAddress& address,
             std::shared_ptr<ConnectionEnvironment> environment, bool reserved);
  ~Connection();

  // Serves requests until the connection ends.
  boost::asio::awaitable<void> Run();

  // Continues the pending response, if there is one.
  void Wake();
  // Ends the connection after an exception has ended Run().
  void Fail();

  // Closes the connection, or if a response is pending, closes it after that response.
  void CloseWhenIdle();
  void Close();

  // Returns since when the connection has been waiting for a request, or for the rest of one;
  // nullopt if a request is being answered. The server closes the one that has waited for longest
  // if it needs room.
  std::optional<std::chrono::steady_clock::time_point> waiting_since() const {
    return waiting_ && !closing_ ? std::optional(waiting_since_) : std::nullopt;
  }

  // Returns whether no request is being answered.
  bool waiting() const { return waiting_; }

  // Returns since when the body of a request has been arriving; nullopt if none is.
  std::optional<std::chrono::steady_clock::time_point> body_since() const {
    return closing_ ? std::nullopt : body_since_;
  }

 private:
  using Head = RequestHead;

  // Those of these functions that return a bool return false if the connection must be closed.
  boost::asio::awaitable<bool> Secure();  // the TLS handshake, if there is one
  boost::asio::awaitable<bool> ServeOne();
  boost::asio::awaitable<bool> ReadBody(RequestParser& parser, Head& head);
  // Inflates a part of a body, which has been parsed, into the request's body. Returns the response
  // to a request that is refused; else nullopt.
  boost::asio::awaitable<std::optional<Response>> InflateBody(std::string_view part,
                                                              GzipInflater& inflater, Head& head);
  // Charges for a body of `bytes`, before it grows to that size. If `grows`, its size was not known
  // in advance. If there is no memory, waits a little for what ConnectionEnvironment::reclaim()
  // frees.
  boost::asio::awaitable<absl::Status> ChargeBody(MemoryCharge& charge, size_t bytes, bool grows);
  // Reads until buffer_ holds the head of the next request, and returns the size of that head;
  // nullopt if the connection must be closed.
  boost::asio::awaitable<std::optional<size_t>> ReadHead();
  // Waits for the turn of a client whose requests were refused (RefusalPace). The client is the
  // key, or without one the address.
  boost::asio::awaitable<void> WaitForTurn(const Head& head);
  ClientId ClientOf(const Request& request) const;
  boost::asio::awaitable<bool> Serve(Head& head);
  boost::asio::awaitable<int> RunPending(Head& head, std::unique_ptr<PendingResponse> pending);

  boost::asio::awaitable<bool> ReadMore();
  boost::asio::awaitable<bool> Write(std::string_view data);
  boost::asio::awaitable<bool> WriteResponse(const Head& head, const Response& response);
  boost::asio::awaitable<std::string> Deflated(const std::string& body);
  // Appends the headers that every response to `request` has, also a stream.
  void AppendSharedHeaders(const Request& request,
                           std::vector<std::pair<std::string, std::string>>& headers) const;
  boost::asio::awaitable<void> RefuseAndClose(Head& head, const Response& response);
  boost::asio::awaitable<void> LingeringClose();

  void Arm(absl::Duration timeout);
  void Disarm();
  int Unsent();        // bytes that the client's kernel has not acknowledged
  bool DrainedSome();  // whether Unsent() fell since the last call or the start of a write
  // Called while a write makes no progress for its time: starts the timer again and returns true if
  // the client has more time.
  bool WaitsLonger();
  void StartWatch();
  void Watched(boost::system::error_code error, size_t count);  // what StartWatch() waited for
  void WatchForReset();
  void ClientIsGone();
  boost::asio::awaitable<void> StopWatch();
  // Begins the record of the request, as far as its head is known.
  void Observe(Head& head);
  void Finish(Head& head, int status);
  void CountRefusal(const ApiKey* key);
  // Returns whether the connection must be closed after the current response.
  bool LastResponse() const { return closing_ || environment_->stopping; }
  // Returns for how long a client may acknowledge nothing (HttpLimits::min_read_bytes_per_second).
  absl::Duration StallLimit();

  ClientStream stream_;
  const std::shared_ptr<ConnectionEnvironment> environment_;
  const std::string client_;  // its address and port
  const ClientAddress address_;
  boost::asio::steady_timer timeout_timer_;
  uint64_t timeout_generation_ = 0;
  bool timed_out_ = false;
  int unsent_ = 0;
  std::chrono::steady_clock::time_point write_progress_;  // of the write that runs

  std::string buffer_;  // bytes received and not yet consumed
  bool idle_ = true;    // true between requests
  bool closing_ = false;
  const bool reserved_;
  bool used_ = false;  // whether a request has ended
  bool waiting_ = true;
  std::chrono::steady_clock::time_point waiting_since_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point request_start_;
  int64_t response_bytes_ = 0;  // sent since request_start_
  std::optional<std::chrono::steady_clock::time_point> body_since_;

  // While a response is pending, the connection keeps reading the socket to notice that the client
  // has disconnected.
  boost::asio::steady_timer event_timer_;
  boost::asio::cancellation_signal watch_cancel_;
  char watch_buffer_[1024];
  bool watching_ = false;
  bool stop_watching_ = false;
  bool gone_ = false;
  bool half_closed_ = false;  // the client has said that it sends nothing more
  bool woken_ = false;
  bool writing_ = false;
  PendingResponse* pending_ = nullptr;
};

}  // namespace moeserve::server::http
