#include "server/tracing/collector_client.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <charconv>
#include <exception>
#include <string_view>

#include "base/error_text.h"
#include "server/base/await.h"
#include "server/base/json.h"
#include "server/base/version.h"

namespace moeserve::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;

constexpr uint32_t kMaxHead = 16 << 10;
constexpr uint64_t kMaxBody = 64 << 10;

// Retry-After with a date is not understood.
std::optional<std::chrono::milliseconds> RetryAfter(std::string_view text) {
  int seconds = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, seconds);
  if (parsed.ec != std::errc() || parsed.ptr != end || seconds < 0) return std::nullopt;
  return std::chrono::seconds(std::min(seconds, 3600));
}

// Returns how many spans the collector has rejected though its status is 200.
uint64_t RejectedSpans(const std::string& body) {
  const auto json = Json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return 0;
  const auto partial = json.find("partialSuccess");
  if (partial == json.end() || !partial->is_object()) return 0;
  const auto rejected = partial->find("rejectedSpans");
  if (rejected == partial->end()) return 0;
  if (rejected->is_number_unsigned()) return rejected->get<uint64_t>();
  uint64_t count = 0;
  if (rejected->is_string()) {
    const std::string& text = rejected->get_ref<const std::string&>();
    std::from_chars(text.data(), text.data() + text.size(), count);
  }
  return count;
}

beast::http::request<beast::http::string_body> MakeRequest(const OtlpEndpoint& endpoint,
                                                           const HttpHeaders& headers,
                                                           const std::string& body) {
  beast::http::request<beast::http::string_body> request(beast::http::verb::post, endpoint.path,
                                                         11);
  const bool bracket = endpoint.host.find(':') != std::string::npos;
  request.set(beast::http::field::host,
              Concat(bracket ? "[" : "", endpoint.host, bracket ? "]:" : ":", endpoint.port));
  request.set(beast::http::field::user_agent, Concat("moeserve/", kVersion));
  request.set(beast::http::field::content_type, "application/json");
  for (const auto& [name, value] : headers) request.set(name, value);
  request.keep_alive(false);
  request.body() = body;
  request.prepare_payload();
  return request;
}

// As in http/connection.cc, every co_await is in its own statement, because g++ 12 miscompiles some
// larger expressions.
asio::awaitable<void> Exchange(asio::io_context& io, const OtlpEndpoint& endpoint,
                               beast::http::request<beast::http::string_body> request,
                               std::chrono::milliseconds timeout, CollectorAnswer& answer) {
  tcp::resolver resolver(io);
  const auto resolved =
      co_await resolver.async_resolve(endpoint.host, std::to_string(endpoint.port), kAwait);
  const auto& [resolve_error, addresses] = resolved;
  if (resolve_error) {
    answer.error = resolve_error.message();
    co_return;
  }
  beast::tcp_stream stream(io);
  stream.expires_after(timeout);
  const auto connected = co_await stream.async_connect(addresses, kAwait);
  if (const auto error = std::get<0>(connected)) {
    answer.error = error.message();
    co_return;
  }
  const auto written = co_await beast::http::async_write(stream, request, kAwait);
  if (const auto error = std::get<0>(written)) {
    answer.error = error.message();
    co_return;
  }
  beast::flat_buffer buffer(kMaxHead + kMaxBody);
  beast::http::response_parser<beast::http::string_body> parser;
  parser.header_limit(kMaxHead);
  parser.body_limit(kMaxBody);
  const auto read = co_await beast::http::async_read(stream, buffer, parser, kAwait);
  if (const auto error = std::get<0>(read)) {
    answer.error = error.message();
    co_return;
  }
  const auto& response = parser.get();
  answer.status = static_cast<int>(response.result_int());
  const auto retry = response[beast::http::field::retry_after];
  answer.retry_after = RetryAfter({retry.data(), retry.size()});
  answer.rejected_spans = RejectedSpans(response.body());
}

}  // namespace

CollectorAnswer PostToCollector(const OtlpEndpoint& endpoint, const HttpHeaders& headers,
                                const std::string& body, std::chrono::milliseconds timeout,
                                const std::stop_token& stop) {
  CollectorAnswer answer;
  answer.error = "no answer in time";
  try {
    asio::io_context io(1);
    const std::stop_callback on_stop(stop, [&io] { io.stop(); });
    asio::co_spawn(io,
                   Exchange(io, endpoint, MakeRequest(endpoint, headers, body), timeout, answer),
                   [&](const std::exception_ptr& error) {
                     if (error) answer.error = "out of memory";
                   });
    io.run_for(timeout);
  } catch (const std::exception& error) {
    answer.error = error.what();
  }
  return answer;
}

}  // namespace moeserve::server
