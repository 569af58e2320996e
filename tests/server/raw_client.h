// A client that sends any bytes and reads what comes back, for tests of a server's manners.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace moeserve::server::testing {

struct RawResponse {
  int status = 0;
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;                            // chunks joined
  bool complete = false;                       // ended as its framing promised
};

class RawClient {
 public:
  // Connects to 127.0.0.1. `receive_buffer` > 0 makes a slow reader of it.
  explicit RawClient(int port, int receive_buffer = 0);
  ~RawClient();

  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool Send(std::string_view bytes);
  // Reads until `text` has been received; false on the end of the connection or after `timeout`.
  bool ReadUntil(std::string_view text,
                 std::chrono::milliseconds timeout = std::chrono::seconds(5));
  // The same, taking at most `step` bytes and then pausing, over and over.
  bool ReadSlowlyUntil(std::string_view text, size_t step, std::chrono::milliseconds pause);
  // The next response; status 0 if there is none. `head`: it has no body whatever it says.
  RawResponse ReadResponse(bool head = false);
  // Whether the server closes the connection within `timeout`.
  bool IsClosed(std::chrono::milliseconds timeout = std::chrono::seconds(5));
  void Close();  // with a FIN
  void Reset();  // with a RST

  const std::string& received() const { return buffer_; }

 private:
  // False on end, error or timeout.
  bool ReadSome(std::chrono::steady_clock::time_point deadline, size_t most = 65536);

  int fd_ = -1;
  std::string buffer_;
};

// "POST <path>" with a JSON body and the usual headers.
std::string Post(std::string_view path, std::string_view body, std::string_view extra_headers = "");
std::string Get(std::string_view path, std::string_view extra_headers = "");

}  // namespace moeserve::server::testing
