#include "server/http/connection.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <functional>
#include <utility>

#include "base/error_text.h"
#include "server/base/await.h"
#include "server/base/request_id.h"
#include "server/http/deferred_response.h"
#include "server/http/error_response.h"
#include "server/http/response_head.h"
#include "server/http/socket_state.h"
#include "server/keys/api_key.h"
#include "server/logging/logging.h"

// Depending on what it inlines, g++ 12 takes the release of a coroutine's frame for that of another
// allocation.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

namespace moeserve::server::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

// Larger bodies are parsed and tokenized on the work pool.
constexpr size_t kSmallBody = 16 << 10;
// Limit on the bytes of later requests that are read while a response is pending.
constexpr size_t kMaxPipelined = 64 << 10;
// The answer if there is no memory to make one.
constexpr std::string_view kFaultHead =
    "HTTP/1.1 503 Service Unavailable\r\n"
    "Content-Type: application/json\r\n"
    "Content-Length: 95\r\n"
    "Connection: close\r\n"
    "\r\n";
constexpr std::string_view kFaultBody =
    R"({"error":{"message":"out of memory","type":"server_error","code":"out_of_memory","param":null}})";
static_assert(kFaultBody.size() == 95, "the length that the head names");

std::chrono::nanoseconds Chrono(absl::Duration duration) {
  return absl::ToChronoNanoseconds(duration);
}

// Returns "ADDRESS:PORT"; empty if the client has already disconnected.
std::string PeerAddress(const asio::ip::tcp::socket& socket) {
  error_code error;
  const asio::ip::tcp::endpoint peer = socket.remote_endpoint(error);
  if (error) return {};
  const std::string address = peer.address().to_string();
  const bool bracket = peer.address().is_v6();
  return Concat(bracket ? "[" : "", address, bracket ? "]:" : ":", peer.port());
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, const ClientAddress& address,
                       std::shared_ptr<ConnectionEnvironment> environment, bool reserved)
    : stream_(std::move(socket),
              environment->tls != nullptr ? environment->tls->http() : ConnectionTls{}),
      environment_(std::move(environment)),
      client_(PeerAddress(stream_.socket())),
      address_(address),
      timeout_timer_(stream_.get_executor()),
      reserved_(reserved),
      event_timer_(stream_.get_executor()) {
  environment_->metrics->http_connections.fetch_add(1);
  error_code ignored;
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
  // A larger send buffer in the kernel would hide that a client reads slowly.
  stream_.socket().set_option(asio::socket_base::send_buffer_size(128 << 10), ignored);
}

Connection::~Connection() { environment_->metrics->http_connections.fetch_sub(1); }

void Connection::Close() {
  closing_ = true;
  if (pending_ != nullptr) gone_ = true;
  event_timer_.cancel();
  error_code ignored;
  stream_.socket().close(ignored);
}

void Connection::CloseWhenIdle() {
  closing_ = true;
  if (idle_) Close();
}

void Connection::Arm(absl::Duration timeout) {
  timed_out_ = false;
  const uint64_t generation = ++timeout_generation_;
  timeout_timer_.expires_after(Chrono(timeout));
  timeout_timer_.async_wait([self = shared_from_this(), generation](error_code error) {
    if (error || generation != self->timeout_generation_) return;
    try {
      if (self->writing_ && self->WaitsLonger()) return;
    } catch (const std::exception& fault) {
      LogError("http", fault.what());  // without a timer, the client could stall for ever
    }
    self->timed_out_ = true;
    error_code ignored;
    self->stream_.socket().cancel(ignored);
  });
}

bool Connection::WaitsLonger() {
  const absl::Duration timeout = environment_->limits.write_stall_timeout;
  if (DrainedSome()) {
    write_progress_ = std::chrono::steady_clock::now();
    Arm(timeout);
    return true;
  }
  const absl::Duration left =
      StallLimit() - absl::FromChrono(std::chrono::steady_clock::now() - write_progress_);
  if (left <= absl::ZeroDuration()) return false;
  Arm(std::min(left, timeout));
  return true;
}

