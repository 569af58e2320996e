// Estimates the memory that a message takes when it is parsed. A field of two bytes can become an
// object of hundreds, so the length of a message says little.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstddef>

namespace moeserve::server::rpc {

// Reads serialized bytes of a message of the given type, to their end or to the first error, and
// returns at least what the message will take, give or take the allocator's overhead. Stops when
// that is more than `most`.
size_t ParsedBytes(const google::protobuf::Descriptor& type,
                   google::protobuf::io::ZeroCopyInputStream& bytes, size_t most);

}  // namespace moeserve::server::rpc
