// Replaces the defaults in an engine's options by values that suit a model.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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

// Returns CacheShapes() with the page table of every layer: if some layers see all positions and
// others only a window, the latter have a second table. `options` are resolved.
std::vector<KvLayerShape> CacheLayers(const EngineOptions& options, const ModelSpec& spec);

// Returns how many pages of each of these tables a sequence holds. `options` are resolved.
std::vector<PageUse> PageUseOf(const EngineOptions& options, const ModelSpec& spec,
                               bool draft_model);

// Returns the bytes of a page of each of `tables` tables, over all layers of the table.
std::vector<int64_t> PageBytesOf(const Backend& backend, std::span<const KvLayerShape> layers,
                                 KvCacheType type, size_t tables);

// Returns the number of pages of each table of the KV cache; a page takes `page_bytes` over all
// layers of its table. max_num_seqs sequences of equal length can be as long as the memory allows.
// ResourceExhausted if the memory does not hold one sequence of max_model_len tokens.
Result<std::vector<int64_t>> CachePages(const EngineOptions& options, std::span<const PageUse> use,
                                        std::span<const int64_t> page_bytes);

// Returns `options.recorder`, adjusted to the other options: any_selection is set if requests may
// override routing; token_counts_bytes and hidden_samples are 0 if expert_stats is false.
RecorderOptions RecorderSettings(const EngineOptions& options);

}  // namespace moeserve
