// Arguments that every layer of a step shares.
#pragma once

#include "engine/step/batch.h"
#include "engine/step/report_buffer.h"
#include "engine/step/workspace.h"
#include "kernels/backend.h"

namespace moeserve {

struct StepContext {
  Backend& backend;
  Workspace& workspace;
  DType activation;  // type of the inputs of matrix products: f32 or bf16
  const Batch& batch;
  KvCacheStorage& cache;
  const ReportBuffer& reported;  // where routed blocks store the rows that the step reports
  RowsView stream;               // f32 [T, d]: the residual stream, which the block's norm has read
  RowsView late = {};            // f32 [T, d]: what joins the stream at the end of the next layer
  RowsView layer_inputs = {};    // f32 [T, layers * width]: LayerInputs::Compute()
};

}  // namespace moeserve
