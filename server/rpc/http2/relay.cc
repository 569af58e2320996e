#include "server/rpc/http2/relay.h"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "server/base/await.h"

namespace moeserve::server::rpc {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr size_t kBufferBytes = 16 << 10;
// How much, and for how long, is still read from a client whose connection was dropped.
constexpr size_t kMaxDiscarded = 4 << 20;
constexpr std::chrono::seconds kDiscardTime{1};
// For clients of HTTP/1 that took the wrong port.
constexpr std::string_view kHttp1Answer =
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    "Content-Length: 70\r\n\r\n"
    "This is the port of gRPC. HTTP has another one, 8080 if none is set.\r\n";
static_assert(kHttp1Answer.size() - kHttp1Answer.find("This") == 70);

// Returns a GOAWAY frame (RFC 9113, section 6.8). It names the highest stream id, so that the
// client does not send its calls again by itself.
std::string GoAway(std::string_view reason, Http2Error error) {
  std::string payload("\x7f\xff\xff\xff\0\0\0", 7);
  payload += static_cast<char>(error);
  payload += reason;
  return Frame(kGoAway, 0, 0, payload);
}

}  // namespace

Relay::Relay(asio::ip::tcp::socket client, ConnectionTls tls, FrameGuard guard, Callbacks callbacks)
    : client_(std::move(client), std::move(tls)),
      server_(client_.get_executor()),
      guard_(std::move(guard)),
      callbacks_(std::move(callbacks)),
      written_(client_.get_executor()) {}

void Relay::Start() {
  const auto pass_on = [self = shared_from_this()](const std::exception_ptr& error, bool secure) {
    if (error || !secure) {
      self->Close();
      self->OneDirectionEnded({});
      return;
    }
    asio::co_spawn(self->client_.get_executor(), self->FromClient(),
                   [self](const std::exception_ptr& failure) { self->OneDirectionEnded(failure); });
  };
  asio::co_spawn(client_.get_executor(), Secure(), pass_on);
}

bool Relay::Connect() {
  std::optional<asio::local::stream_protocol::socket> server = callbacks_.connect();
  if (!server) return false;
  server_ = *std::move(server);
  ++directions_;
  asio::co_spawn(client_.get_executor(), FromServer(),
                 [self = shared_from_this()](const std::exception_ptr& failure) {
                   self->OneDirectionEnded(failure);
                 });
  return true;
}

asio::awaitable<bool> Relay::Secure() {
  const ClientStream::Greeting greeting = co_await client_.Handshake();
  secure_ =
      greeting == ClientStream::Greeting::kDone && (!client_.is_tls() || client_.HasAlpn("h2"));
  if (!secure_) callbacks_.insecure();
  co_return secure_;
}

void Relay::Close() {
  closed_ = true;
  guard_.Release();
  error_code ignored;
  client_.socket().close(ignored);
  server_.close(ignored);
}

void Relay::Drop(const absl::Status& reason, Cause cause) {
  if (closed()) return;
  if (!secure_) {
    Close();  // ends the handshake
    return;
  }
  callbacks_.dropped(*this, reason, cause);
  dropped_ = true;
  const Http2Error error =
      guard_.error() == Http2Error::kNoError ? Http2Error::kEnhanceYourCalm : guard_.error();
  goodbye_ = guard_.client_speaks_http1()
                 ? std::string(kHttp1Answer)
                 : GoAway({reason.message().data(), reason.message().size()}, error);
  last_used_ = std::chrono::steady_clock::now();
  guard_.Release();
  if (!writing_to_client_ && guard_.server_between_frames()) SayGoodbye();
}

Relay::Cause Relay::CauseOfGuard() const {
  const Http2Error error = guard_.error();
  return error == Http2Error::kNoError || error == Http2Error::kEnhanceYourCalm ? Cause::kFlood
                                                                                : Cause::kOther;
}

void Relay::SayGoodbye() {
  closed_ = true;
  error_code ignored;
  server_.close(ignored);
  client_.WriteNow(goodbye_);
  // Closing the client's socket with unread input would reset the connection, and the client could
  // lose the reason.
  client_.EndOutput();
}

void Relay::CheckTime() {
  const auto now = std::chrono::steady_clock::now();
  if (dropped_) {
    if (now - last_used_ > kDiscardTime) Close();
    return;
  }
  if (closed_) return;
  if (const absl::Status status = guard_.CheckTime(now); !status.ok()) Drop(status, Cause::kOther);
}

