// Maps the method and path of a request to a handler.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/http/types.h"
#include "server/keys/key_store.h"

namespace moeserve::server::http {

// Who may use a route. Every route states it.
class Access {
 public:
  // Everybody, and even when the server has too many connections.
  static constexpr Access Operator() { return Access(ScopeSet(), true); }
  static constexpr Access Open() { return Access(ScopeSet(), false); }  // everybody
  // On a server with keys: a key with one of these scopes, of which there is at least one.
  static constexpr Access Key(Scope scope) { return Access({scope}, false); }
  static constexpr Access AnyOf(Scope a, Scope b) { return Access({a, b}, false); }
  static constexpr Access AnyKey() { return Access(ScopeSet::All(), false); }

  bool for_operators() const { return for_operators_; }
  bool needs_key() const { return !scopes_.empty(); }
  ScopeSet scopes() const { return scopes_; }

 private:
  constexpr Access(ScopeSet scopes, bool for_operators)
      : scopes_(scopes), for_operators_(for_operators) {}

  ScopeSet scopes_;
  bool for_operators_;
};

// The duration of a handler. kSlow handlers do not run on the I/O thread, which all connections
// share.
enum class Work { kQuick, kSlow };

// What the body of a POST request may be. A web page can send JSON to a foreign server only if that
// allows it, and other bodies without asking, so a request of a page must have JSON in any case.
enum class BodyType { kJson, kAny };

using Handler = std::function<Handled(const Request&)>;

// Returns the handler that calls a member function of `routes`.
template <typename Routes, typename Function>
Handler HandlerOf(std::shared_ptr<Routes> routes, Function function) {
  return [routes = std::move(routes), function](const Request& request) -> Handled {
    return ((*routes).*function)(request);
  };
}

// Thread-safe once all routes are added.
class Router {
 public:
  struct Route {
    std::string method;
    std::string pattern;
    Access access;
    Work work;
    Handler handler;
    BodyType body = BodyType::kJson;
  };

  explicit Router(const KeyStore& keys) : keys_(keys) {}  // `keys` must outlive the router

  // A pattern that ends in '*' matches every longer path. GET handlers also handle HEAD.
  void Add(std::string_view method, std::string_view pattern, Access access, Work work,
           Handler handler, BodyType body = BodyType::kJson);

  // Returns the pattern that the path matches, or "other". Used as a label of metrics.
  std::string_view Endpoint(std::string_view path) const;
  // Returns the address that a client which asked for an unknown path probably means: with or
  // without the version that clients' base addresses often lack or repeat.
  std::optional<std::string> Meant(std::string_view path) const;

  const std::vector<Route>& routes() const { return routes_; }

  // Returns the response if it does not depend on the body: 401, 403, 404, 405, 415, 429, or the
  // response to OPTIONS. Otherwise returns nullopt. Sets request.key.
  std::optional<Response> CheckBeforeBody(Request& request) const;

  // Returns the limit on the request's body, at most `most` bytes: what needs no key needs no large
  // body either. Requires that CheckBeforeBody() returned nullopt for `request`.
  size_t BodyLimit(const Request& request, size_t most) const;

  // Returns whether the request is for an Access::Operator() route.
  bool ForOperators(const Request& request) const;

  // Returns the duration class of the handler. Requires that CheckBeforeBody() returned nullopt for
  // `request`.
  Work WorkOf(const Request& request) const;
  // Runs the handler. Requires that CheckBeforeBody() returned nullopt for `request`. Does not
  // throw.
  Handled Handle(const Request& request) const;

 private:
  const Route* Find(std::string_view method, std::string_view path) const;

  const KeyStore& keys_;
  std::vector<Route> routes_;
};

}  // namespace moeserve::server::http
