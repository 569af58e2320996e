#include "server/http/request_parser.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <string_view>

#include "server/base/request_id.h"
#include "server/http/checks/head_check.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {
namespace {

namespace beast = boost::beast;
using boost::system::error_code;

// Limit on the line that starts a chunk, and on the lines behind the last chunk together.
constexpr size_t kMaxChunkLine = 8 << 10;

std::string Text(beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

HeadSearch FindHead(std::string& buffer, const HttpLimits& limits) {
  size_t empty = 0;
  while (buffer.compare(empty, 2, "\r\n") == 0) empty += 2;
  buffer.erase(0, empty);
  HeadSearch out;
  const size_t end = buffer.find("\r\n\r\n");
  if (end == std::string::npos) {
    out.refusal = CheckPartialHead(buffer, limits);
    return out;
  }
  out.refusal = CheckHead(std::string_view(buffer).substr(0, end + 4), limits);
  if (!out.refusal) out.size = end + 4;
  return out;
}

RequestParser::RequestParser(const HttpLimits& limits)
    : on_chunk_([this, &limits](uint64_t, beast::string_view extensions, error_code& error) {
        extension_bytes_ += extensions.size();
        if (++chunks_ > limits.max_chunks || extension_bytes_ > limits.max_chunk_extension_bytes) {
          error = beast::http::error::bad_chunk;
        }
      }) {
  message_.header_limit(
      static_cast<uint32_t>(limits.max_line_bytes + limits.max_header_bytes + 1024));
  message_.body_limit(limits.max_body_bytes);
  message_.on_chunk_header(on_chunk_);
}

error_code RequestParser::Put(std::string& buffer, size_t size) {
  error_code error;
  const size_t used = message_.put(boost::asio::buffer(buffer.data(), size), error);
  buffer.erase(0, used);
  return error == beast::http::error::need_more ? error_code() : error;
}

error_code RequestParser::PutBody(std::string& buffer) {
  while (!is_done() && !buffer.empty()) {
    // The parser sees a limited number of bytes at a time. So it depends only on the length of a
    // line whether the line is accepted, not on how many bytes arrive together.
    const size_t before = buffer.size();
    const size_t offered = std::min(before, kMaxChunkLine);
    if (const error_code error = Put(buffer, offered)) return error;
    if (buffer.size() < before) continue;
    return offered == kMaxChunkLine ? error_code(beast::http::error::bad_chunk) : error_code();
  }
  return {};
}

bool RequestParser::expects_body() const {
  return !message_.is_done() && (message_.chunked() || message_.content_length().value_or(0) > 0);
}

std::string RequestParser::expect() const {
  return Text(message_.get()[beast::http::field::expect]);
}

bool RequestParser::LimitBody(size_t bytes) {
  message_.body_limit(bytes);
  return message_.content_length().value_or(0) <= bytes;
}

void RequestParser::FillHead(RequestHead& head) const {
  if (!message_.is_header_done()) return;
  const auto& message = message_.get();
  head.keep_alive = message_.keep_alive();
  head.http_1_0 = message.version() == 10;
  Request& request = head.request;
  request.method = Text(message.method_string());
  request.request_id = ChooseRequestId(Text(message["X-Request-Id"]));
  head.head_only = request.method == "HEAD";
  const std::string target = Text(message.target());
  request.path = target.substr(0, target.find('?'));
  if (request.path.size() < target.size()) request.query = target.substr(request.path.size() + 1);
  using beast::http::field;
  request.content_type = Text(message[field::content_type]);
  request.content_encoding = Text(message[field::content_encoding]);
  request.authorization = Text(message[field::authorization]);
  // Clients of Anthropic's API send their key in this header. The head has at most one of the two.
  if (const std::string key = Text(message["X-Api-Key"]); !key.empty()) {
    request.authorization = "Bearer " + key;
  }
  request.accept = Text(message[field::accept]);
  request.accept_encoding = Text(message[field::accept_encoding]);
  request.if_none_match = Text(message[field::if_none_match]);
  if (message.count("traceparent") == 1) head.traceparent = Text(message["traceparent"]);
  const auto [first, last] = message.equal_range("tracestate");
  for (auto it = first; it != last; ++it) {
    if (!head.tracestate.empty()) head.tracestate += ',';
    head.tracestate += Text(it->value());
  }
  request.inference_header = Text(message["Inference-Header-Content-Length"]);
  request.host = Text(message[field::host]);
  request.origin = Text(message[field::origin]);
  request.cors_method = Text(message[field::access_control_request_method]);
  request.cors_headers = Text(message[field::access_control_request_headers]);
}

Response ParseErrorResponse(const error_code& error) {
  Response response = error == beast::http::error::body_limit
                          ? ProtocolError(413, "body_too_large", "the body is too large")
                          : ProtocolError(400, "invalid_value", "the body's framing is malformed");
  response.close = true;
  return response;
}

}  // namespace moeserve::server::http
