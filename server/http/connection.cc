#include "server/http/connection.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <functional>
#include <utility>

#include "base/message.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/http/deferred_response.h"
#include "server/http/error_response.h"
#include "server/http/head_check.h"
#include "server/http/response_head.h"
#include "server/http/socket_state.h"
#include "server/keys/api_key.h"

namespace moeserve::server::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;
using BodyParser = beast::http::request_parser<beast::http::string_body>;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);

// Larger bodies are parsed and tokenized on the work pool.
constexpr size_t kSmallBody = 16 << 10;
// Limit on the bytes of later requests that are read while a response is pending.
constexpr size_t kMaxPipelined = 64 << 10;
// Limit on the line that starts a chunk.
constexpr size_t kMaxChunkLine = 8 << 10;

std::string_view View(beast::string_view text) { return {text.data(), text.size()}; }

std::chrono::nanoseconds Chrono(absl::Duration duration) {
  return absl::ToChronoNanoseconds(duration);
}

void AppendRateHeaders(const Request& request, ApiKey::Headers& headers) {
  if (request.key == nullptr) return;
  for (auto& header : request.key->RateHeaders()) headers.push_back(std::move(header));
}

// Charges output that waits until the client has read it, unless it is so small that it does not
// matter.
absl::Status ChargeOutput(size_t bytes, MemoryCharge& charge) {
  return bytes > kSmallBody ? charge.Add(bytes, ChargeFor::kRunningRequest) : absl::OkStatus();
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

Response BodyError(const error_code& error) {
  Response response = error == beast::http::error::body_limit
                          ? ProtocolError(413, "body_too_large", "the body is too large")
                          : ProtocolError(400, "invalid_value", "the body's framing is malformed");
  response.close = true;
  return response;
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket,
                       std::shared_ptr<ConnectionEnvironment> environment, bool reserved)
    : socket_(std::move(socket)),
      environment_(std::move(environment)),
      client_(PeerAddress(socket_)),
      timeout_timer_(socket_.get_executor()),
      reserved_(reserved),
      event_timer_(socket_.get_executor()) {
  environment_->metrics->http_connections.fetch_add(1);
  error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  // A larger send buffer in the kernel would hide that a client reads slowly.
  socket_.set_option(asio::socket_base::send_buffer_size(128 << 10), ignored);
}

Connection::~Connection() { environment_->metrics->http_connections.fetch_sub(1); }

void Connection::Close() {
  closing_ = true;
  error_code ignored;
  socket_.close(ignored);
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
    if (self->writing_ && self->DrainedSome()) {
      self->write_progress_ = std::chrono::steady_clock::now();
      self->Arm(self->environment_->limits.write_stall_timeout);
      return;
    }
    if (self->writing_) {
      const absl::Duration left =
          self->StallLimit() -
          absl::FromChrono(std::chrono::steady_clock::now() - self->write_progress_);
      if (left > absl::ZeroDuration()) {
        self->Arm(std::min(left, self->environment_->limits.write_stall_timeout));
        return;
      }
    }
    self->timed_out_ = true;
    error_code ignored;
    self->socket_.cancel(ignored);
  });
}

void Connection::Disarm() {
  ++timeout_generation_;
  timeout_timer_.cancel();
}

int Connection::Unsent() { return UnsentBytes(socket_.native_handle()); }

absl::Duration Connection::StallLimit() {
  const HttpLimits& limits = environment_->limits;
  // While its receive buffer is full, a client acknowledges nothing, and it opens its window again
  // only when it has read a good part of the buffer. The buffer holds at most what the client has
  // acknowledged so far.
  const uint64_t most = limits.max_receive_buffer;
  const uint64_t acknowledged =
      std::min(most, AcknowledgedBytes(socket_.native_handle()).value_or(most));
  return limits.write_stall_timeout +
         absl::Seconds(static_cast<double>(acknowledged) /
                       static_cast<double>(limits.min_read_bytes_per_second));
}

