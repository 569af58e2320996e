// A client that sends arbitrary bytes and reads the response, for tests of the HTTP protocol.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace moeserve::server::testing {

struct RawResponse {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // decoded from chunks
  bool complete = false;                       // whether it ended as its framing promised
};

class RawClient {
 public:
  // Connects to 127.0.0.1. A small `receive_buffer` > 0 makes the client a slow reader.
  explicit RawClient(int port, int receive_buffer = 0);
  ~RawClient();

  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool Send(std::string_view bytes);
  // Reads until `text` has been received. Returns false at the end of the connection or after
  // `timeout`.
  bool ReadUntil(std::string_view text,
                 std::chrono::milliseconds timeout = std::chrono::seconds(5));
  // Reads until `text` has been received, with a pause after every `step` bytes.
  bool ReadSlowlyUntil(std::string_view text, size_t step, std::chrono::milliseconds pause);
  // Returns the next response; its status is 0 if there is none. An interim response (1xx) is
  // returned, too, without a body. `head` says that the response has no body, whatever its headers
  // claim.
  RawResponse ReadResponse(bool head = false);
  // Returns whether the server closes the connection within `timeout`.
  bool IsClosed(std::chrono::milliseconds timeout = std::chrono::seconds(5));
  void CloseSending();  // the client can still read
  void Close();         // with a FIN
  void Reset();         // with a RST

  const std::string& received() const { return buffer_; }

 private:
  // Returns false at the end of the connection, on an error or after the deadline.
  bool ReadSome(std::chrono::steady_clock::time_point deadline, size_t most = 65536);

  int fd_ = -1;
  std::string buffer_;
};

// Returns a request "POST <path>" with a JSON body and the usual headers.
std::string Post(std::string_view path, std::string_view body, std::string_view extra_headers = "");
std::string Get(std::string_view path, std::string_view extra_headers = "");

}  // namespace moeserve::server::testing
