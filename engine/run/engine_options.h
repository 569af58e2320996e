// Replaces the defaults in an engine's options by values that suit a model.
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "engine/memory/memory_pool.h"

namespace moeserve {

// Returns the options with every default filled in. InvalidArgument names the option, what was
// expected and what was found.
//
// `device_step_rows` is the number of rows in a step that suits the device, `device_draft_tokens`
// what kDefaultDraftTokens stands for. `report_floats` is the
// number of f32 values that the reported router scores and router inputs of one token take;
// max_step_tokens is lowered so that the reported rows of a step stay below a fixed size.
Result<EngineOptions> Resolved(const EngineOptions& options, const ModelSpec& spec,
                               int device_step_rows, int device_draft_tokens,
                               int64_t report_floats);

// Returns how many pages sequences of a model hold. `options` are resolved.
PageUse PageUseOf(const EngineOptions& options, const ModelSpec& spec, bool draft_model);

// Returns the number of pages of the KV cache; a page takes `page_bytes` over all layers.
// ResourceExhausted if the memory does not hold one sequence of max_model_len tokens.
Result<int64_t> CachePages(const EngineOptions& options, const PageUse& use, int64_t page_bytes);

// Returns `options.recorder`, adjusted to the other options: any_selection is set if requests may
// override routing; token_counts_bytes and hidden_samples are 0 if expert_stats is false.
RecorderOptions RecorderSettings(const EngineOptions& options);

}  // namespace moeserve
