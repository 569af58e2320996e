#include "server/bench/load_test/http_call.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error_text.h"

namespace moeserve::server::load {
namespace {

constexpr size_t kMaxHeadBytes = 32 << 10;
constexpr size_t kMaxBodyBytes = 4 << 20;  // for responses that are not event streams

}  // namespace

void Answer::OnHead(const beast::http::response_header<>& head) {
  status = static_cast<int>(head.result_int());
  const auto type = head[beast::http::field::content_type];
  event_stream = status == 200 && type.starts_with("text/event-stream");
  const auto retry = head[beast::http::field::retry_after];
  double seconds = 0.0;
  const auto parsed = std::from_chars(retry.data(), retry.data() + retry.size(), seconds);
  if (parsed.ec == std::errc() && seconds >= 0.0 && seconds < 1e9) retry_after = seconds;
}

void Answer::OnBody(std::string_view bytes) {
  if (!event_stream) {
    body.append(bytes.substr(0, kMaxBodyBytes - std::min(kMaxBodyBytes, body.size())));
    return;
  }
  stream.Feed(bytes);
  arrivals.insert(arrivals.end(), static_cast<size_t>(stream.new_arrivals()), now);
}

AnswerParser::AnswerParser(Call& call) : call_(call) {
  parser_.get().body() = &call.answer;
  parser_.eager(true);
  parser_.header_limit(kMaxHeadBytes);
  parser_.body_limit(boost::none);
}

void AnswerParser::Parse(double now) {
  call_.answer.now = now;
  beast::flat_buffer& buffer = call_.connection->buffer;
  while (!done() && buffer.size() > 0) {
    error_code error;
    const size_t used = parser_.put(buffer.data(), error);
    buffer.consume(used);
    // The body reader handles the head. For a response without a body, the parser does not
    // construct the reader, so the head is handled here.
    if (parser_.is_header_done() && call_.answer.status == 0) {
      call_.answer.OnHead(parser_.get());
    }
    if (error == beast::http::error::need_more && buffer.size() <= 2 * kMaxHeadBytes) return;
    if (error) {
      call_.failure = "malformed HTTP response";
      return;
    }
    if (used == 0) return;
  }
  call_.surplus = done() && buffer.size() > 0;
}

void AnswerParser::ParseEnd() {
  error_code error;
  if (parser_.got_some()) parser_.put_eof(error);
  if (error || !done()) call_.failure = "connection closed";
}

void Judge(Call& call) {
  RequestResult& result = call.result;
  const Answer& answer = call.answer;
  const CompletionStream& stream = answer.stream;
  result.arrivals = std::move(call.answer.arrivals);
  result.prompt_tokens = stream.prompt_tokens().value_or(result.prompt_tokens);
  result.output_tokens = stream.output_tokens().value_or(stream.arrivals());
  result.retry_after = answer.retry_after;
  result.duplicate = stream.duplicate() || call.surplus;
  const bool whole = call.failure.empty();
  if (call.cut_off && !whole) {
    result.error = "cut off";
    result.cut_off = true;
  } else if (!stream.error().empty()) {
    result.error = stream.error();
    result.answered = true;
  } else if (call.timed_out && !whole) {
    result.error = answer.status == 0 ? "timeout before an answer" : "timeout";
  } else if (!whole) {
    result.error = call.failure;
    result.answered = stream.done();
  } else if (answer.status != 200) {
    result.error = Concat(answer.status, ' ', ErrorCode(answer.body));
    result.refused = true;
    result.answered = true;
  } else if (!answer.event_stream) {
    result.error = "200 without an event stream";
    result.answered = true;
  } else if (!stream.done()) {
    result.error = "truncated stream";
  } else {
    result.answered = true;
  }
}

}  // namespace moeserve::server::load
