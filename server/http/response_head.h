// Serializes the heads of responses, and chunks.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moeserve::server::http {

struct ResponseHead {
  int status = 200;
  std::string content_type;
  // not checked: callers pass trusted values only
  std::vector<std::pair<std::string, std::string>> headers;
  std::string request_id;
  // If absent, the body is chunked, or for HTTP/1.0 ends when the connection closes.
  std::optional<size_t> content_length;
  bool keep_alive = true;
  bool http_1_0 = false;
};

// Returns the head of a response that is a stream of server-sent events.
ResponseHead StreamHead(std::string_view content_type);

// Returns the status line, the headers and the empty line.
std::string SerializeHead(const ResponseHead& head);

// Appends one chunk of a chunked body. Does nothing for empty data, because an empty chunk would
// end the body.
void AppendChunk(std::string_view data, std::string& out);
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

std::string_view ReasonPhrase(int status);

}  // namespace moeserve::server::http
