// Passes the bytes of one gRPC connection between its client and the gRPC server, through a
// FrameGuard. Internal to connection_gate.cc.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "server/rpc/http2/frame_guard.h"
#include "server/tls/client_stream.h"

namespace moeserve::server::rpc {

// All members run on the thread of the sockets' I/O context.
class Relay : public std::enable_shared_from_this<Relay> {
 public:
  // Why a connection is dropped.
  enum class Cause {
    kFlood,  // its client has sent too much of something
    kOther,  // it was silent, its client has made a fault, or others need what it holds
  };

  struct Callbacks {
    // Returns a socket that is connected with the gRPC server; nullopt if there is none.
    std::function<std::optional<boost::asio::local::stream_protocol::socket>()> connect;
    // Closes another connection that holds more memory than this one; returns whether there was
    // one.
    std::function<bool(const Relay&)> reclaim;
    // Reports that the connection is closed because of its client.
    std::function<void(const Relay&, const absl::Status&, Cause)> dropped;
    // Reports that the TLS handshake has failed.
    std::function<void()> insecure;
    // Reports that no byte will be passed on any more.
    std::function<void(Relay&)> ended;
  };

  // With TLS if `tls` is not null. Connects with the gRPC server when the client has sent
  // something, because gRPC's part of a connection takes many times as much memory and time as this
  // one.
  Relay(boost::asio::ip::tcp::socket client, ConnectionTls tls, FrameGuard guard,
        Callbacks callbacks);

  void Start();
  // Closes both sides at once.
  void Close();
  // Tells the client why, with GOAWAY behind the frame that is being sent, and closes both sides.
  // Closes them without a word if the client takes nothing for a second.
  void Drop(const absl::Status& reason, Cause cause);
  void CheckTime();

  size_t held_bytes() const { return guard_.held_bytes(); }
  // Returns when bytes were last passed on, in either direction.
  std::chrono::steady_clock::time_point last_used() const { return last_used_; }
  bool began_handshake() const { return client_.began_handshake(); }
  bool closed() const { return closed_ || dropped_; }

 private:
  boost::asio::awaitable<bool> Secure();  // the TLS handshake, if there is one
  boost::asio::awaitable<void> FromClient();
  bool Connect();
  boost::asio::awaitable<void> FromServer();
  boost::asio::awaitable<void> Discard();
  boost::asio::awaitable<void> WaitForWriter();
  void EndWriting();
  // Sends the guard's own frames if no others are being sent.
  boost::asio::awaitable<void> AnswerClient();
  boost::asio::awaitable<bool> WriteAnswers();  // requires writing_to_client_
  Cause CauseOfGuard() const;                   // of an error that the guard has returned
  void SayGoodbye();
  void OneDirectionEnded(const std::exception_ptr& failure);

  ClientStream client_;
  boost::asio::local::stream_protocol::socket server_;
  FrameGuard guard_;
  const Callbacks callbacks_;
  std::chrono::steady_clock::time_point last_used_ = std::chrono::steady_clock::now();
  int directions_ = 1;         // that pass bytes on; the second one begins with Connect()
  bool server_began_ = false;  // whether gRPC has sent something; its SETTINGS must come first
  bool writing_to_client_ = false;
  boost::asio::steady_timer written_;  // is cancelled when writing_to_client_ becomes false
  bool secure_ = false;                // whether bytes can be passed on
  bool closed_ = false;
  bool dropped_ = false;
  std::string goodbye_;  // the GOAWAY frame of a dropped connection
};

}  // namespace moeserve::server::rpc
