// Requests and answers as handlers see them; nothing here knows about sockets.
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
  std::vector<std::pair<std::string, std::string>> headers;  // beyond the ones every answer has
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

// An answer that is not complete when the handler returns. The server calls Next from one thread
// at a time until it gave a Response or a StreamPart with `last`; a Response cannot follow a part.
// Destroying the object abandons the work behind it.
class PendingResponse {
 public:
  virtual ~PendingResponse() = default;
  virtual Progress Next() = 0;
  // Called in place of Next, on the same thread, where the server is still busy sending when `wake`
  // comes: the chance to notice that too much is waiting.
  virtual void CheckBacklog() {}
  // Sent during silence within a stream; ignored by clients.
  virtual std::string_view KeepAliveText() const { return ": keep-alive\n\n"; }
  // What ended it, for logs and metrics once the answer has begun: an HTTP status.
  virtual int FinalStatus() const { return 200; }
};

using Handled = std::variant<Response, std::unique_ptr<PendingResponse>>;

}  // namespace moeserve::server::http
