#include "server/http/checks/host_check.h"

#include <algorithm>

#include "base/error_text.h"
#include "server/base/text_values.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {
namespace {

constexpr size_t kMaxHostBytes = 255;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

bool IsHostChar(char c) {
  return (c >= 'a' && c <= 'z') || IsDigit(c) || c == '-' || c == '.' || c == '_';
}

bool IsAddressChar(char c) { return (c >= 'a' && c <= 'f') || IsDigit(c) || c == ':' || c == '.'; }

Response Refusal(std::string_view code, const std::string& message) {
  Response response = ProtocolError(403, code, message);
  response.close = true;
  return response;
}

}  // namespace

std::optional<std::string> HostOf(std::string_view text) {
  std::string host = LowerCase(text);
  std::string port;
  const bool bracket = host.starts_with('[');
  const size_t end = bracket ? host.find(']') : std::min(host.find(':'), host.size());
  if (end == std::string::npos) return std::nullopt;
  const size_t port_at = bracket ? end + 1 : end;
  if (port_at < host.size()) {
    if (host[port_at] != ':') return std::nullopt;
    port = host.substr(port_at + 1);
  }
  host = bracket ? host.substr(1, end - 1) : host.substr(0, end);
  if (host.empty() || host.size() > kMaxHostBytes) return std::nullopt;
  if (port.size() > 5 || !std::all_of(port.begin(), port.end(), IsDigit)) return std::nullopt;
  if (!std::all_of(host.begin(), host.end(), bracket ? IsAddressChar : IsHostChar)) {
    return std::nullopt;
  }
  // "localhost." is the same name as "localhost".
  if (!bracket && host.size() > 1 && host.ends_with('.')) host.pop_back();
  return host;
}

Result<HostCheck> HostCheck::Parse(const std::vector<std::string>& names) {
  HostCheck out;
  for (const std::string& name : names) {
    if (name == "*") return HostCheck();
    const bool address = std::count(name.begin(), name.end(), ':') > 1 && !name.starts_with('[');
    const auto host = HostOf(address ? Concat('[', name, ']') : name);
    const bool port = !address && !name.ends_with(']') && name.find(':') != std::string::npos;
    if (!host || port) {
      return absl::InvalidArgumentError(
          Concat("expected a host name or an IP address without a port, or *, found ",
                 Quoted(name, kShownBytes)));
    }
    out.hosts_.push_back(*host);
  }
  return out;
}

bool HostCheck::Allows(std::string_view host) const {
  return std::find(hosts_.begin(), hosts_.end(), host) != hosts_.end();
}

std::optional<Response> HostCheck::Check(const Request& request, bool origin_allowed) const {
  if (hosts_.empty()) return std::nullopt;
  if (!request.host.empty()) {
    const auto host = HostOf(request.host);
    if (!host || !Allows(*host)) {
      return Refusal("host_not_allowed",
                     Concat("the header Host names ", Printable(request.host, kShownBytes),
                            ", which is not a name of this server: use localhost, or start the "
                            "server with --allowed-hosts"));
    }
  }
  if (!request.origin.empty() && !origin_allowed) {
    const size_t scheme = request.origin.find("://");
    const auto origin = scheme == std::string::npos
                            ? std::nullopt
                            : HostOf(std::string_view(request.origin).substr(scheme + 3));
    if (!origin || !Allows(*origin)) {
      return Refusal("origin_not_allowed",
                     Concat("a web page of ", Printable(request.origin, kShownBytes),
                            " may not use this server, unless the server is started with "
                            "--cors-origin and the origin of the page, or with --allowed-hosts and "
                            "its host"));
    }
  }
  return std::nullopt;
}

}  // namespace moeserve::server::http
