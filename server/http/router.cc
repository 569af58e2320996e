#include "server/http/router.h"

#include <algorithm>
#include <exception>

#include "base/error_text.h"
#include "server/http/encoding/content_coding.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {
namespace {

// Limit on the bodies of requests to routes that need no key.
constexpr size_t kMaxOpenBody = 4 << 10;

bool Matches(std::string_view pattern, std::string_view path) {
  if (!pattern.ends_with('*')) return pattern == path;
  pattern.remove_suffix(1);
  return path.size() > pattern.size() && path.starts_with(pattern);
}

// Returns whether the content type is "application/json", with or without parameters.
bool IsJson(std::string_view content_type) {
  std::string_view type = content_type.substr(0, content_type.find(';'));
  while (!type.empty() && (type.back() == ' ' || type.back() == '\t')) type.remove_suffix(1);
  constexpr std::string_view kJson = "application/json";
  if (type.size() != kJson.size()) return false;
  for (size_t i = 0; i < type.size(); ++i) {
    const char c = type[i] >= 'A' && type[i] <= 'Z' ? static_cast<char>(type[i] + 32) : type[i];
    if (c != kJson[i]) return false;
  }
  return true;
}

}  // namespace

void Router::Add(std::string_view method, std::string_view pattern, Access access, Work work,
                 Handler handler, BodyType body) {
  routes_.push_back(
      {std::string(method), std::string(pattern), access, work, std::move(handler), body});
}

const Router::Route* Router::Find(std::string_view method, std::string_view path) const {
  if (method == "HEAD") method = "GET";
  for (const Route& route : routes_) {
    if (route.method == method && Matches(route.pattern, path)) return &route;
  }
  return nullptr;
}

std::optional<std::string> Router::Meant(std::string_view path) const {
  constexpr std::string_view kVersion = "/v1";
  std::string_view rest = path;
  while (rest.ends_with('/')) rest.remove_suffix(1);
  std::vector<std::string> candidates = {std::string(rest), Concat(kVersion, rest)};
  if (rest.starts_with(kVersion)) candidates.emplace_back(rest.substr(kVersion.size()));
  for (std::string& candidate : candidates) {
    // Only addresses without a variable part, so that nothing of the client's is repeated.
    const bool exists = std::any_of(routes_.begin(), routes_.end(), [&](const Route& route) {
      return route.pattern == candidate && candidate != path;
    });
    if (exists) return std::move(candidate);
  }
  return std::nullopt;
}

std::string_view Router::Endpoint(std::string_view path) const {
  for (const Route& route : routes_) {
    if (Matches(route.pattern, path)) return route.pattern;
  }
  return "other";
}

std::optional<Response> Router::CheckBeforeBody(Request& request) const {
  bool known = false;
  bool open = false;
  std::string allowed;
  for (const Route& route : routes_) {
    if (!Matches(route.pattern, request.path)) continue;
    known = true;
    open = open || !route.access.needs_key();
    if (!allowed.empty()) allowed += ", ";
    allowed += route.method;
    if (route.method == "GET") allowed += ", HEAD";
  }
  if (request.method == "OPTIONS") {
    Response response;
    response.status = 204;
    if (known) response.headers.emplace_back("Allow", allowed);
    return response;
  }
  if (!open) {
    auto key = keys_.Authenticate(request.authorization);
    if (!key.ok()) return ErrorResponse(key.status());
    request.key = *std::move(key);
  }
  if (!known) {
    std::string message = Concat("there is no ", Printable(request.path, 64));
    if (const auto meant = Meant(request.path)) message += Concat("; did you mean ", *meant, "?");
    return ProtocolError(404, "", std::move(message));
  }
  const Route* const route = Find(request.method, request.path);
  if (route == nullptr) {
    Response response =
        ProtocolError(405, "method_not_allowed", Concat("this address takes ", allowed));
    response.headers.emplace_back("Allow", allowed);
    return response;
  }
  if (request.key != nullptr) {
    if (const auto status = request.key->RequireAnyOf(route->access.scopes()); !status.ok()) {
      return ErrorResponse(status);
    }
  }
  if (request.method == "POST") {
    const bool any_type = route->body == BodyType::kAny && request.origin.empty();
    if (!any_type && !IsJson(request.content_type)) {
      return ProtocolError(415, "unsupported_media_type",
                           "the Content-Type must be application/json");
    }
    if (ParseContentEncoding(request.content_encoding) == ContentCoding::kOther) {
      Response response = ProtocolError(415, "unsupported_media_type",
                                        "bodies may be compressed with gzip, and not otherwise");
      response.headers.emplace_back("Accept-Encoding", kGzip);
      return response;
    }
  }
  if (request.key != nullptr) {
    if (const auto status = request.key->TakeRequest(); !status.ok()) return ErrorResponse(status);
  }
  return std::nullopt;
}

size_t Router::BodyLimit(const Request& request, size_t most) const {
  return Find(request.method, request.path)->access.needs_key() ? most
                                                                : std::min(most, kMaxOpenBody);
}

bool Router::ForOperators(const Request& request) const {
  const Route* route = Find(request.method, request.path);
  return route != nullptr && route->access.for_operators();
}

Work Router::WorkOf(const Request& request) const {
  return Find(request.method, request.path)->work;
}

Handled Router::Handle(const Request& request) const {
  try {
    return Find(request.method, request.path)->handler(request);
  } catch (const std::exception& error) {
    return ErrorResponse(absl::InternalError(error.what()));
  }
}

}  // namespace moeserve::server::http
