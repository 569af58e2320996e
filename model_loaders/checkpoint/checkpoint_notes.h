// What the readers of folders and of GGUF files say about a checkpoint.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/loader.h"

namespace moeserve {

// Returns Checkpoint::notes. `ignored` are the names of stored tensors that the model does not
// need.
std::vector<std::string> CheckpointNotes(const CheckpointConfig& config,
                                         const std::vector<std::string>& ignored,
                                         const LoadOptions& options);

// Sets why texts are shorter than the files say, and warns of it.
void SetContextReason(const CheckpointConfig& config, Checkpoint* checkpoint);

// Returns the text of config.json, and after it the keys that are ignored, because the model
// without them is another one. For Identify().
std::string IdentityText(std::string_view config_text, const LoadOptions& options);

}  // namespace moeserve
