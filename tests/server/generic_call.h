// Calls of services whose messages have no generated classes here.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace moeserve::server::testing {

// Sends one serialised message and takes the first one that comes back. `streaming`: the method is
// a bidirectional stream.
grpc::Status GenericUnaryCall(const std::shared_ptr<grpc::Channel>& channel,
                              const std::string& method, const std::string& request,
                              std::string* response, bool streaming = false);

}  // namespace moeserve::server::testing
