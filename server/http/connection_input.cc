// The part of a connection that reads requests.
#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/string.hpp>

#include "server/base/api_error.h"
#include "server/base/await.h"
#include "server/base/request_id.h"
#include "server/http/connection.h"
#include "server/http/encoding/content_coding.h"
#include "server/http/encoding/gzip.h"
#include "server/http/error_response.h"

// Depending on what it inlines, g++ 12 takes the release of a coroutine's frame for that of another
// allocation.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

namespace moeserve::server::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

// Bodies of more bytes leave room for smaller ones.
constexpr size_t kLargeBody = 64 << 10;

// Frees the body and its memory of the budget.
void ForgetBody(RequestHead& head) {
  head.request.body = std::string();
  head.request.memory->Release();
}

}  // namespace

// In this file every co_await is in its own statement, because g++ 12 miscompiles some larger
// expressions.

asio::awaitable<std::optional<size_t>> Connection::ReadHead() {
  idle_ = true;
  const HttpLimits& limits = environment_->limits;
  bool begun = false;
  Arm(limits.keep_alive_timeout);
  while (true) {
    // The header timeout limits how long a client can send empty lines.
    const HeadSearch found = FindHead(buffer_, limits);
    if (!buffer_.empty() && buffer_ != "\r" && !begun) {
      begun = true;
      idle_ = false;
      response_bytes_ = 0;
      request_start_ = std::chrono::steady_clock::now();
      Arm(limits.header_timeout);
    }
    Head head;
    head.request.request_id = NewRequestId();
    if (found.refusal) {
      Disarm();
      co_await WaitForTurn(head);
      co_await RefuseAndClose(head, *found.refusal);
      co_return std::nullopt;
    }
    if (found.size) {
      Disarm();
      co_return found.size;
    }
    const bool more = co_await ReadMore();
    if (more) continue;
    if (timed_out_ && begun) {
      const Response answer = ProtocolError(408, "request_timeout", "the request came too slowly");
      co_await RefuseAndClose(head, answer);
    }
    co_return std::nullopt;
  }
}

asio::awaitable<bool> Connection::ReadBody(RequestParser& parser, Head& head) {
  const std::string expect = parser.expect();
  if (!expect.empty() && !parser.is_done()) {
    if (!boost::beast::iequals(expect, "100-continue")) {
      const Response answer =
          ProtocolError(400, "invalid_value", "only Expect: 100-continue is understood");
      co_await RefuseAndClose(head, answer);
      co_return false;
    }
    const bool written = co_await Write("HTTP/1.1 100 Continue\r\n\r\n");
    if (!written) co_return false;
  }

  parser.TakeBodyInParts();
  head.request.memory = std::make_shared<MemoryCharge>(environment_->memory);
  const HttpLimits& limits = environment_->limits;
  const auto began = std::chrono::steady_clock::now();
  std::optional<GzipInflater> inflater;
  if (head.request.method == "POST" &&
      ParseContentEncoding(head.request.content_encoding) == ContentCoding::kGzip) {
    inflater.emplace(environment_->router->BodyLimit(head.request, limits.max_body_bytes));
  }
  size_t received = 0;
  while (!parser.is_done()) {
    received += buffer_.size();
    const size_t held = inflater ? buffer_.size() : received;
    const absl::Status charged =
        co_await ChargeBody(*head.request.memory, held, !inflater && parser.chunked());
    if (!charged.ok()) {
      const Response answer = ErrorResponse(charged);
      co_await RefuseAndClose(head, answer);
      co_return false;
    }
    if (!buffer_.empty()) {
      const error_code error = parser.PutBody(buffer_);
      std::optional<Response> refusal;
      if (error) {
        refusal = ParseErrorResponse(error);
      } else if (inflater) {
        const std::string part = parser.TakeBody();
        refusal = co_await InflateBody(part, *inflater, head);
      }
      if (refusal) {
        co_await RefuseAndClose(head, *refusal);
        co_return false;
      }
      if (parser.is_done()) break;
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
  if (!inflater) {
    head.request.body = parser.TakeBody();
    head.request_bytes = static_cast<int64_t>(head.request.body.size());
    co_return true;
  }
  if (!inflater->complete()) {
    const Response answer = ProtocolError(400, "invalid_value", "the gzip body ends too early");
    co_await RefuseAndClose(head, answer);
    co_return false;
  }
  head.request_bytes = static_cast<int64_t>(received - buffer_.size());
  head.request.memory->ReduceTo(head.request.body.capacity());
  co_return true;
}

asio::awaitable<std::optional<Response>> Connection::InflateBody(std::string_view part,
                                                                 GzipInflater& inflater,
                                                                 Head& head) {
  constexpr size_t kSlice = 32 << 10;
  std::string& body = head.request.body;
  Inflated result = Inflated::kPart;
  while (result == Inflated::kPart) {
    const absl::Status charged =
        co_await ChargeBody(*head.request.memory, body.size() + kSlice, /*grows=*/true);
    if (!charged.ok()) {
      ForgetBody(head);
      co_return ErrorResponse(charged);
    }
    result = inflater.Inflate(part, kSlice, body);
    // Let the other connections in.
    if (result == Inflated::kPart) {
      co_await asio::post(stream_.get_executor(), asio::use_awaitable);
    }
  }
  std::optional<Response> refusal;
  if (result == Inflated::kBad) {
    refusal = ProtocolError(400, "invalid_value", "the body is not valid gzip");
  } else if (result == Inflated::kTooLarge) {
    refusal = ProtocolError(413, "body_too_large", "the body is too large when it is inflated");
  }
  // The connection may wait for its client for some seconds before it closes.
  if (refusal) ForgetBody(head);
  co_return refusal;
}

asio::awaitable<absl::Status> Connection::ChargeBody(MemoryCharge& charge, size_t bytes,
                                                     bool grows) {
  constexpr size_t kStep = 64 << 10;
  constexpr int kTries = 20;
  // The string of a body of unknown length doubles its size when it is full.
  const size_t wanted = (grows ? 3 : 1) * bytes;
  if (wanted <= charge.bytes()) co_return absl::OkStatus();
  const size_t more = (wanted - charge.bytes() + kStep - 1) / kStep * kStep;
  const ChargeFor purpose = bytes > kLargeBody ? ChargeFor::kArriving : ChargeFor::kNewRequest;
  absl::Status status = charge.Add(more, purpose);
  for (int i = 0; i < kTries && !status.ok() && ApiCode(status) == "out_of_memory"; ++i) {
    environment_->reclaim();
    asio::steady_timer pause(stream_.get_executor(), std::chrono::milliseconds(10));
    co_await pause.async_wait(kAwait);
    status = charge.Add(more, purpose);
  }
  co_return status;
}

}  // namespace moeserve::server::http
