// What every layer of a step needs to see.
#pragma once

#include <cstdint>
#include <span>

#include "engine/layers/workspace.h"
#include "engine/model/batch.h"
#include "kernels/backend.h"

namespace moeserve {

// What hooks look at of a routed block after the step, f32 and dense; without data: not wanted.
struct KeptRows {
  RowsView scores;  // [rows, E]
  RowsView inputs;  // [rows, c]
};

struct StepContext {
  Backend& backend;
  Workspace& workspace;
  DType activation;  // type of products' inputs: f32 or bf16
  const Batch& batch;
  KvCacheStorage& cache;
  StepHooks* hooks;    // may be null
  bool hooks_at_once;  // tell the hooks of a block as soon as it routed; else after the step
  std::span<const KeptRows> kept;  // by PlanSlot(); empty: nothing is kept for after the step
};

}  // namespace moeserve