void Connection::Disarm() {
  ++timeout_generation_;
  timeout_timer_.cancel();
}

asio::awaitable<bool> Connection::ReadMore() {
  char chunk[16 << 10];
  const auto [error, count] = co_await stream_.async_read_some(asio::buffer(chunk), kAwait);
  buffer_.append(chunk, count);
  co_return !error;
}

void Connection::Observe(Head& head) {
  const Request& request = head.request;
  head.request.record = environment_->observer->Begin({.protocol = "http",
                                                       .request_id = request.request_id,
                                                       .method = request.method,
                                                       .path = request.path,
                                                       .client = client_,
                                                       .time = request_start_},
                                                      head.traceparent, head.tracestate);
}

void Connection::CountRefusal(const ApiKey* key) {
  if (key != nullptr) {
    key->CountRefusedRequest();
  } else {
    environment_->paces.CountRefusal(address_, std::chrono::steady_clock::now());
  }
}

void Connection::Finish(Head& head, int status) {
  used_ = true;
  // 499 says that the client has left, which costs no more than what it was served.
  if (status >= 400 && status < 499) CountRefusal(head.request.key.get());
  const Request& request = head.request;
  if (request.record == nullptr) Observe(head);
  const std::string& method = request.method;
  const bool known = method == "GET" || method == "POST" || method == "HEAD" || method == "OPTIONS";
  RequestEnd end;
  end.status = status;
  end.method = known ? std::string_view(method) : "other";
  end.route = environment_->router->Endpoint(request.path);
  end.key = KeyName(request.key.get());
  end.for_operators = environment_->router->ForOperators(request);
  end.failed = status >= 500;
  end.request_bytes = head.request_bytes;
  end.response_bytes = response_bytes_;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - request_start_).count();
  environment_->metrics->CountHttp(end.route, end.method, status, seconds);
  environment_->observer->End(*request.record, end);
}

asio::awaitable<void> Connection::Run() {
  // In this file every co_await is in its own statement, because g++ 12 miscompiles some larger
  // expressions.
  const bool secure = co_await Secure();
  bool again = secure;
  while (again && !closing_) {
    try {
      again = co_await ServeOne();
    } catch (const std::exception& error) {
      again = false;
      Fail();
      LogError("http", error.what());
    }
  }
  Disarm();
  // Otherwise the client could not tell the end of the last response from a cut connection.
  if (stream_.is_tls() && secure && !gone_ && stream_.socket().is_open()) stream_.EndOutput();
  if (!used_ && !environment_->stopping) {
    environment_->paces.CountRefusal(address_, std::chrono::steady_clock::now(),
                                     stream_.began_handshake() ? RefusalPace::kUnusedHandshake : 1);
  }
  Close();
}

void Connection::Fail() {
  pending_ = nullptr;  // the exception has destroyed it
  writing_ = false;
  // What has not sent anything of its answer gets one.
  if (!idle_ && response_bytes_ == 0) {
    stream_.WriteNow(kFaultHead);
    stream_.WriteNow(kFaultBody);
  }
  Disarm();
  Close();
}

asio::awaitable<bool> Connection::Secure() {
  if (!stream_.is_tls()) co_return true;
  idle_ = true;  // the drain need not wait for the handshake
  Arm(environment_->limits.header_timeout);
  const ClientStream::Greeting greeting = co_await stream_.Handshake();
  Disarm();
  idle_ = false;
  if (greeting == ClientStream::Greeting::kDone) co_return true;
  environment_->tls->CountFailedHandshake(/*grpc=*/false);
  if (greeting == ClientStream::Greeting::kPlain) {
    Response response = ProtocolError(400, "tls_required",
                                      "this port takes HTTPS only, and the client sent plain HTTP");
    ResponseHead head;
    head.status = response.status;
    head.content_type = response.content_type;
    head.content_length = response.body.size();
    head.keep_alive = false;
    stream_.WriteNow(SerializeHead(head) + response.body);
    co_await LingeringClose();
  }
  co_return false;
}