bool Connection::DrainedSome() {
  // Compare the unsent bytes instead of waiting until the socket is writable: it becomes writable
  // only when a good part of its send buffer is free, long after the client has read the first
  // byte.
  const int before = std::exchange(unsent_, Unsent());
  return unsent_ < before;
}

asio::awaitable<bool> Connection::ReadMore() {
  char chunk[16 << 10];
  const auto [error, count] = co_await socket_.async_read_some(asio::buffer(chunk), kAwait);
  buffer_.append(chunk, count);
  co_return !error;
}

asio::awaitable<bool> Connection::Write(std::string_view data) {
  writing_ = true;
  error_code error;
  while (!data.empty() && !error) {
    // The time without progress is limited, not the total time: a slow but steady client is served.
    unsent_ = Unsent();
    write_progress_ = std::chrono::steady_clock::now();
    Arm(environment_->limits.write_stall_timeout);
    const auto [result, count] =
        co_await socket_.async_write_some(asio::buffer(data.data(), data.size()), kAwait);
    Disarm();
    response_bytes_ += static_cast<int64_t>(count);
    data.remove_prefix(count);
    error = result;
  }
  writing_ = false;
  co_return !error;
}

asio::awaitable<bool> Connection::WriteResponse(const Head& head, const Response& response) {
  // A client can read slowly, and many clients can ask for the same large document.
  MemoryCharge charge(environment_->memory);
  if (const absl::Status status = ChargeOutput(2 * response.body.size(), charge); !status.ok()) {
    const Response refusal = ErrorResponse(status);
    const bool written = co_await WriteResponse(head, refusal);
    co_return written;
  }
  ResponseHead out;
  out.status = response.status;
  out.content_type = response.content_type;
  out.headers = response.headers;
  AppendRateHeaders(head.request, out.headers);
  out.request_id = head.request.request_id;
  out.content_length = response.body.size();
  out.keep_alive = head.keep_alive;
  out.http_1_0 = head.http_1_0;
  std::string data = SerializeHead(out);
  if (!head.head_only) data += response.body;
  const bool written = co_await Write(data);
  co_return written;
}

asio::awaitable<void> Connection::LingeringClose() {
  // Closing a socket with unread input would reset the connection, and the client could lose the
  // response.
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  Arm(absl::Seconds(2));
  size_t total = 0;
  constexpr size_t kMaxDiscarded = 1 << 20;
  while (total < kMaxDiscarded) {
    buffer_.clear();
    const bool more = co_await ReadMore();
    if (!more) break;
    total += buffer_.size();
  }
  Disarm();
  Close();
}

asio::awaitable<void> Connection::RefuseAndClose(Head& head, const Response& response) {
  head.keep_alive = false;
  co_await WriteResponse(head, response);
  Finish(head, response.status);
  co_await LingeringClose();
}

void Connection::Observe(Head& head) {
  const Request& request = head.request;
  head.request.record = environment_->observer->Begin({.protocol = "http",
                                                       .request_id = request.request_id,
                                                       .method = request.method,
                                                       .path = request.path,
                                                       .client = client_,
                                                       .time = request_start_},
                                                      head.traceparent);
}

void Connection::Finish(Head& head, int status) {
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
  while (!closing_) {
    const bool again = co_await ServeOne();
    if (!again) break;
  }
  Disarm();
  Close();
}

asio::awaitable<std::optional<size_t>> Connection::ReadHead() {
  idle_ = true;
  const HttpLimits& limits = environment_->limits;
  bool begun = false;
  Arm(limits.keep_alive_timeout);
  while (true) {
    // Empty lines before a request are allowed. The header timeout limits how long a client can
    // send them.
    while (buffer_.starts_with("\r\n")) buffer_.erase(0, 2);
    if (!buffer_.empty() && buffer_ != "\r" && !begun) {
      begun = true;
      idle_ = false;
      response_bytes_ = 0;
      request_start_ = std::chrono::steady_clock::now();
      Arm(limits.header_timeout);
    }
    const size_t end = buffer_.find("\r\n\r\n");
    std::optional<Response> refusal =
        end == std::string::npos ? CheckPartialHead(buffer_, limits)
                                 : CheckHead(std::string_view(buffer_).substr(0, end + 4), limits);
    Head head;
    head.request.request_id = NewRequestId();
    if (refusal) {
      Disarm();
      co_await RefuseAndClose(head, *refusal);
      co_return std::nullopt;
    }
    if (end != std::string::npos) {
      Disarm();
      co_return end + 4;
    }
    const bool more = co_await ReadMore();
    if (more) continue;
    if (timed_out_ && begun) {
      refusal = ProtocolError(408, "request_timeout", "the request came too slowly");
      co_await RefuseAndClose(head, *refusal);
    }
    co_return std::nullopt;
  }
}

