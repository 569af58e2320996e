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
  StepHooks* hooks;  // may be null

  int64_t tokens() const { return batch.num_tokens(); }
};

}  // namespace moeserve
