// Runs calls that do not wait for the engine.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <exception>

#include "server/rpc/call.h"

namespace moeserve::server::rpc {

// Runs and finishes a call: `body`, which gets the call's key or null, computes the response.
template <typename Body>
grpc::ServerUnaryReactor* Immediately(grpc::CallbackServerContext* context, ServerContext& server,
                                      const Method& method, Body&& body) {
  Call call(context, server, method);
  absl::Status status = call.Check();
  if (status.ok()) {
    try {
      status = body(call.key().get());
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(call.End(status));
  return reactor;
}

}  // namespace moeserve::server::rpc
