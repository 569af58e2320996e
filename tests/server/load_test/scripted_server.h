// An HTTP server that sends exactly the bytes that a test specifies.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace moeserve::server::testing {

// One connection, used on the thread that serves it.
class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {}

  // Returns the head and body of the next request; empty if the client has closed the connection.
  std::string ReadRequest();
  bool Send(std::string_view bytes);
  // Sends pieces of `size` bytes, each in its own packet if the system allows.
  void SendSlowly(std::string_view bytes, size_t size);
  void Reset();       // closes the connection with a RST
  void WaitForEnd();  // waits until the client closes the connection
  // Sends the head of an event stream, and `body` as one chunk.
  void SendStream(std::string_view body);

 private:
  const int fd_;
  std::string buffer_;
};

// Listens on 127.0.0.1 and serves every connection on its own thread. Handles GET requests itself:
// /v1/models lists the model "scripted", /metrics returns `metrics`.
class ScriptedServer {
 public:
  // Is called with each POST request. Returning false closes the connection.
  using Handler = std::function<bool(Peer& peer, const std::string& request)>;

  explicit ScriptedServer(Handler handler, std::string metrics = "");
  ~ScriptedServer();

  int port() const { return port_; }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_) + "/v1"; }
  int connections() const { return connections_; }
  // Closes every connection.
  void Disconnect();

 private:
  void Accept();
  void Serve(int fd);

  const Handler handler_;
  const std::string metrics_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int> connections_ = 0;
  Mutex mutex_;
  std::vector<int> open_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
  std::thread acceptor_;
};

// Returns `data` as one chunk of chunked transfer coding.
std::string Chunk(std::string_view data);

inline constexpr char kStreamHead[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    "Transfer-Encoding: chunked\r\n\r\n";
inline constexpr char kLastChunk[] = "0\r\n\r\n";

// Returns the events of a completion with `tokens` pieces, including usage and "[DONE]".
std::string CompletionEvents(int tokens);

}  // namespace moeserve::server::testing
