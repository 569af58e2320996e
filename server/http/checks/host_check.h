// Refuses requests to host names that are not the server's. A web page can make its own host name
// resolve to 127.0.0.1 (DNS rebinding), and then reads the server's answers as those of its own
// host. The browser still sends the page's host name in Host and Origin.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// The bytes of a host or origin that errors show at most.
inline constexpr size_t kShownBytes = 64;

class HostCheck {
 public:
  // Allows every host.
  HostCheck() = default;

  // Allows the hosts `names`: host names and IP addresses without a port, an IPv6 address with or
  // without brackets, in any case; "*" allows every host. InvalidArgument for anything else.
  static Result<HostCheck> Parse(const std::vector<std::string>& names);

  // Returns the response to a request that is refused: 403 with code "host_not_allowed" because of
  // its Host, or "origin_not_allowed" because the page that sent it has another host. A request
  // without Host is allowed, because no browser sends one. With `origin_allowed`, the operator has
  // allowed the page in another way (Cors), and only Host is checked.
  std::optional<Response> Check(const Request& request, bool origin_allowed = false) const;

 private:
  bool Allows(std::string_view host) const;

  std::vector<std::string> hosts_;  // lower case, no brackets; empty: every host
};

// Returns the host of "HOST" or "HOST:PORT" in lower case, an IPv6 address without its brackets;
// nullopt if `text` is neither.
std::optional<std::string> HostOf(std::string_view text);

}  // namespace moeserve::server::http
