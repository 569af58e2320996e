// Maps method and path to a handler.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/auth.h"
#include "server/http/types.h"

namespace moeserve::server::http {

enum class Access { kOpen, kKey };

// How long a handler takes. kSlow handlers do not run on the io thread, which all connections
// share.
enum class Work { kQuick, kSlow };

using Handler = std::function<Handled(const Request&)>;

// Thread-safe once all routes are added.
class Router {
 public:
  explicit Router(const ApiKeys& keys) : keys_(keys) {}  // outlives this

  // A pattern that ends in '*' matches every longer path. GET handlers answer HEAD as well.
  void Add(std::string_view method, std::string_view pattern, Access access, Work work,
           Handler handler);

  // Returns the pattern that the path matches, or "other"; for metrics.
  std::string_view Endpoint(std::string_view path) const;

  // Returns the answer if it does not depend on the body: 401, 404, 405, 415, or that to OPTIONS.
  std::optional<Response> CheckBeforeBody(const Request& request) const;

  // For a request that passed CheckBeforeBody.
  Work WorkOf(const Request& request) const;
  // For a request that passed CheckBeforeBody. Does not throw.
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
