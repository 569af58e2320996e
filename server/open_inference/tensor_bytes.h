// The elements of tensors as bytes: little-endian numbers, and texts of which each follows its
// length in 4 bytes.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/open_inference/infer_request.h"

namespace moeserve::server {

// Sets tensor.data from `bytes`, according to its data type and shape. InvalidArgument, naming the
// tensor, unless there are exactly as many bytes as the shape needs.
absl::Status ReadElements(std::string_view bytes, InferTensor& tensor);

// Returns the bytes of tensor.data, which must have the elements of a valid tensor.
std::string ElementBytes(const InferTensor& tensor);

}  // namespace moeserve::server
