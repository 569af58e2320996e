// What the bench commands say before the work begins: the sizes of the model, and what is measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "engine/model/model.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"
#include "server/bench/bench_cases.h"
#include "server/bench/load_test/driver.h"
#include "server/bench/load_test/workload.h"

namespace moeserve::server {

// All texts are lines that end in a newline.

// Returns the architecture and the numbers of parameters.
std::string ModelPlan(std::string_view name, const ModelSpec& spec);

// Returns the bytes that the weights take in memory, without those that a device's layout adds.
int64_t PlannedWeightBytes(const ModelSpec& spec, const ModelOptions& types);

// Returns the memory that a run takes: weights, KV cache and `probe_bytes` (0: none) for measuring
// the bandwidth.
std::string MemoryPlan(const ModelSpec& spec, const ModelOptions& types, int64_t cache_bytes,
                       std::string_view cache_text, int64_t probe_bytes);

// Returns the bytes of the KV cache that an engine with these options makes. An error of the
// options is left to the engine: nullopt.
std::optional<int64_t> PlannedCacheBytes(const EngineOptions& options, const ModelSpec& spec,
                                         const Backend& backend, KvCacheType type);

// Returns what MeasureCases() measures.
std::string CasesPlan(const CaseSettings& settings);

// Returns the requests of a load; `warmup` is the number of those before the measurement.
std::string LoadPlan(const LoadOptions& load, const Workload& workload, int64_t warmup);

}  // namespace moeserve::server
