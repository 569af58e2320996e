#include "server/http/checks/cors.h"

#include <algorithm>
#include <optional>

#include "base/error_text.h"
#include "server/base/text_values.h"
#include "server/http/checks/host_check.h"

namespace moeserve::server::http {
namespace {

// Limits on the header names that a preflight asks for and that the answer repeats.
constexpr size_t kMaxNamesBytes = 2 << 10;
constexpr int kMaxNames = 64;

// For how long browsers may keep the answer to a preflight.
constexpr std::string_view kMaxAge = "600";

// What pages may read in addition to the headers that browsers always show.
constexpr std::string_view kExposed =
    "X-Request-Id, traceparent, Retry-After, WWW-Authenticate, x-should-retry, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    "Inference-Header-Content-Length, Content-Disposition";

bool IsScheme(std::string_view text) {
  if (text.empty() || text.size() > 32 || text.front() < 'a' || text.front() > 'z') return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.';
  });
}

// Returns the origin as browsers write it: in lower case, without the scheme's usual port.
std::optional<std::string> Normalized(std::string_view text) {
  std::string origin = LowerCase(text);
  const size_t separator = origin.find("://");
  if (separator == std::string::npos) return std::nullopt;
  const std::string scheme = origin.substr(0, separator);
  const std::string authority = origin.substr(separator + 3);
  if (!IsScheme(scheme) || !HostOf(authority) || authority.ends_with(':')) return std::nullopt;
  for (const auto& [name, port] : {std::pair("http", ":80"), std::pair("https", ":443")}) {
    if (scheme == name && origin.ends_with(port)) {
      origin.resize(origin.size() - std::string_view(port).size());
      break;
    }
  }
  return origin;
}

bool IsHeaderNameChar(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_';
}

// Returns the header names of "NAME, NAME"; empty if there are too many, or one is not plain.
std::string HeaderNames(std::string_view list) {
  if (list.size() > kMaxNamesBytes) return {};
  int names = 1;
  bool in_name = false;
  for (const char c : list) {
    if (c == ',') {
      ++names;
      in_name = false;
    } else if (IsHeaderNameChar(c)) {
      in_name = true;
    } else if (c != ' ') {
      return {};
    }
  }
  return names <= kMaxNames && in_name ? std::string(list) : std::string();
}

}  // namespace

Result<Cors> Cors::Parse(const std::vector<std::string>& origins) {
  Cors out;
  for (const std::string& text : origins) {
    if (text == "*") {
      out.any_ = true;
      continue;
    }
    std::optional<std::string> origin = Normalized(text);
    if (!origin) {
      return absl::InvalidArgumentError(
          Concat("expected the origin of web pages, such as https://example.org, or *, found ",
                 Quoted(text, kShownBytes)));
    }
    out.origins_.push_back(*std::move(origin));
  }
  return out;
}

std::vector<std::string> Cors::origins() const {
  std::vector<std::string> out = origins_;
  if (any_) out.push_back("*");
  return out;
}

bool Cors::Lists(const Request& request) const {
  return !request.origin.empty() &&
         std::find(origins_.begin(), origins_.end(), request.origin) != origins_.end();
}

void Cors::AddHeaders(const Request& request,
                      std::vector<std::pair<std::string, std::string>>& headers) const {
  if (!enabled()) return;
  const bool preflight = request.method == "OPTIONS" && !request.cors_method.empty();
  // The answer depends on the origin, which caches must know, also if there is none.
  if (!any_) headers.emplace_back("Vary", "Origin");
  if (request.origin.empty() || (!any_ && !Lists(request))) return;
  headers.emplace_back("Access-Control-Allow-Origin", any_ ? "*" : request.origin);
  if (!preflight) {
    headers.emplace_back("Access-Control-Expose-Headers", kExposed);
    return;
  }
  const auto allow = std::find_if(headers.begin(), headers.end(),
                                  [](const auto& header) { return header.first == "Allow"; });
  if (allow == headers.end()) return;  // there is no such route
  const std::string methods = allow->second;
  headers.emplace_back("Access-Control-Allow-Methods", methods);
  if (std::string names = HeaderNames(request.cors_headers); !names.empty()) {
    headers.emplace_back("Access-Control-Allow-Headers", std::move(names));
    headers.emplace_back("Vary", "Access-Control-Request-Headers");
  }
  headers.emplace_back("Access-Control-Max-Age", kMaxAge);
}

}  // namespace moeserve::server::http
