// What an engine's options come to for a model.
#pragma once

#include <cstdint>

#include "engine/engine.h"

namespace moeserve {

// The options with every default filled in. InvalidArgument names the option, what was expected and
// what was found.
Result<EngineOptions> Resolved(const EngineOptions& options, const ModelSpec& spec,
                               int device_step_rows);

// Blocks of the KV cache, of `block_bytes` each over all layers. ResourceExhausted where the memory
// does not hold one sequence of max_model_len.
Result<int64_t> CacheBlocks(const EngineOptions& options, int64_t block_bytes);

// Of the recorder of expert statistics.
RecorderOptions RecorderSettings(const EngineOptions& options);

}  // namespace moeserve
