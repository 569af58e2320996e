// Requests to and responses from handlers, independent of sockets.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "server/base/memory_budget.h"
#include "server/base/work_pool.h"

namespace moeserve::server {
class ApiKey;
class RequestRecord;
}  // namespace moeserve::server

namespace moeserve::server::http {

struct Request {
  std::string method;  // as sent, such as "GET"
  std::string path;    // percent-encoded as sent, without the query
  std::string query;   // the text after '?'; may be empty
  std::string content_type;
  std::string content_encoding;
  std::string authorization;
  std::string accept;
  std::string accept_encoding;
  std::string if_none_match;
  std::string host;              // the header Host; may be empty
  std::string origin;            // the header Origin; browsers send it with requests of web pages
  std::string cors_method;       // the header Access-Control-Request-Method; may be empty
  std::string cors_headers;      // the header Access-Control-Request-Headers; may be empty
  std::string inference_header;  // the header Inference-Header-Content-Length; may be empty
  std::string body;
  std::string request_id;  // never empty
  // What the body holds of the server's memory budget; may be null.
  std::shared_ptr<MemoryCharge> memory;
  // Whose request it is; null on a server without keys and for routes that need no key.
  std::shared_ptr<const ApiKey> key;
  // For fair shares of the work pools: the key's, or the address's, or the connection's.
  ClientId client = 0;
  // Learns what the request does; null for requests that did not come from a connection.
  std::shared_ptr<RequestRecord> record;
  // Makes the server call PendingResponse::Next() again. Thread-safe; may be called at any time;
  // never throws.
  std::function<void()> wake = [] {};
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  // in addition to the headers of every response
  std::vector<std::pair<std::string, std::string>> headers;
  // whether to close the connection afterwards
  bool close = false;
};

// There is nothing to send yet; Request::wake will be called when there is.
struct Wait {};

// A part of a streamed response. The server sends the head before the first part.
struct StreamPart {
  std::string data;
  bool last = false;
};

using Progress = std::variant<Wait, Response, StreamPart>;

// A response that is not complete when the handler returns. The server calls Next(), from one
// thread at a time, until Next() returns a Response or a StreamPart with `last`. Next() returns no
// Response after a StreamPart. The destructor cancels the work that produces the response.
class PendingResponse {
 public:
  virtual ~PendingResponse() = default;
  virtual Progress Next() = 0;
  // Returns whether Next() may take long, so that it should not run on the I/O thread.
  virtual bool NextIsSlow() const { return false; }
  // Is called instead of Next(), on the same thread, if `wake` is called while the server is still
  // sending. Can cancel the work if too much output waits.
  virtual void CheckBacklog() {}
  // Returns the media type of the stream, once Next() has returned a StreamPart.
  virtual std::string_view StreamType() const { return "text/event-stream; charset=utf-8"; }
  // Returns a text that is sent while a stream has no output. Clients ignore it.
  virtual std::string_view KeepAliveText() const { return ": keep-alive\n\n"; }
  // Returns the HTTP status for logs and metrics. It can be an error status although the head was
  // sent with status 200.
  virtual int FinalStatus() const { return 200; }
};

using Handled = std::variant<Response, std::unique_ptr<PendingResponse>>;

}  // namespace moeserve::server::http
