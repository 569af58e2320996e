// The part of a connection that reads requests.
#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/string.hpp>

#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/http/connection.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);

// Bodies of more bytes leave room for smaller ones.
constexpr size_t kLargeBody = 64 << 10;

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
  size_t received = 0;
  while (!parser.is_done()) {
    received += buffer_.size();
    const absl::Status charged = co_await ChargeBody(parser, *head.request.memory, received);
    if (!charged.ok()) {
      const Response answer = ErrorResponse(charged);
      co_await RefuseAndClose(head, answer);
      co_return false;
    }
    if (!buffer_.empty()) {
      const error_code error = parser.PutBody(buffer_);
      if (parser.is_done() && !error) break;
      if (error) {
        const Response answer = ParseErrorResponse(error);
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

asio::awaitable<absl::Status> Connection::ChargeBody(const RequestParser& parser,
                                                     MemoryCharge& charge, size_t received) {
  constexpr size_t kStep = 64 << 10;
  constexpr int kTries = 20;
  // The string of a body of unknown length doubles its size when it is full.
  const size_t wanted = (parser.chunked() ? 3 : 1) * received;
  if (wanted <= charge.bytes()) co_return absl::OkStatus();
  const size_t more = (wanted - charge.bytes() + kStep - 1) / kStep * kStep;
  const ChargeFor purpose = received > kLargeBody ? ChargeFor::kArriving : ChargeFor::kNewRequest;
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
