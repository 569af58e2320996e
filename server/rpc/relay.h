// Passes the bytes of one gRPC connection between its client and the gRPC server, through a
// FrameGuard. Internal to connection_gate.cc.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "server/rpc/frame_guard.h"
#include "server/tls/client_stream.h"

namespace moeserve::server::rpc {

// All members run on the thread of the sockets' I/O context.
class Relay : public std::enable_shared_from_this<Relay> {
 public:
  struct Callbacks {
    // Closes another connection that holds more memory than this one; returns whether there was
    // one.
    std::function<bool(const Relay&)> reclaim;
    // Reports that the connection is closed because of its client.
    std::function<void(const Relay&, const absl::Status&)> dropped;
    // Reports that the TLS handshake has failed.
    std::function<void()> insecure;
    // Reports that no byte will be passed on any more.
    std::function<void(Relay&)> ended;
  };

  // `server` is connected with the gRPC server. With TLS if `tls` is not null.
  Relay(boost::asio::ip::tcp::socket client, std::shared_ptr<boost::asio::ssl::context> tls,
        boost::asio::local::stream_protocol::socket server, FrameGuard guard, Callbacks callbacks);

  void Start();
  // Closes both sides at once.
  void Close();
  // Tells the client why, with GOAWAY behind the frame that is being sent, and closes both sides.
  // Closes them without a word if the client takes nothing for a second.
  void Drop(const absl::Status& reason);
  void CheckTime();

  size_t held_bytes() const { return guard_.held_bytes(); }
  // Returns when bytes were last passed on, in either direction.
  std::chrono::steady_clock::time_point last_used() const { return last_used_; }
  bool closed() const { return closed_ || dropped_; }

 private:
  boost::asio::awaitable<bool> Secure();  // the TLS handshake, if there is one
  boost::asio::awaitable<void> FromClient();
  boost::asio::awaitable<void> FromServer();
  boost::asio::awaitable<void> Discard();
  boost::asio::awaitable<void> WaitForWriter();
  void EndWriting();
  // Sends the guard's own frames if no others are being sent.
  boost::asio::awaitable<void> AnswerClient();
  boost::asio::awaitable<bool> WriteAnswers();  // requires writing_to_client_
  void SayGoodbye();
  void OneDirectionEnded();

  ClientStream client_;
  boost::asio::local::stream_protocol::socket server_;
  FrameGuard guard_;
  const Callbacks callbacks_;
  std::chrono::steady_clock::time_point last_used_ = std::chrono::steady_clock::now();
  int directions_ = 2;
  bool writing_to_client_ = false;
  boost::asio::steady_timer written_;  // is cancelled when writing_to_client_ becomes false
  bool secure_ = false;                // whether bytes can be passed on
  bool closed_ = false;
  bool dropped_ = false;
  std::string goodbye_;  // the GOAWAY frame of a dropped connection
};

}  // namespace moeserve::server::rpc
