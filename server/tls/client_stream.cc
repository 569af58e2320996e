#include "server/tls/client_stream.h"

#include <openssl/ssl.h>
#include <sys/socket.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>

#include "server/base/await.h"

namespace moeserve::server {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {
constexpr char kHandshakeRecord = 0x16;  // RFC 8446, section 5.1
}  // namespace

ClientStream::ClientStream(asio::ip::tcp::socket socket, ConnectionTls tls)
    : socket_(std::move(socket)), settings_(std::move(tls)), memory_(settings_.memory) {}

asio::awaitable<ClientStream::Greeting> ClientStream::Handshake() {
  if (!is_tls()) co_return Greeting::kDone;
  char first = 0;
  while (true) {
    const auto [unreadable] = co_await socket_.async_wait(asio::socket_base::wait_read, kAwait);
    if (unreadable) co_return Greeting::kFailed;
    const ssize_t count = recv(socket_.native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (count == 1) break;
    // The wait can end before there is anything to read.
    const bool again = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (!again) co_return Greeting::kFailed;
  }
  if (first != kHandshakeRecord) co_return Greeting::kPlain;
  if (!memory_.Add(kTlsConnectionBytes, ChargeFor::kArriving).ok()) co_return Greeting::kFailed;
  tls_.emplace(socket_, *settings_.context);
  const auto [error] = co_await tls_->async_handshake(asio::ssl::stream_base::server, kAwait);
  secured_ = !error;
  co_return error ? Greeting::kFailed : Greeting::kDone;
}

bool ClientStream::has_client_certificate() const {
  if (!secured_) return false;
  SSL* const native = tls_->native_handle();
  return SSL_get0_peer_certificate(native) != nullptr && SSL_get_verify_result(native) == X509_V_OK;
}

bool ClientStream::HasAlpn(std::string_view protocol) const {
  if (!secured_) return false;
  const unsigned char* name = nullptr;
  unsigned int size = 0;
  SSL_get0_alpn_selected(tls_->native_handle(), &name, &size);
  return std::string_view(reinterpret_cast<const char*>(name), size) == protocol;
}

void ClientStream::WriteNow(std::string_view bytes) {
  error_code ignored;
  socket_.non_blocking(true, ignored);
  if (secured_) {
    tls_->write_some(asio::buffer(bytes.data(), bytes.size()), ignored);
  } else {
    socket_.write_some(asio::buffer(bytes.data(), bytes.size()), ignored);
  }
}

void ClientStream::EndOutput() {
  error_code ignored;
  if (secured_) {
    socket_.non_blocking(true, ignored);
    // Sends close_notify without waiting for that of the client.
    SSL* const native = tls_->native_handle();
    SSL_set_shutdown(native, SSL_get_shutdown(native) | SSL_RECEIVED_SHUTDOWN);
    tls_->shutdown(ignored);
  }
  socket_.shutdown(asio::socket_base::shutdown_send, ignored);
}

}  // namespace moeserve::server
