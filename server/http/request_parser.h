// Parses one HTTP/1 request and enforces the limits on its body. Internal to connection.h.
#pragma once

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/system/error_code.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "server/base/limits.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// The parts of a request's head that the connection needs, and the request for its handler.
struct RequestHead {
  Request request;
  bool keep_alive = false;
  bool http_1_0 = false;
  bool head_only = false;      // the response has no body
  std::string traceparent;     // as sent; empty unless there is exactly one
  std::string tracestate;      // all such headers, as sent, joined with commas
  int64_t request_bytes = -1;  // of the body; -1 until it has arrived
};

// What the bytes that have arrived say about the next request. Both are empty if its head is not
// complete yet.
struct HeadSearch {
  std::optional<size_t> size;       // of the complete head, which may be parsed
  std::optional<Response> refusal;  // the response to a head that is not acceptable
};

// Looks for the head of a request at the start of `buffer`. Empty lines are allowed before a
// request and are removed.
HeadSearch FindHead(std::string& buffer, const HttpLimits& limits);

class RequestParser {
 public:
  explicit RequestParser(const HttpLimits& limits);  // `limits` must outlive the parser

  RequestParser(const RequestParser&) = delete;
  RequestParser& operator=(const RequestParser&) = delete;

  // Parses the first `size` bytes of `buffer` as far as they form complete parts of the request,
  // and removes the parsed bytes. Returns OK if more bytes are needed.
  boost::system::error_code Put(std::string& buffer, size_t size);

  // Parses bytes of the body after TakeBodyInParts(), and removes the parsed bytes. Bytes after the
  // body stay in `buffer`. Returns OK if more bytes are needed.
  boost::system::error_code PutBody(std::string& buffer);

  // Writes what is known of the head; nothing before the head is complete.
  void FillHead(RequestHead& head) const;

  // These may be called when the head is complete.
  bool is_done() const { return message_.is_done(); }
  bool expects_body() const;
  bool chunked() const { return message_.chunked(); }
  std::string expect() const;  // the header "Expect"
  // Lowers the limit on the body. Returns false if the head announces a larger one. Must be called
  // before bytes of the body are parsed.
  bool LimitBody(size_t bytes);
  // From now on, parts of the body are taken as they come. Otherwise only a whole body is.
  void TakeBodyInParts() { message_.eager(true); }
  // Returns the body as far as it was parsed since the last call.
  std::string TakeBody() { return std::exchange(message_.get().body(), {}); }

 private:
  boost::beast::http::request_parser<boost::beast::http::string_body> message_;
  int chunks_ = 0;
  size_t extension_bytes_ = 0;
  // Called by `message_`, which keeps a reference to this member while it parses.
  std::function<void(uint64_t, boost::beast::string_view, boost::system::error_code&)> on_chunk_;
};

// Returns the response to a request that the parser refused with `error`.
Response ParseErrorResponse(const boost::system::error_code& error);

}  // namespace moeserve::server::http
