#include "tests/gpu/http_call.h"

#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>

namespace moeserve::gpu_run {

namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;

constexpr uint64_t kMostBytes = 256u << 20;

}  // namespace

HttpAnswer HttpCall(const std::string& address, const std::string& path, const std::string& body,
                    int seconds) {
  HttpAnswer answer;
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    answer.error = "address '" + address + "': expected HOST:PORT";
    return answer;
  }
  asio::io_context io;
  beast::tcp_stream stream(io);
  http::request<http::string_body> request(body.empty() ? http::verb::get : http::verb::post, path,
                                           11);
  request.set(http::field::host, address);
  request.set(http::field::connection, "close");
  if (!body.empty()) {
    request.set(http::field::content_type, "application/json");
    request.body() = body;
    request.prepare_payload();
  }
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMostBytes);
  beast::flat_buffer buffer;
  // The deadline of a tcp_stream holds for asynchronous operations only.
  const auto done = [&](const beast::error_code& error, size_t) {
    if (error) answer.error = error.message();
  };
  beast::error_code error;
  const auto host = asio::ip::make_address(address.substr(0, colon), error);
  if (error) {
    answer.error = "address '" + address + "': " + error.message();
    return answer;
  }
  const auto port = static_cast<uint16_t>(std::stoi(address.substr(colon + 1)));
  stream.expires_after(std::chrono::seconds(seconds));
  stream.async_connect(asio::ip::tcp::endpoint(host, port), [&](const beast::error_code& failed) {
    if (failed) return done(failed, 0);
    http::async_write(stream, request, [&](const beast::error_code& unsent, size_t n) {
      if (unsent) return done(unsent, n);
      http::async_read(stream, buffer, parser, done);
    });
  });
  io.run();
  if (!answer.error.empty() || !parser.is_done()) return answer;
  answer.status = static_cast<int>(parser.get().result_int());
  answer.type = std::string(parser.get()[http::field::content_type]);
  answer.body = std::move(parser.get().body());
  return answer;
}

}  // namespace moeserve::gpu_run
