// Compares the tensors of a folder with those that its configuration requires.
#pragma once

#include <optional>

#include "base/status.h"
#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// `type` as a type of weights; nothing for integers and others.
std::optional<DType> WeightType(ElementType type);

// OK if the files hold exactly the stored tensors that RequiredTensors(config.spec) are parts of
// (StoredParts()), each in its shape and in a type of weights or, where config.quantization asks
// for it, as integers. Otherwise InvalidArgument: file, tensor, expected, found, and the
// configuration key it follows from; the first few faults are listed and the rest counted. Tensors
// that the family ignores are not looked at.
absl::Status CheckTensors(const CheckpointConfig& config, const WeightFiles& weights);

}  // namespace moeserve
