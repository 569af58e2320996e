// Converts between protobuf messages and the bytes that gRPC receives and sends. gRPC's own
// conversion answers UNIMPLEMENTED to a message that it cannot parse, and inflates compressed
// messages without a limit.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "server/base/memory_budget.h"
#include "server/rpc/methods.h"

namespace moeserve::server::rpc {

// Limit on a message of a client, both as it is sent and inflated.
inline constexpr int kMaxMessageBytes = 16 << 20;

// Inflates `bytes` if they are compressed (gzip, deflate) and parses them. What the message will
// take is added to `charge` before; of bytes that are not compressed, what it takes beyond their
// length, which the frame guard has charged. InvalidArgument with code "invalid_message", which
// names `method` and the type, if the bytes are not such a message; ResourceExhausted with code
// "request_too_large" beyond the limit, or the error of `charge`. May throw std::bad_alloc.
absl::Status ParseMessage(const Method& method, grpc::ByteBuffer& bytes, MemoryCharge& charge,
                          google::protobuf::Message& message);

// Replaces `bytes` by the serialized message.
void SerializeMessage(const google::protobuf::Message& message, grpc::ByteBuffer& bytes);

// The errors of calls that must have exactly one message. Other servers answer INTERNAL; here it is
// InvalidArgument with code "invalid_message", because INTERNAL stands for faults of the server,
// which are logged and alerted on.
absl::Status NoMessage(const Method& method);
absl::Status SecondMessage(const Method& method);

}  // namespace moeserve::server::rpc
