// Where GGUF files store the tensors of recurrent mixers.
#pragma once

#include <span>

#include "model_loaders/architectures/gguf/gguf_families.h"
#include "model_loaders/architectures/name_table.h"

namespace moeserve {

// Returns the tensors of the mixer that layers without attention have, and the keys of its
// settings.
std::span<const TensorRule> RecurrentTensors(GgufFamily::Recurrent recurrent);
std::span<const KeyRule> RecurrentKeys(GgufFamily::Recurrent recurrent);

// Sets how a tensor of a recurrent mixer `block` is stored, where that depends on its settings:
// heads of values may be `tiled`, and norms of state spaces are matrices. `name` is that of the
// tensor in the model.
void PlaceRecurrent(std::string_view name, const BlockSpec& block, bool tiled, TensorPlace& place);

}  // namespace moeserve
