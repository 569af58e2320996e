// Cross-origin resource sharing: lets web pages of listed origins use the server. Without it,
// browsers do not let a page of another origin read the server's answers, or send JSON to it.
//
// Browsers send the credentials of a user (cookies, client certificates) only if the server agrees,
// which this one never does; a page sends an API key as a header.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/http/types.h"

namespace moeserve::server::http {

class Cors {
 public:
  // Allows no origin.
  Cors() = default;

  // Allows the pages of `origins`: each "SCHEME://HOST" or "SCHEME://HOST:PORT", or "*" for all
  // origins. InvalidArgument for anything else.
  static Result<Cors> Parse(const std::vector<std::string>& origins);

  bool enabled() const { return any_ || !origins_.empty(); }
  // Returns whether the page that sent the request has an origin that is listed by its name.
  bool Lists(const Request& request) const;
  // Returns the origins as they were parsed.
  std::vector<std::string> origins() const;

  // Adds the headers that let a browser hand the answer to the page, if its origin is allowed. To
  // the answer of a preflight (OPTIONS with Access-Control-Request-Method), also adds what the page
  // may send; takes the methods from the header Allow in `headers`.
  void AddHeaders(const Request& request,
                  std::vector<std::pair<std::string, std::string>>& headers) const;

 private:
  bool any_ = false;
  std::vector<std::string> origins_;  // as browsers send them
};

}  // namespace moeserve::server::http
