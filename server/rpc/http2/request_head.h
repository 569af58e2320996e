// Checks the header fields with which a call begins.
#pragma once

#include <optional>
#include <string>

#include "server/rpc/http2/header_block.h"
#include "server/rpc/http2/refusal.h"

namespace moeserve::server::rpc {

struct RequestHead {
  // Whether the call's messages may be compressed: grpc-encoding is gzip or deflate.
  bool compressed = false;
  std::string request_id;  // that the client has chosen; may be empty
};

// Checks `fields` against RFC 9113, section 8, and gRPC's protocol. A list of values in one binary
// field is replaced by one field for each value. Returns what is wrong, if anything is; otherwise
// fills `head`.
std::optional<Refusal> CheckRequestHead(HeaderFields& fields, RequestHead& head);

// Checks the fields with which a client ends a stream.
std::optional<Refusal> CheckTrailers(const HeaderFields& fields);

}  // namespace moeserve::server::rpc
