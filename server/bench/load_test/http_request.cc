#include <charconv>

#include "base/error_text.h"
#include "server/base/json.h"
#include "server/base/text_values.h"
#include "server/bench/load_test/http_target.h"

namespace moeserve::server {

Result<BaseUrl> ParseBaseUrl(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    return absl::InvalidArgumentError(
        Concat("expected a URL such as http://127.0.0.1:8080/v1, found ", Quoted(text), why));
  };
  constexpr std::string_view kScheme = "http://";
  if (text.starts_with("https://")) return refuse(": https is not supported");
  if (!text.starts_with(kScheme)) return refuse("");
  for (const char c : text) {
    // Refuse characters that would end the request line or a header, user names, queries and
    // fragments.
    if (c <= ' ' || c >= 0x7f || c == '@' || c == '?' || c == '#') return refuse("");
  }
  std::string_view rest = text.substr(kScheme.size());
  const size_t slash = rest.find('/');
  BaseUrl url;
  url.authority = std::string(rest.substr(0, slash));
  if (slash != std::string_view::npos) url.path = std::string(rest.substr(slash));
  while (url.path.ends_with('/')) url.path.pop_back();
  const bool bracketed = url.authority.ends_with(']');
  const bool has_port = !bracketed && url.authority.find(':') != std::string::npos;
  const auto parsed = ParseHostPort(has_port ? url.authority : url.authority + ":80");
  if (!parsed.ok() || parsed->host.empty() || parsed->port == 0) return refuse("");
  url.host = parsed->host;
  url.port = parsed->port;
  return url;
}

std::string CompletionBody(const LoadRequest& request, const HttpTargetOptions& options) {
  const auto quoted = [](const std::string& text) {
    return Json(text).dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  };
  std::string body = "{\"model\":" + quoted(options.served_model) + ",\"prompt\":";
  if (request.prompt.empty()) {
    body += quoted(request.text);
  } else {
    body.reserve(body.size() + 8 * request.prompt.size() + 256);
    char separator = '[';
    for (const TokenId id : request.prompt) {
      char digits[16];
      const auto end = std::to_chars(digits, digits + sizeof(digits), id).ptr;
      body.push_back(separator);
      body.append(digits, end);
      separator = ',';
    }
    body.push_back(']');
  }
  body += Concat(",\"max_tokens\":", request.output_tokens,
                 ",\"temperature\":0,\"ignore_eos\":true,\"stream\":true,"
                 "\"stream_options\":{\"include_usage\":true}");
  if (options.token_ids) body += ",\"return_token_ids\":true";
  body += '}';
  return body;
}

}  // namespace moeserve::server
