// The connection of one client, with TLS or without.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/system/error_code.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "server/base/memory_budget.h"

namespace moeserve::server {

// What a connection with TLS takes before its client has sent a request: the buffers of OpenSSL and
// of the stream, and the state of the handshake. Measured: 90 to 115 KiB.
constexpr size_t kTlsConnectionBytes = size_t{112} << 10;

// The TLS of a new connection; a connection without TLS has neither.
struct ConnectionTls {
  std::shared_ptr<boost::asio::ssl::context> context;
  // Is charged for every connection from the first byte of its client on.
  std::shared_ptr<MemoryBudget> memory;
};

// All members run on the thread of the socket's I/O context. One read and one write may be in
// progress at a time, and can be cancelled.
class ClientStream {
 public:
  using executor_type = boost::asio::ip::tcp::socket::executor_type;

  ClientStream(boost::asio::ip::tcp::socket socket, ConnectionTls tls);
  ClientStream(const ClientStream&) = delete;
  ClientStream& operator=(const ClientStream&) = delete;

  executor_type get_executor() { return socket_.get_executor(); }
  boost::asio::ip::tcp::socket& socket() { return socket_; }
  bool is_tls() const { return settings_.context != nullptr; }

  enum class Greeting {
    kDone,   // the bytes that follow are the client's
    kPlain,  // the client sends text to a port with TLS; nothing was read
    kFailed,
  };
  // Must be awaited before anything is read or written. Returns kDone at once without TLS. Does not
  // limit the time.
  boost::asio::awaitable<Greeting> Handshake();
  // Returns whether the client has sent the beginning of a handshake.
  bool began_handshake() const { return tls_.has_value(); }
  // Returns whether the client has sent a certificate, which is valid then.
  bool has_client_certificate() const;
  // Returns whether the client has agreed to `protocol` by ALPN.
  bool HasAlpn(std::string_view protocol) const;

  // As those of a socket. Of a connection with TLS, end of file means that the client has ended its
  // output with close_notify.
  template <typename Buffers, typename Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    if (tls_) return tls_->async_read_some(buffers, std::forward<Token>(token));
    return socket_.async_read_some(buffers, std::forward<Token>(token));
  }
  template <typename Buffers, typename Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    if (tls_) return tls_->async_write_some(buffers, std::forward<Token>(token));
    return socket_.async_write_some(buffers, std::forward<Token>(token));
  }

  // These do not block; no write may be in progress. Writes `bytes` as far as the system takes them
  // now.
  void WriteNow(std::string_view bytes);
  // Tells the client that nothing more comes.
  void EndOutput();

 private:
  boost::asio::ip::tcp::socket socket_;
  const ConnectionTls settings_;
  MemoryCharge memory_;
  // Made when the handshake begins, because its buffers take more memory than the rest of a
  // connection: a client that sends nothing must not cause that.
  mutable std::optional<boost::asio::ssl::stream<boost::asio::ip::tcp::socket&>> tls_;
  bool secured_ = false;  // whether the handshake has succeeded
};

}  // namespace moeserve::server
