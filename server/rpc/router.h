// Finds the code that runs a call. The calls are generic, that is, exchanged with gRPC as bytes:
// message_bytes.h says why.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <functional>
#include <map>
#include <string>

#include "server/context.h"
#include "server/rpc/calls/single_request.h"
#include "server/rpc/methods.h"

namespace moeserve::server::rpc {

class Router final : public grpc::CallbackGenericService {
 public:
  // Starts a call and returns its reactor, which is never null and deletes itself.
  using Starter =
      std::function<grpc::ServerGenericBidiReactor*(grpc::GenericCallbackServerContext*)>;

  // `server` must outlive the router and every call.
  explicit Router(ServerContext& server) : server_(server) {}

  // Must be called before the gRPC server starts, once for each call. `method` must be one of
  // kMethods, or need no key.
  void Add(const Method& method, Starter starter);

  // Adds a call that does not wait for the engine (see ImmediateCall) and takes little memory.
  template <typename Request, typename Response>
  void AddImmediate(const Method& method, absl::Status (*body)(ServerContext&, const ApiKey*,
                                                               const Request&, Response&)) {
    AddBody<Request, Response>(
        method, [this, body](const ApiKey* key, const Request& request, Response& response,
                             MemoryCharge&) { return body(server_, key, request, response); });
  }

  // Adds a call that does not wait for the engine and charges what its response takes.
  template <typename Request, typename Response>
  void AddCharged(const Method& method,
                  absl::Status (*body)(ServerContext&, const ApiKey*, const Request&, Response&,
                                       MemoryCharge&)) {
    AddBody<Request, Response>(
        method, [this, body](auto&&... arguments) { return body(server_, arguments...); });
  }

  // Returns whether the call has been added.
  bool Has(const Method& method) const;

  // An unknown call is answered UNIMPLEMENTED.
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  template <typename Request, typename Response, typename Body>
  void AddBody(const Method& method, Body body) {
    Add(method, [this, &method, body](grpc::GenericCallbackServerContext* context) {
      using Type = ImmediateCall<Request, Response, Body>;
      return Type::template Start<Type>(context, server_, method, body);
    });
  }

  ServerContext& server_;
  std::map<std::string, Starter, std::less<>> starters_;  // by path
};

}  // namespace moeserve::server::rpc