asio::awaitable<void> Relay::Discard() {
  std::vector<char> buffer(kBufferBytes);
  size_t left = kMaxDiscarded;
  while (left >= kBufferBytes && client_.socket().is_open()) {
    const auto [error, count] = co_await client_.async_read_some(asio::buffer(buffer), kAwait);
    if (error) break;
    left -= count;
  }
}

void Relay::OneDirectionEnded(const std::exception_ptr& failure) {
  if (failure) Close();  // such as std::bad_alloc
  if (--directions_ > 0) return;
  Close();
  callbacks_.ended(*this);
}

asio::awaitable<void> Relay::WaitForWriter() {
  while (writing_to_client_) {
    written_.expires_at(std::chrono::steady_clock::time_point::max());
    co_await written_.async_wait(kAwait);  // until EndWriting()
  }
}

void Relay::EndWriting() {
  writing_to_client_ = false;
  written_.cancel();
}

asio::awaitable<void> Relay::AnswerClient() {
  // The other direction sends the frames behind its own if it is writing; a client that does not
  // read them must not make them many.
  if (guard_.bytes_for_client() > kBufferBytes) co_await WaitForWriter();
  if (guard_.bytes_for_client() == 0 || writing_to_client_ || closed_) co_return;
  if (!server_began_ || !guard_.server_between_frames()) co_return;
  writing_to_client_ = true;
  co_await WriteAnswers();
  EndWriting();
  if (dropped_ && !closed_) SayGoodbye();
}

asio::awaitable<bool> Relay::WriteAnswers() {
  while (guard_.bytes_for_client() > 0 && !closed_) {
    const std::string frames = guard_.TakeForClient();
    const auto [failed, written] =
        co_await asio::async_write(client_, asio::buffer(frames), kAwait);
    if (failed) co_return false;
  }
  co_return true;
}

asio::awaitable<void> Relay::FromClient() {
  std::vector<char> buffer(kBufferBytes);
  std::string checked;
  while (!closed_) {
    const auto [error, count] = co_await client_.async_read_some(asio::buffer(buffer), kAwait);
    if (error || closed()) break;
    last_used_ = std::chrono::steady_clock::now();
    std::string_view bytes(buffer.data(), count);
    checked.clear();
    absl::Status status = guard_.CheckClient(bytes, last_used_, checked);
    while (!status.ok() && ApiCode(status) == "out_of_memory" && callbacks_.reclaim(*this)) {
      status = guard_.CheckClient(bytes, last_used_, checked);
    }
    if (!status.ok()) {
      Drop(status, ApiCode(status) == "out_of_memory" ? Cause::kOther : CauseOfGuard());
      break;
    }
    if (!checked.empty()) {
      if (!server_.is_open() && !Connect()) {
        Close();
        break;
      }
      const auto [failed, written] =
          co_await asio::async_write(server_, asio::buffer(checked), kAwait);
      if (failed) break;
    }
    co_await AnswerClient();
  }
  if (dropped_) co_await Discard();
  // gRPC then closes the connection, after which the other direction ends.
  error_code ignored;
  server_.shutdown(asio::socket_base::shutdown_send, ignored);
}

asio::awaitable<void> Relay::FromServer() {
  std::vector<char> buffer(kBufferBytes);
  std::string checked;
  while (!closed_) {
    const auto [error, count] = co_await server_.async_read_some(asio::buffer(buffer), kAwait);
    co_await WaitForWriter();
    if (error || closed_) break;
    if (!dropped_) last_used_ = std::chrono::steady_clock::now();
    server_began_ = true;
    writing_to_client_ = true;
    checked.clear();
    const absl::Status status = guard_.CheckServer(std::string_view(buffer.data(), count),
                                                   std::chrono::steady_clock::now(), checked);
    const auto [failed, written] =
        co_await asio::async_write(client_, asio::buffer(checked), kAwait);
    bool sent = !failed;
    if (sent && guard_.server_between_frames()) sent = co_await WriteAnswers();
    EndWriting();
    if (!sent) break;
    if (!status.ok()) Drop(status, CauseOfGuard());
    if (dropped_ && !closed_ && guard_.server_between_frames()) SayGoodbye();
  }
  if (!dropped_) Close();
}

}  // namespace moeserve::server::rpc
