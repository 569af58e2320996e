// What the gRPC library logs.
#pragma once

namespace moeserve::server::rpc {

// Sends what the gRPC library logs to the server's log. By itself the library writes to standard
// error, and its threads would wait for a reader that does not read. Its messages can contain what
// a client has sent, so only the place in the library's source is logged, unless the environment
// variable GRPC_VERBOSITY or GRPC_TRACE asks for them. At most ten lines per second are logged.
// Must be called before gRPC is used and after SetUpLogging().
void RouteGrpcLog();

}  // namespace moeserve::server::rpc
