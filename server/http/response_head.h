// Serializes the heads of answers, and chunks.
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
  std::vector<std::pair<std::string, std::string>> headers;  // trusted: not checked
  std::string request_id;
  std::optional<size_t> content_length;  // absent: chunked (until the end for HTTP/1.0)
  bool keep_alive = true;
  bool http_1_0 = false;
};

// Head of a stream of server-sent events.
ResponseHead EventStreamHead();

// Returns status line, headers and the empty line.
std::string SerializeHead(const ResponseHead& head);

// Appends one chunk. Does nothing for empty data, which would end the body.
void AppendChunk(std::string_view data, std::string& out);
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

std::string_view ReasonPhrase(int status);

}  // namespace moeserve::server::http