asio::awaitable<bool> Connection::ServeOne() {
  const std::optional<size_t> head_size = co_await ReadHead();
  if (!head_size) co_return false;

  Head head;
  head.request.request_id = NewRequestId();
  RequestParser parser(environment_->limits);
  const error_code error = parser.Put(buffer_, *head_size);
  parser.FillHead(head);
  Observe(head);
  if (error) {
    co_await WaitForTurn(head);
    const Response answer = ParseErrorResponse(error);
    co_await RefuseAndClose(head, answer);
    co_return false;
  }

  const bool for_operators = environment_->router->ForOperators(head.request);
  std::optional<Response> refusal;
  // Probes and Prometheus use the address of a container or a machine as the host.
  if (!for_operators) {
    refusal = environment_->hosts.Check(head.request, environment_->cors.Lists(head.request));
    if (!refusal && environment_->tls != nullptr && environment_->tls->requires_client() &&
        !stream_.has_client_certificate()) {
      refusal = ProtocolError(403, "client_certificate_required",
                              "this server asks its clients for a certificate (mutual TLS)");
    }
  }
  if (!refusal) refusal = environment_->router->CheckBeforeBody(head.request);
  if (!refusal && !parser.LimitBody(environment_->router->BodyLimit(
                      head.request, environment_->limits.max_body_bytes))) {
    refusal = ProtocolError(413, "body_too_large", "the body is too large");
  }
  if (!refusal && reserved_ && !for_operators) {
    refusal = ProtocolError(503, "too_many_connections", "the server has too many connections");
    refusal->close = true;
    refusal->headers.emplace_back("Retry-After", "1");
  }
  // Before the body is read, a wait holds no memory of the budget.
  if (!for_operators) co_await WaitForTurn(head);
  if (!stream_.socket().is_open()) {  // the server has closed it meanwhile to make room, or stops
    Finish(head, 499);
    co_return false;
  }
  if (refusal) {
    // The server does not read the refused request's body, so the connection cannot be used for
    // another request.
    if (parser.expects_body()) {
      co_await RefuseAndClose(head, *refusal);
      co_return false;
    }
    head.keep_alive = head.keep_alive && !LastResponse() && !refusal->close;
    const bool written = co_await WriteResponse(head, *refusal);
    Finish(head, refusal->status);
    co_return written&& head.keep_alive;
  }
  body_since_ = std::chrono::steady_clock::now();
  const bool complete = co_await ReadBody(parser, head);
  body_since_.reset();
  if (!complete) co_return false;
  waiting_ = false;
  const bool again = co_await Serve(head);
  waiting_ = true;
  waiting_since_ = std::chrono::steady_clock::now();
  co_return again;
}

asio::awaitable<void> Connection::WaitForTurn(const Head& head) {
  const auto now = std::chrono::steady_clock::now();
  const ApiKey* const key = head.request.key.get();
  const auto wait = key != nullptr ? key->Wait(now) : environment_->paces.WaitFrom(address_, now);
  if (wait == wait.zero() || closing_) co_return;
  event_timer_.expires_after(wait);
  co_await event_timer_.async_wait(kAwait);
}

ClientId Connection::ClientOf(const Request& request) const {
  // An address without a limit can stand for many clients.
  const ClientId id = request.key != nullptr ? std::hash<const ApiKey*>()(request.key.get())
                      : environment_->address_limit.AppliesTo(address_)
                          ? ClientAddress::Hash()(address_)
                          : std::hash<const Connection*>()(this);
  return std::max<ClientId>(id, 1);
}

