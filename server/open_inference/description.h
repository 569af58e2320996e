// The tensors of every model, as the protocol's metadata describes them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "server/base/json.h"

namespace moeserve::server {

struct TensorDescription {
  std::string_view name;
  std::string_view datatype;
};

// Every tensor has one dimension of any size.
inline constexpr TensorDescription kInferInputs[] = {
    {"text_input", "BYTES"},
    {"stream", "BOOL"},
    {"exclude_input_in_output", "BOOL"},
    {"sampling_parameters", "BYTES"},
    {"max_tokens", "INT32"},
    {"temperature", "FP32"},
    {"top_p", "FP32"},
    {"top_k", "INT32"},
    {"seed", "INT64"},
    {"stop", "BYTES"},
};
inline constexpr TensorDescription kInferOutputs[] = {
    {"text_output", "BYTES"},
    {"finish_reason", "BYTES"},
    {"num_input_tokens", "UINT32"},
    {"num_output_tokens", "UINT32"},
};

inline constexpr std::string_view kInferPlatform = "moeserve";
inline constexpr std::string_view kInferExtensions[] = {"binary_tensor_data", "generate",
                                                        "model_repository"};

}  // namespace moeserve::server
