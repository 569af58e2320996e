// HTTP/1.1 requests, one after the other on a connection: heads, bodies, chunks and URLs. The first
// byte says in how many bytes the rest arrives at a time.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/http/checks/host_check.h"
#include "server/http/request_parser.h"
#include "server/http/url.h"
#include "server/metrics/prometheus.h"
#include "server/tracing/trace_context.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::server::http {
namespace {

// What a connection has read.
struct RequestOutcome {
  std::vector<RequestHead> requests;
  bool refused = false;
  bool waiting = false;  // the bytes ended inside a head or a body
};

HttpLimits FuzzedLimits() {
  HttpLimits limits;
  limits.max_line_bytes = 512;
  limits.max_header_bytes = 2048;
  limits.max_headers = 20;
  limits.max_body_bytes = 4096;
  limits.max_chunks = 64;
  limits.max_chunk_extension_bytes = 256;
  return limits;
}

// Reads requests as Connection does, `step` bytes at a time.
RequestOutcome ReadHttp(std::string_view bytes, size_t step, const HttpLimits& limits) {
  RequestOutcome out;
  std::string buffer;
  const auto more = [&] {
    if (bytes.empty()) return false;
    buffer += bytes.substr(0, step);
    bytes.remove_prefix(std::min(step, bytes.size()));
    return true;
  };
  while (true) {
    HeadSearch found = FindHead(buffer, limits);
    while (!found.size && !found.refusal && more()) found = FindHead(buffer, limits);
    out.refused = found.refusal.has_value();
    out.waiting = !found.size && !found.refusal;
    if (!found.size) break;
    MOESERVE_CHECK(*found.size <= buffer.size(), "the head has arrived");
    RequestParser parser(limits);
    const std::string rest = buffer.substr(*found.size);
    const auto error = parser.Put(buffer, *found.size);
    RequestHead head;
    parser.FillHead(head);
    if (error) {
      MOESERVE_CHECK(ParseErrorResponse(error).close, "the connection ends after an error");
      out.refused = true;
      break;
    }
    // The server answers by the head, so the parser must know all of it.
    MOESERVE_CHECK(buffer == rest && !head.request.method.empty(),
                   "a whole head is parsed at once");
    (void)parser.expect();
    parser.TakeBodyInParts();
    while (!parser.is_done()) {
      if (!buffer.empty()) {
        if (parser.PutBody(buffer)) {
          out.refused = true;
          break;
        }
        if (parser.is_done()) break;
      }
      if (!more()) break;
    }
    out.waiting = !parser.is_done() && !out.refused;
    if (!parser.is_done() || out.refused) break;
    head.request.body = parser.TakeBody();
    MOESERVE_CHECK(head.request.body.size() <= limits.max_body_bytes, "the limit on bodies");
    const bool last = !head.keep_alive;
    out.requests.push_back(std::move(head));
    if (last) break;
  }
  return out;
}

void CheckUrl(const RequestHead& head) {
  const Request& request = head.request;
  if (const auto decoded = PercentDecode(request.path)) {
    MOESERVE_CHECK(decoded->find('\0') == std::string::npos, "no NUL in a path");
    std::string encoded;
    for (const char c : *decoded) {
      constexpr char kDigits[] = "0123456789abcdef";
      const auto byte = static_cast<uint8_t>(c);
      encoded += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
    MOESERVE_CHECK(PercentDecode(encoded) == decoded, "what is encoded is decoded");
  }
  (void)QueryText(request.query, "model");
  if (const auto number = QueryNumber(request.query, "window", 1, 100); number.ok() && *number) {
    MOESERVE_CHECK(**number >= 1 && **number <= 100, "a number in its range");
  }
  if (const auto number = QueryInteger(request.query, "top", 1, 50); number.ok() && *number) {
    MOESERVE_CHECK(**number >= 1 && **number <= 50, "an integer in its range");
  }
  static const HostCheck* const hosts =
      new HostCheck(*HostCheck::Parse({"localhost", "127.0.0.1", "::1"}));
  if (!hosts->Check(request) && !request.host.empty()) {
    const auto host = HostOf(request.host);
    MOESERVE_CHECK(host == "localhost" || host == "127.0.0.1" || host == "::1", "a known host");
  }
  (void)ChooseExposition(request.accept);
  (void)ParseTraceParent(head.traceparent);
}

bool Same(const RequestHead& a, const RequestHead& b) {
  const Request& x = a.request;
  const Request& y = b.request;
  return x.method == y.method && x.path == y.path && x.query == y.query && x.body == y.body &&
         x.host == y.host && x.origin == y.origin && x.authorization == y.authorization &&
         x.content_type == y.content_type && x.inference_header == y.inference_header &&
         a.keep_alive == b.keep_alive && a.http_1_0 == b.http_1_0 && a.head_only == b.head_only &&
         a.traceparent == b.traceparent;
}

}  // namespace
}  // namespace moeserve::server::http

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;                // NOLINT(google-build-using-namespace)
  using namespace moeserve::server::http;  // NOLINT(google-build-using-namespace)
  testing::Input input(data, size);
  const size_t step = size_t{1} + input.Byte();
  static const server::HttpLimits small = FuzzedLimits();
  static const server::HttpLimits usual;
  const server::HttpLimits& limits = step % 2 == 0 ? small : usual;
  const RequestOutcome whole = ReadHttp(input.rest(), input.rest().size() + 1, limits);
  const RequestOutcome parts = ReadHttp(input.rest(), step, limits);
  // A head or a chunk's line that is not complete may be refused early or later, but it is never
  // accepted.
  MOESERVE_CHECK(whole.refused == parts.refused || whole.waiting || parts.waiting,
                 "how bytes arrive does not change the verdict");
  MOESERVE_CHECK(whole.requests.size() == parts.requests.size(), "the same number of requests");
  for (size_t i = 0; i < whole.requests.size(); ++i) {
    MOESERVE_CHECK(Same(whole.requests[i], parts.requests[i]), "the same requests");
    CheckUrl(whole.requests[i]);
  }
  if (!whole.requests.empty()) testing::CountAccepted();
  return 0;
}