asio::awaitable<bool> Connection::Serve(Head& head) {
  // The callback holds a reference to the I/O context, because `wake` can be called after the
  // server is gone.
  head.request.wake = [weak = weak_from_this(), io = environment_->io,
                       environment = std::weak_ptr(environment_)]() noexcept {
    try {
      asio::post(*io, [weak] {
        if (const auto self = weak.lock()) self->Wake();
      });
    } catch (const std::exception&) {
      if (const auto living = environment.lock()) {
        living->wake_lost = true;
        io->stop();
      }
    }
  };
  head.request.client = ClientOf(head.request);
  const Router& router = *environment_->router;
  std::optional<Handled> handled;
  if (head.request.body.size() <= kSmallBody && router.WorkOf(head.request) == Work::kQuick) {
    handled = router.Handle(head.request);
  } else {
    // The work pool runs this handler later, and not at all if the client has disconnected by then.
    std::string body = std::exchange(head.request.body, {});
    auto request = std::make_shared<Request>(head.request);
    request->body = std::move(body);
    handled = DeferredResponse::Start(
        *environment_->pool, [&router, request] { return router.Handle(*request); },
        head.request.wake, head.request.client);
    if (std::holds_alternative<Response>(*handled)) {
      environment_->metrics->CountRejected(Rejection::kQueueFull);
    }
  }
  head.request.body = std::string();
  head.request.memory.reset();

  int status = 0;
  if (Response* response = std::get_if<Response>(&*handled)) {
    head.keep_alive = head.keep_alive && !response->close && !LastResponse();
    status = response->status;
    const bool written = co_await WriteResponse(head, *response);
    if (!written) head.keep_alive = false;
  } else {
    auto pending = std::move(std::get<std::unique_ptr<PendingResponse>>(*handled));
    status = co_await RunPending(head, std::move(pending));
  }
  Finish(head, status);
  co_return head.keep_alive && !gone_;
}

void Connection::Wake() {
  woken_ = true;
  event_timer_.cancel();
  if (writing_ && pending_ != nullptr) pending_->CheckBacklog();
}

void Connection::StartWatch() {
  watching_ = true;
  const auto received = [self = shared_from_this()](error_code error, size_t count) {
    self->watching_ = false;
    try {
      self->Watched(error, count);
    } catch (const std::exception& fault) {
      self->watching_ = false;
      self->ClientIsGone();  // bytes of it may be lost
      LogError("http", fault.what());
    }
  };
  stream_.async_read_some(asio::buffer(watch_buffer_),
                          asio::bind_cancellation_slot(watch_cancel_.slot(), received));
}

void Connection::Watched(error_code error, size_t count) {
  buffer_.append(watch_buffer_, count);
  if (stop_watching_) {
    event_timer_.cancel();
  } else if (error == asio::error::eof) {
    half_closed_ = true;
    event_timer_.cancel();
    WatchForReset();
  } else if (error) {
    ClientIsGone();
  } else if (buffer_.size() < kMaxPipelined) {
    StartWatch();
  } else {
    WatchForReset();
  }
}

void Connection::WatchForReset() {
  watching_ = true;
  const auto ready = [self = shared_from_this()](error_code error) {
    self->watching_ = false;
    if (self->stop_watching_) {
      self->event_timer_.cancel();
    } else if (error || HasEnded(self->stream_.socket().native_handle())) {
      self->ClientIsGone();
    }
    // Otherwise urgent data has come, and more of it would come at once: watch no longer.
  };
  stream_.socket().async_wait(asio::socket_base::wait_error,
                              asio::bind_cancellation_slot(watch_cancel_.slot(), ready));
}

void Connection::ClientIsGone() {
  gone_ = true;
  event_timer_.cancel();
  // A write to a client that is gone cannot succeed.
  if (writing_) Close();
}

asio::awaitable<void> Connection::StopWatch() {
  stop_watching_ = true;
  watch_cancel_.emit(asio::cancellation_type::all);
  event_timer_.expires_at(asio::steady_timer::time_point::max());
  while (watching_) co_await event_timer_.async_wait(kAwait);
}

}  // namespace moeserve::server::http
