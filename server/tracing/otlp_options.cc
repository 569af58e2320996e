#include "server/tracing/otlp_options.h"

#include <algorithm>

#include "base/error_text.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

bool IsToken(std::string_view text) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kOthers.find(c) != std::string_view::npos;
  });
}

bool IsVisible(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

}  // namespace

Result<OtlpEndpoint> ParseOtlpEndpoint(std::string_view url) {
  constexpr std::string_view kScheme = "http://";
  const auto refuse = [&](std::string_view why) {
    return absl::InvalidArgumentError(
        Concat("expected http://HOST:PORT of a collector, found ", Quoted(url, 200), why));
  };
  if (url.starts_with("https://")) {
    return refuse(
        "; https is not supported: send to a collector on this machine or network, which "
        "can pass the spans on over https");
  }
  if (!url.starts_with(kScheme) || !IsVisible(url)) return refuse("");
  std::string_view rest = url.substr(kScheme.size());
  OtlpEndpoint out;
  if (const size_t slash = rest.find('/'); slash != std::string_view::npos) {
    std::string_view path = rest.substr(slash);
    rest = rest.substr(0, slash);
    while (path.ends_with('/')) path.remove_suffix(1);
    out.path = Concat(path, out.path);
  }
  if (rest.empty() || rest.find('@') != std::string_view::npos) return refuse("");
  const size_t colon = rest.rfind(':');
  const size_t bracket = rest.rfind(']');
  const bool has_port = colon != rest.npos && (bracket == rest.npos || colon > bracket);
  const auto address = ParseHostPort(has_port ? std::string(rest) : Concat(rest, ":", out.port));
  if (!address.ok() || address->port == 0) return refuse("");
  out.host = address->host;
  out.port = address->port;
  return out;
}

Result<HttpHeaders> ParseOtlpHeaders(std::string_view text) {
  HttpHeaders out;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string header(text.substr(0, comma));
    text = comma == text.npos ? std::string_view() : text.substr(comma + 1);
    const size_t equals = header.find('=');
    const std::string name = header.substr(0, equals);
    const std::string value = equals == header.npos ? std::string() : header.substr(equals + 1);
    const bool valid =
        std::all_of(value.begin(), value.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
    if (equals == header.npos || !IsToken(name) || !valid) {
      return absl::InvalidArgumentError(Concat(
          "expected NAME=VALUE,NAME=VALUE with names and values of HTTP headers, but header ",
          out.size() + 1, " is none"));
    }
    out.emplace_back(name, value);
  }
  return out;
}

}  // namespace moeserve::server
