#include "server/http/response_head.h"

#include <charconv>
#include <ctime>

namespace moeserve::server::http {
namespace {

std::string Date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[64];
  // HTTP dates need English names. strftime writes them because the program never changes the C
  // locale.
  const size_t length = std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return std::string(text, length);
}

void AppendHeader(std::string& out, std::string_view name, std::string_view value) {
  out += name;
  out += ": ";
  out += value;
  out += "\r\n";
}

}  // namespace

std::string_view ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 499:
      return "Client Closed Request";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    default:
      return "Status";
  }
}

ResponseHead StreamHead(std::string_view content_type) {
  ResponseHead head;
  head.content_type = content_type;
  head.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  return head;
}

std::string SerializeHead(const ResponseHead& head) {
  std::string out = "HTTP/1.1 ";
  out += std::to_string(head.status);
  out += ' ';
  out += ReasonPhrase(head.status);
  out += "\r\n";
  AppendHeader(out, "Date", Date());
  AppendHeader(out, "X-Request-Id", head.request_id);
  for (const auto& [name, value] : head.headers) AppendHeader(out, name, value);
  if (head.status != 204 && head.status != 304) {
    AppendHeader(out, "Content-Type", head.content_type);
    if (head.content_length) {
      AppendHeader(out, "Content-Length", std::to_string(*head.content_length));
    } else if (!head.http_1_0) {
      AppendHeader(out, "Transfer-Encoding", "chunked");
    }
  }
  if (!head.keep_alive) {
    AppendHeader(out, "Connection", "close");
  } else if (head.http_1_0) {
    AppendHeader(out, "Connection", "keep-alive");
  }
  out += "\r\n";
  return out;
}

void AppendChunk(std::string_view data, std::string& out) {
  if (data.empty()) return;
  char size[20];
  const auto end = std::to_chars(size, size + sizeof(size), data.size(), 16).ptr;
  out.append(size, end);
  out += "\r\n";
  out += data;
  out += "\r\n";
}

}  // namespace moeserve::server::http
