// Maps the method and path of a request to a handler.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/auth.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// kOperator routes are open, and are served even when the server has too many connections.
enum class Access { kOperator, kOpen, kKey };

// The duration of a handler. kSlow handlers do not run on the I/O thread, which all connections
// share.
enum class Work { kQuick, kSlow };

using Handler = std::function<Handled(const Request&)>;

// Thread-safe once all routes are added.
class Router {
 public:
  explicit Router(const ApiKeys& keys) : keys_(keys) {}  // `keys` must outlive the router

  // A pattern that ends in '*' matches every longer path. GET handlers also handle HEAD.
  void Add(std::string_view method, std::string_view pattern, Access access, Work work,
           Handler handler);

  // Returns the pattern that the path matches, or "other". Used as a label of metrics.
  std::string_view Endpoint(std::string_view path) const;

  // Returns the response if it does not depend on the body: 401, 404, 405, 415, or the response to
  // OPTIONS. Otherwise returns nullopt.
  std::optional<Response> CheckBeforeBody(const Request& request) const;

  // Returns whether the request is for an Access::kOperator route.
  bool ForOperators(const Request& request) const;

  // Returns the duration class of the handler. Requires that CheckBeforeBody() returned nullopt for
  // `request`.
  Work WorkOf(const Request& request) const;
  // Runs the handler. Requires that CheckBeforeBody() returned nullopt for `request`. Does not
  // throw.
  Handled Handle(const Request& request) const;

 private:
  struct Route {
    std::string method;
    std::string pattern;
    Access access;
    Work work;
    Handler handler;
  };

  const Route* Find(std::string_view method, std::string_view path) const;

  const ApiKeys& keys_;
  std::vector<Route> routes_;
};

}  // namespace moeserve::server::http
