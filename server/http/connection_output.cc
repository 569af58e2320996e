// The part of a connection that writes responses.
#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "server/base/await.h"
#include "server/http/connection.h"
#include "server/http/encoding/content_coding.h"
#include "server/http/encoding/gzip.h"
#include "server/http/error_response.h"
#include "server/http/response_head.h"
#include "server/http/socket_state.h"
#include "server/keys/api_key.h"
#include "server/logging/logging.h"

namespace moeserve::server::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

// Output of fewer bytes is not charged.
constexpr size_t kSmallOutput = 16 << 10;

// Smaller bodies fit into one packet, which compression would not save.
constexpr size_t kWorthDeflating = 1 << 10;

std::chrono::nanoseconds ToChrono(absl::Duration duration) {
  return absl::ToChronoNanoseconds(duration);
}

// Charges output that waits until the client has read it, unless it is so small that it does not
// matter.
absl::Status ChargeOutput(size_t bytes, MemoryCharge& charge) {
  return bytes > kSmallOutput ? charge.Add(bytes, ChargeFor::kRunningRequest) : absl::OkStatus();
}

// Returns whether the body is deflated for clients that want that. A response 304 has no body, but
// the headers of the body that the client has.
bool IsWorthDeflating(const Response& response) {
  return IsCompressible(response.content_type) &&
         (response.body.size() >= kWorthDeflating || response.status == 304);
}

// Returns the next part of a response. If it throws: an error, or nothing if a stream has begun. A
// fault of one request must not leave its client without an end.
std::optional<Progress> NextOrError(PendingResponse& pending, bool streaming) {
  absl::Status fault;
  try {
    return pending.Next();
  } catch (const std::exception& error) {
    fault = absl::InternalError(error.what());
  }
  if (!streaming) return ErrorResponse(fault);
  LogError("http", std::string(fault.message()));
  return std::nullopt;
}

// Adds the headers of a deflated body.
void NameGzip(ResponseHead& head) {
  head.headers.emplace_back("Content-Encoding", kGzip);
  for (auto& [name, value] : head.headers) {
    // A strong tag stands for the same bytes.
    if (name == "ETag" && !value.starts_with("W/")) value.insert(0, "W/");
  }
}

}  // namespace

// In this file every co_await is in its own statement, because g++ 12 miscompiles some larger
// expressions.

int Connection::Unsent() { return UnsentBytes(stream_.socket().native_handle()); }

absl::Duration Connection::StallLimit() {
  const HttpLimits& limits = environment_->limits;
  // While its receive buffer is full, a client acknowledges nothing, and it opens its window again
  // only when it has read a good part of the buffer. The buffer holds at most what the client has
  // acknowledged so far.
  const uint64_t most = limits.max_receive_buffer;
  const uint64_t acknowledged =
      std::min(most, AcknowledgedBytes(stream_.socket().native_handle()).value_or(most));
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

asio::awaitable<bool> Connection::Write(std::string_view data) {
  writing_ = true;
  error_code error;
  while (!data.empty() && !error) {
    // The time without progress is limited, not the total time: a slow but steady client is served.
    unsent_ = Unsent();
    write_progress_ = std::chrono::steady_clock::now();
    Arm(environment_->limits.write_stall_timeout);
    const auto [result, count] =
        co_await stream_.async_write_some(asio::buffer(data.data(), data.size()), kAwait);
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
  std::string deflated;
  if (IsWorthDeflating(response)) {
    out.headers.emplace_back("Vary", "Accept-Encoding");
    if (!response.body.empty() && PrefersGzip(head.request.accept_encoding)) {
      deflated = co_await Deflated(response.body);
    }
  }
  const bool smaller = !deflated.empty() && deflated.size() < response.body.size();
  const std::string& body = smaller ? deflated : response.body;
  if (smaller) NameGzip(out);
  AppendSharedHeaders(head.request, out.headers);
  out.request_id = head.request.request_id;
  out.content_length = body.size();
  out.keep_alive = head.keep_alive;
  out.http_1_0 = head.http_1_0;
  std::string data = SerializeHead(out);
  if (!head.head_only) data += body;
  const bool written = co_await Write(data);
  co_return written;
}

asio::awaitable<std::string> Connection::Deflated(const std::string& body) {
  constexpr size_t kSlice = 64 << 10;
  GzipDeflater deflater;
  std::string out;
  for (std::string_view rest = body; !rest.empty();) {
    const std::string_view slice = rest.substr(0, kSlice);
    rest.remove_prefix(slice.size());
    deflater.Deflate(slice, rest.empty(), out);
    // Let the other connections in.
    if (!rest.empty()) co_await asio::post(stream_.get_executor(), asio::use_awaitable);
  }
  co_return out;
}

void Connection::AppendSharedHeaders(
    const Request& request, std::vector<std::pair<std::string, std::string>>& headers) const {
  if (request.record != nullptr && request.record->shows_trace()) {
    headers.emplace_back("traceparent", TraceParentHeader(request.record->trace()));
  }
  environment_->cors.AddHeaders(request, headers);
  if (request.key == nullptr) return;
  for (auto& header : request.key->RateHeaders()) headers.push_back(std::move(header));
}

asio::awaitable<void> Connection::LingeringClose() {
  // Closing a socket with unread input would reset the connection, and the client could lose the
  // response.
  stream_.EndOutput();
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
    std::optional<Progress> next = NextOrError(*pending, streaming);
    failed = !next;
    if (failed) continue;
    Progress progress = *std::move(next);
    if (std::holds_alternative<Wait>(progress)) {
      const auto pause = streaming ? ToChrono(environment_->limits.stream_comment_interval)
                                   : std::chrono::hours(1);
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
      ResponseHead out = StreamHead(pending->StreamType());
      AppendSharedHeaders(head.request, out.headers);
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

}  // namespace moeserve::server::http
