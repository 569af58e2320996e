// gRPC calls to services for whose messages the tests have no generated classes.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

namespace moeserve::server::testing {

// Sends one serialized message and receives the first response message. `streaming` must be true if
// the method is a stream. Each of `authorizations` becomes the value of one such metadata entry.
grpc::Status GenericUnaryCall(const std::shared_ptr<grpc::Channel>& channel,
                              const std::string& method, const std::string& request,
                              std::string* response, bool streaming = false,
                              const std::vector<std::string>& authorizations = {});

}  // namespace moeserve::server::testing
