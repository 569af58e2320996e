#include "server/http/checks/head_check.h"

#include <algorithm>
#include <string>

#include "server/base/text_values.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {
namespace {

Response Malformed(std::string_view message) {
  Response response = ProtocolError(400, "invalid_value", message);
  response.close = true;
  return response;
}

Response TooLong(int status) {
  Response response = status == 414
                          ? ProtocolError(414, "uri_too_long", "the request line is too long")
                          : ProtocolError(431, "headers_too_large", "the headers are too large");
  response.close = true;
  return response;
}

bool IsTokenChar(char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return true;
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return c != '\0' && kOthers.find(c) != std::string_view::npos;
}

bool IsToken(std::string_view text) {
  for (const char c : text) {
    if (!IsTokenChar(c)) return false;
  }
  return !text.empty();
}

bool IsDigits(std::string_view text) {
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
  }
  return !text.empty();
}

// Returns whether `text` contains control characters other than tabs and CR LF pairs. A CR at the
// end of `text` is bad only if `complete`.
bool HasBadBytes(std::string_view text, bool complete) {
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c == '\r') {
      if (i + 1 == text.size()) return complete;
      if (text[i + 1] != '\n') return true;
      ++i;
    } else if ((c < 0x20 && c != '\t') || c == 0x7F) {
      return true;
    }
  }
  return false;
}

bool IsGoodRequestLine(std::string_view line, bool& version_1_0) {
  const size_t first = line.find(' ');
  if (first == std::string_view::npos || !IsToken(line.substr(0, first))) return false;
  const size_t second = line.find(' ', first + 1);
  if (second == std::string_view::npos || second == first + 1) return false;
  for (const char c : line.substr(first + 1, second - first - 1)) {
    if (c <= 0x20 || static_cast<unsigned char>(c) >= 0x7F) return false;
  }
  const std::string_view version = line.substr(second + 1);
  version_1_0 = version == "HTTP/1.0";
  return version_1_0 || version == "HTTP/1.1";
}

}  // namespace

std::optional<Response> CheckPartialHead(std::string_view received, const HttpLimits& limits) {
  if (HasBadBytes(received, false))
    return Malformed("the request head has a bad control character");
  // This CR is not part of a line: the LF that ends the line has not arrived yet.
  if (received.ends_with('\r')) received.remove_suffix(1);
  const size_t line = received.find("\r\n");
  if (std::min(line, received.size()) > limits.max_line_bytes) return TooLong(414);
  if (line == std::string_view::npos) return std::nullopt;
  const std::string_view rest = received.substr(line + 2);
  if (rest.size() > limits.max_header_bytes) return TooLong(431);
  const size_t last = received.rfind("\r\n");
  if (received.size() - last - 2 > limits.max_line_bytes) return TooLong(431);
  return std::nullopt;
}

std::optional<Response> CheckHead(std::string_view head, const HttpLimits& limits) {
  if (HasBadBytes(head, true)) return Malformed("the request head has a bad control character");
  const size_t first_end = head.find("\r\n");
  if (first_end > limits.max_line_bytes) return TooLong(414);
  bool version_1_0 = false;
  if (!IsGoodRequestLine(head.substr(0, first_end), version_1_0)) {
    return Malformed("the request line is malformed, or not of HTTP/1.0 or 1.1");
  }
  std::string_view rest = head.substr(first_end + 2);
  if (rest.size() > limits.max_header_bytes) return TooLong(431);

  int count = 0;
  int hosts = 0;
  int lengths = 0;
  int encodings = 0;
  int keys = 0;
  while (!rest.starts_with("\r\n")) {
    const size_t end = rest.find("\r\n");
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end + 2);
    if (line.size() > limits.max_line_bytes || ++count > limits.max_headers) return TooLong(431);
    if (line.front() == ' ' || line.front() == '\t') return Malformed("a header line is folded");
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || !IsToken(line.substr(0, colon))) {
      return Malformed("a header name is malformed");
    }
    const std::string name = LowerCase(line.substr(0, colon));
    const std::string_view value = Trimmed(line.substr(colon + 1));
    if (name == "host") {
      ++hosts;
    } else if (name == "authorization" || name == "x-api-key") {
      ++keys;
    } else if (name == "content-length") {
      ++lengths;
      if (!IsDigits(value)) return Malformed("Content-Length is not a decimal number");
    } else if (name == "transfer-encoding") {
      ++encodings;
      if (LowerCase(value) != "chunked") return Malformed("Transfer-Encoding is not 'chunked'");
    }
  }
  if (lengths > 1 || encodings > 1 || lengths + encodings > 1) {
    return Malformed("the length of the body is given twice");
  }
  if (keys > 1) return Malformed("at most one Authorization or X-Api-Key is allowed");
  if (encodings == 1 && version_1_0) return Malformed("HTTP/1.0 has no Transfer-Encoding");
  if (hosts > 1 || (hosts == 0 && !version_1_0)) return Malformed("exactly one Host is required");
  return std::nullopt;
}

}  // namespace moeserve::server::http
