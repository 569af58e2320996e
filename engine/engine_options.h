// Resolves the defaults of an engine's options for a model.
#pragma once

#include <cstdint>

#include "engine/engine.h"

namespace moeserve {

// The options with every default filled in. InvalidArgument names the option, what was expected and
// what was found.
//
// `device_step_rows`: rows of a step that suit the device. `look_floats`: memory that a token's
// router scores and inputs take in a step that reports them; steps are made small enough for it.
Result<EngineOptions> Resolved(const EngineOptions& options, const ModelSpec& spec,
                               int device_step_rows, int64_t look_floats);

// Returns the number of KV cache blocks, of `block_bytes` each over all layers. ResourceExhausted:
// the memory does not hold one sequence of max_model_len.
Result<int64_t> CacheBlocks(const EngineOptions& options, int64_t block_bytes);

// Options of the recorder of expert statistics.
RecorderOptions RecorderSettings(const EngineOptions& options);

}  // namespace moeserve