// Parses one request and enforces the limits on its body.
struct Connection::Parser {
  explicit Parser(const HttpLimits& limits)
      : on_chunk([this, &limits](uint64_t, beast::string_view extensions, error_code& error) {
          extension_bytes += extensions.size();
          if (++chunks > limits.max_chunks || extension_bytes > limits.max_chunk_extension_bytes) {
            error = beast::http::error::bad_chunk;
          }
        }) {
    message.header_limit(
        static_cast<uint32_t>(limits.max_line_bytes + limits.max_header_bytes + 1024));
    message.body_limit(limits.max_body_bytes);
    message.on_chunk_header(on_chunk);
  }
  Parser(const Parser&) = delete;
  Parser& operator=(const Parser&) = delete;

  // Parses the first `size` bytes of `buffer` as far as they form complete parts of the request,
  // and removes the parsed bytes. Returns OK if more bytes are needed.
  error_code Put(std::string& buffer, size_t size) {
    error_code error;
    const size_t used = message.put(asio::buffer(buffer.data(), size), error);
    buffer.erase(0, used);
    return error == beast::http::error::need_more ? error_code() : error;
  }
  bool expects_body() const {
    return !message.is_done() && (message.chunked() || message.content_length().value_or(0) > 0);
  }

  BodyParser message;
  int chunks = 0;
  size_t extension_bytes = 0;
  // Called by `message`, which keeps a reference to this member while it parses.
  std::function<void(uint64_t, beast::string_view, error_code&)> on_chunk;
};

void Connection::FillHead(const Parser& parser, Head& head) {
  if (!parser.message.is_header_done()) return;
  const auto& message = parser.message.get();
  head.keep_alive = parser.message.keep_alive();
  head.http_1_0 = message.version() == 10;
  Request& request = head.request;
  request.method = std::string(View(message.method_string()));
  request.request_id = ChooseRequestId(View(message["X-Request-Id"]));
  head.head_only = request.method == "HEAD";
  const std::string_view target = View(message.target());
  request.path = std::string(target.substr(0, target.find('?')));
  if (request.path.size() < target.size()) {
    request.query = std::string(target.substr(request.path.size() + 1));
  }
  using beast::http::field;
  request.content_type = std::string(View(message[field::content_type]));
  request.content_encoding = std::string(View(message[field::content_encoding]));
  request.authorization = std::string(View(message[field::authorization]));
  request.accept = std::string(View(message[field::accept]));
  request.if_none_match = std::string(View(message[field::if_none_match]));
  if (message.count("traceparent") == 1) head.traceparent = View(message["traceparent"]);
}

