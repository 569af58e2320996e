// Requests and answers of handlers, independent of sockets.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace moeserve::server::http {

struct Request {
  std::string method;  // as sent: "GET"
  std::string path;    // percent-encoded as sent, without the query
  std::string query;   // after '?', or empty
  std::string content_type;
  std::string content_encoding;
  std::string authorization;
  std::string accept;
  std::string if_none_match;
  std::string body;
  std::string request_id;  // never empty
  // Makes the server call PendingResponse::Next again; thread-safe, callable at any time.
  std::function<void()> wake = [] {};
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;  // in addition to those of every answer
  bool close = false;                                        // close the connection afterwards
};

// Nothing to send yet; Request::wake will be called.
struct Wait {};

// A part of a streamed answer. The server sends the head before the first part.
struct StreamPart {
  std::string data;
  bool last = false;
};

using Progress = std::variant<Wait, Response, StreamPart>;

// An answer that is not complete when the handler returns. The server calls Next, from one thread
// at a time, until it returns a Response or a StreamPart with `last`. No Response follows a
// StreamPart. The destructor cancels the work behind the answer.
class PendingResponse {
 public:
  virtual ~PendingResponse() = default;
  virtual Progress Next() = 0;
  // Called instead of Next, on the same thread, if the server is still sending when `wake` is
  // called. Can cancel the work if too much output waits.
  virtual void CheckBacklog() {}
  // Sent while a stream has no output; clients ignore it.
  virtual std::string_view KeepAliveText() const { return ": keep-alive\n\n"; }
  // The HTTP status for logs and metrics; an error can follow a head with status 200.
  virtual int FinalStatus() const { return 200; }
};

using Handled = std::variant<Response, std::unique_ptr<PendingResponse>>;

}  // namespace moeserve::server::http
