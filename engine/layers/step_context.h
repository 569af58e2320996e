// What every layer of a step needs to see.
#pragma once

#include <cstdint>
#include <span>

#include "engine/batch.h"
#include "engine/layers/workspace.h"
#include "kernels/backend.h"

namespace moeserve {

struct StepContext {
  Backend& backend;
  Workspace& workspace;
  DType activation;  // type of products' inputs: f32 or bf16
  const Batch& batch;
  KvCacheStorage& cache;
  StepHooks* hooks;    // may be null
  bool hooks_at_once;  // tell the hooks of a block as soon as it routed; else after the step
};

}  // namespace moeserve
