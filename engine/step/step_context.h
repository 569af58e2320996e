// Arguments that every layer of a step shares.
#pragma once

#include <optional>

#include "engine/step/batch.h"
#include "engine/step/report_buffer.h"
#include "engine/step/workspace.h"
#include "kernels/backend.h"

namespace moeserve {

// A weighted sum of experts' results that a branch has left to its caller.
struct LeftSum {
  RoutingPlan plan;
  RowsView results;
  std::optional<RowsView> residual;
  bool weighted = true;

  // Returns the operation; it refers to this object.
  CombineArgs Args(const RowsView& output) const {
    return {.plan = &plan,
            .results = results,
            .residual = residual.has_value() ? &*residual : nullptr,
            .output = output,
            .weighted = weighted};
  }
};

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
  // Where the routed layer that writes these rows leaves its last operation if that is a weighted
  // sum, so that the caller computes it together with what follows. The results stay valid until
  // the caller takes memory from the workspace. Null: it must write the rows.
  std::optional<LeftSum>* left_sum = nullptr;
  RowsView left_rows = {};
};

}  // namespace moeserve
