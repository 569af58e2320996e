// Compares the stored tensors of a folder with those that its configuration requires.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// Returns the weight type that `type` corresponds to; nullopt for integers and other types.
std::optional<DType> WeightType(ElementType type);

// Returns OK if the files contain exactly the stored tensors that RequiredTensors(config.spec) need
// (StoredParts()), each with its shape and with a floating-point weight type or, where
// config.quantization requires it or the elements are ids, as integers. Otherwise InvalidArgument
// with file, tensor, expected and found value, and the configuration key that determines the
// expected value; the first few errors are listed and the rest counted. Tensors that the family
// ignores are not checked. If `ignored` is set, it receives their names.
absl::Status CheckTensors(const CheckpointConfig& config, const WeightFiles& weights,
                          std::vector<std::string>* ignored = nullptr);

// Describes ignored tensors in one line for all whose names differ in numbers alone, such as
// "model.layers.*.self_attn.rotary_emb.inv_freq (24 tensors)".
std::vector<std::string> GroupedNames(const std::vector<std::string>& names);

}  // namespace moeserve
