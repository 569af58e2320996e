// An HTTP server that sends what a test tells it to, byte for byte.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace moeserve::server::testing {

// One connection, on the thread that serves it.
class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {}

  // Head and body of the next request; empty: the client has closed.
  std::string ReadRequest();
  bool Send(std::string_view bytes);
  // In pieces of `size` bytes, each one a packet of its own as far as that can be had.
  void SendSlowly(std::string_view bytes, size_t size);
  void Reset();       // ends the connection with a RST
  void WaitForEnd();  // until the client closes
  // The head of an event stream and `body` as one chunk.
  void SendStream(std::string_view body);

 private:
  const int fd_;
  std::string buffer_;
};

// Listens on 127.0.0.1; every connection has a thread. GET requests are answered here: /v1/models
// names the model "scripted", /metrics gives `metrics`.
class ScriptedServer {
 public:
  // Called with each POST request. False: the connection ends.
  using Handler = std::function<bool(Peer& peer, const std::string& request)>;

  explicit ScriptedServer(Handler handler, std::string metrics = "");
  ~ScriptedServer();

  int port() const { return port_; }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_) + "/v1"; }
  int connections() const { return connections_; }
  // Ends every connection from this side.
  void Disconnect();

 private:
  void Accept();
  void Serve(int fd);

  const Handler handler_;
  const std::string metrics_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int> connections_ = 0;
  std::mutex mutex_;
  std::vector<int> open_;
  std::vector<std::thread> threads_;
  std::thread acceptor_;
};

// A chunk of chunked transfer coding.
std::string Chunk(std::string_view data);

inline constexpr char kStreamHead[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    "Transfer-Encoding: chunked\r\n\r\n";
inline constexpr char kLastChunk[] = "0\r\n\r\n";

// Events of a completion of `tokens` pieces, usage and end included.
std::string CompletionEvents(int tokens);

}  // namespace moeserve::server::testing