asio::awaitable<bool> Connection::ServeOne() {
  const std::optional<size_t> head_size = co_await ReadHead();
  if (!head_size) co_return false;

  Head head;
  head.request.request_id = NewRequestId();
  Parser parser(environment_->limits);
  const error_code error = parser.Put(buffer_, *head_size);
  FillHead(parser, head);
  Observe(head);
  if (error) {
    const Response answer = BodyError(error);
    co_await RefuseAndClose(head, answer);
    co_return false;
  }

  std::optional<Response> refusal = environment_->router->CheckBeforeBody(head.request);
  if (!refusal && reserved_ && !environment_->router->ForOperators(head.request)) {
    refusal = ProtocolError(503, "too_many_connections", "the server has too many connections");
    refusal->close = true;
    refusal->headers.emplace_back("Retry-After", "1");
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
  head.request.body = std::move(parser.message.get().body());
  head.request_bytes = static_cast<int64_t>(head.request.body.size());
  waiting_ = false;
  const bool again = co_await Serve(head);
  waiting_ = true;
  waiting_since_ = std::chrono::steady_clock::now();
  co_return again;
}

asio::awaitable<bool> Connection::ReadBody(Parser& parser, Head& head) {
  const auto expect = parser.message.get()[beast::http::field::expect];
  if (!expect.empty() && !parser.message.is_done()) {
    if (!beast::iequals(expect, "100-continue")) {
      const Response answer =
          ProtocolError(400, "invalid_value", "only Expect: 100-continue is understood");
      co_await RefuseAndClose(head, answer);
      co_return false;
    }
    const bool written = co_await Write("HTTP/1.1 100 Continue\r\n\r\n");
    if (!written) co_return false;
  }

  parser.message.eager(true);
  head.request.memory = std::make_shared<MemoryCharge>(environment_->memory);
  const HttpLimits& limits = environment_->limits;
  const auto began = std::chrono::steady_clock::now();
  size_t received = 0;
  while (!parser.message.is_done()) {
    received += buffer_.size();
    const absl::Status charged = co_await ChargeBody(parser, *head.request.memory, received);
    if (!charged.ok()) {
      const Response answer = ErrorResponse(charged);
      co_await RefuseAndClose(head, answer);
      co_return false;
    }
    if (!buffer_.empty()) {
      error_code error = parser.Put(buffer_, buffer_.size());
      if (parser.message.is_done() && !error) break;
      if (!error && buffer_.size() > kMaxChunkLine) error = beast::http::error::bad_chunk;
      if (error) {
        const Response answer = BodyError(error);
        co_await RefuseAndClose(head, answer);
        co_return false;
      }
    }
    const absl::Duration allowed =
        limits.body_idle_timeout +
        absl::Seconds(static_cast<double>(received) /
                      static_cast<double>(limits.min_body_bytes_per_second));
    const absl::Duration spent = absl::FromChrono(std::chrono::steady_clock::now() - began);
    Arm(std::clamp(allowed - spent, absl::ZeroDuration(), limits.body_idle_timeout));
    const size_t before = buffer_.size();
    const bool more = co_await ReadMore();
    Disarm();
    received -= before;  // the next pass counts the whole buffer
    if (more) continue;
    if (timed_out_) {
      const Response answer = ProtocolError(408, "request_timeout", "the body came too slowly");
      co_await RefuseAndClose(head, answer);
      co_return false;
    }
    Finish(head, 499);
    co_return false;
  }
  co_return true;
}

asio::awaitable<absl::Status> Connection::ChargeBody(const Parser& parser, MemoryCharge& charge,
                                                     size_t received) {
  constexpr size_t kStep = 64 << 10;
  constexpr int kTries = 20;
  // The string of a body of unknown length doubles its size when it is full.
  const size_t wanted = (parser.message.chunked() ? 3 : 1) * received;
  if (wanted <= charge.bytes()) co_return absl::OkStatus();
  const size_t more = (wanted - charge.bytes() + kStep - 1) / kStep * kStep;
  absl::Status status = charge.Add(more);
  for (int i = 0; i < kTries && !status.ok() && ApiCode(status) == "out_of_memory"; ++i) {
    environment_->reclaim();
    asio::steady_timer pause(socket_.get_executor(), std::chrono::milliseconds(10));
    co_await pause.async_wait(kAwait);
    status = charge.Add(more);
  }
  co_return status;
}

asio::awaitable<bool> Connection::Serve(Head& head) {
  // The callback holds a reference to the I/O context, because `wake` can be called after the
  // server is gone.
  head.request.wake = [weak = weak_from_this(), io = environment_->io] {
    asio::post(*io, [weak] {
      if (const auto self = weak.lock()) self->Wake();
    });
  };
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
        head.request.wake);
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

asio::awaitable<int> Connection::RunPending(Head& head, std::unique_ptr<PendingResponse> pending) {
  pending_ = pending.get();
  gone_ = stop_watching_ = half_closed_ = false;
  StartWatch();
  bool streaming = false;
  bool probed = false;
  bool done = false;
  bool failed = false;
  int status = 499;
  while (!done && !failed && !gone_) {
    woken_ = false;
    Progress progress = pending->Next();
    if (std::holds_alternative<Wait>(progress)) {
      const auto pause =
          streaming ? Chrono(environment_->limits.stream_comment_interval) : std::chrono::hours(1);
      event_timer_.expires_after(pause);
      bool silent = false;
      while (!woken_ && !gone_ && !silent && half_closed_ == probed) {
        const auto [error] = co_await event_timer_.async_wait(kAwait);
        silent = !error;
      }
      // A client that has closed its connection looks like one that still reads, until it answers
      // bytes from the server with a reset.
      const bool probe = half_closed_ && !probed && !woken_ && !gone_;
      probed = probed || probe;
      if (probe && !streaming) {
        if (head.http_1_0) {
          gone_ = true;  // HTTP/1.0 has no interim responses
        } else {
          const bool written = co_await Write("HTTP/1.1 102 Processing\r\n\r\n");
          failed = !written;
        }
        continue;
      }
      if ((silent || probe) && streaming) {
        progress = StreamPart{std::string(pending->KeepAliveText()), false};
      } else {
        continue;
      }
    }
    if (const Response* response = std::get_if<Response>(&progress)) {
      head.keep_alive = head.keep_alive && !response->close && !LastResponse();
      const bool written = co_await WriteResponse(head, *response);
      failed = !written;
      status = response->status;
      done = true;
      continue;
    }
    const StreamPart& part = std::get<StreamPart>(progress);
    std::string data;
    if (!streaming) {
      streaming = true;
      if (head.http_1_0 || LastResponse()) head.keep_alive = false;
      ResponseHead out = EventStreamHead();
      AppendRateHeaders(head.request, out.headers);
      out.request_id = head.request.request_id;
      out.keep_alive = head.keep_alive;
      out.http_1_0 = head.http_1_0;
      data = SerializeHead(out);
    }
    if (head.http_1_0) {
      data += part.data;
    } else {
      AppendChunk(part.data, data);
      if (part.last) data += kLastChunk;
    }
    MemoryCharge charge(environment_->memory);
    failed = !ChargeOutput(data.size(), charge).ok();
    if (failed) continue;
    const bool written = co_await Write(data);
    failed = !written;
    done = part.last;
    status = pending->FinalStatus();
  }
  // Destroying the pending response cancels its work if the client has disconnected.
  pending_ = nullptr;
  pending.reset();
  if (failed || (gone_ && !done)) {
    head.keep_alive = false;
    status = 499;
  }
  co_await StopWatch();
  co_return status;
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
    self->buffer_.append(self->watch_buffer_, count);
    if (self->stop_watching_) {
      self->event_timer_.cancel();
    } else if (error == asio::error::eof) {
      self->half_closed_ = true;
      self->event_timer_.cancel();
      self->WatchForReset();
    } else if (error) {
      self->ClientIsGone();
    } else if (self->buffer_.size() < kMaxPipelined) {
      self->StartWatch();
    } else {
      self->WatchForReset();
    }
  };
  socket_.async_read_some(asio::buffer(watch_buffer_),
                          asio::bind_cancellation_slot(watch_cancel_.slot(), received));
}

void Connection::WatchForReset() {
  watching_ = true;
  const auto ready = [self = shared_from_this()](error_code error) {
    self->watching_ = false;
    if (self->stop_watching_) {
      self->event_timer_.cancel();
    } else if (error || HasEnded(self->socket_.native_handle())) {
      self->ClientIsGone();
    }
    // Otherwise urgent data has come, and more of it would come at once: watch no longer.
  };
  socket_.async_wait(asio::socket_base::wait_error,
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
