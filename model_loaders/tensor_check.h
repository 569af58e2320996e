// Compares the tensors of a folder with those that its configuration implies.
#pragma once

#include <optional>

#include "base/status.h"
#include "engine/spec/weights.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// The format's element types that weights may have.
std::optional<DType> WeightType(ElementType type);

// OK if the files hold exactly RequiredTensors(config.spec), each in its shape and in a weight
// type, those that config.quantization makes integers as StoredTensors() says. Otherwise
// InvalidArgument: file, tensor, expected, found, and the configuration key it follows from; the
// first few faults are listed and the rest counted.
absl::Status CheckTensors(const NativeConfig& config, const WeightFiles& weights);

}  // namespace moeserve
