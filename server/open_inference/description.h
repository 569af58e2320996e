// The tensors of models, as the protocol's metadata describes them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "engine/validate_request.h"
#include "server/base/json.h"

namespace moeserve::server {

struct TensorDescription {
  std::string_view name;
  std::string_view datatype;
};

// What a model answers.
enum class InferKind : uint8_t { kText, kVectors, kLabels };
inline InferKind InferKindOf(const ModelSpec& spec) {
  if (Computes(spec, nullptr)) return InferKind::kText;
  return spec.head.kind == HeadKind::kSequenceClassification ? InferKind::kLabels
                                                             : InferKind::kVectors;
}

// Every tensor has one dimension of any size, but for matrices, which have two.
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

inline constexpr TensorDescription kTextsInputs[] = {
    {"text_input", "BYTES"},
    {"prompt_name", "BYTES"},
    {"dimensions", "INT32"},
    {"truncate_prompt_tokens", "INT32"},
};
inline constexpr TensorDescription kVectorOutputs[] = {
    {"embedding", "FP32"},
    {"num_input_tokens", "UINT32"},
};
inline constexpr TensorDescription kLabelOutputs[] = {
    {"label", "BYTES"},
    {"scores", "FP32"},
    {"num_input_tokens", "UINT32"},
};
constexpr bool IsMatrix(const TensorDescription& tensor) {
  return tensor.name == "embedding" || tensor.name == "scores";
}

struct ModelTensors {
  std::span<const TensorDescription> inputs, outputs;
};
inline ModelTensors TensorsOf(InferKind kind) {
  if (kind == InferKind::kText) return {kInferInputs, kInferOutputs};
  if (kind == InferKind::kLabels) return {kTextsInputs, kLabelOutputs};
  return {kTextsInputs, kVectorOutputs};
}

inline constexpr std::string_view kInferPlatform = "moeserve";
inline constexpr std::string_view kInferExtensions[] = {"binary_tensor_data", "generate",
                                                        "model_repository"};

}  // namespace moeserve::server
