// Arguments that every layer of a step shares.
#pragma once

#include <optional>
#include <utility>

#include "engine/step/batch.h"
#include "engine/step/report_buffer.h"
#include "engine/step/row_division.h"
#include "engine/step/step_times.h"
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

// The end of a block that it has left to the next one: the addition of its branch to the residual
// stream, and the norm of the next block's input.
struct LeftNorm {
  RowsView x, branch;
  std::optional<LeftSum> sum;  // the branch, if it is such a sum
  const float* bias = nullptr;
  float scale = 1.0f;
  const NormBank* norm = nullptr;
  RowsView output;

  // Calls f(args) with the operation; `args` is valid during the call.
  template <typename F>
  auto With(const F& f) const {
    const CombineArgs combine = sum.has_value() ? sum->Args(branch) : CombineArgs{};
    return f(AddNormArgs{.x = x,
                         .branch = branch,
                         .sum = sum.has_value() ? &combine : nullptr,
                         .bias = bias,
                         .scale = scale,
                         .norm = norm,
                         .output = output});
  }
  void Run(Backend& backend) const {
    With([&backend](const AddNormArgs& args) { backend.AddNorm(args); });
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
  // sum, so that the caller computes it together with what follows. The results stay valid until an
  // operation writes memory that was taken from the workspace later. Null: it must write the rows.
  std::optional<LeftSum>* left_sum = nullptr;
  RowsView left_rows = {};
  // What the block before this one has left to its first operation (Branch::TakesNorm()). Its rows
  // stay valid as long as those of `left_sum`.
  std::optional<LeftNorm> left_norm = std::nullopt;
  // Calls f(norm) with what `left_norm` describes, which f must compute, or with null.
  template <typename F>
  auto WithLeftNorm(const F& f) {
    const std::optional<LeftNorm> left = std::exchange(left_norm, std::nullopt);
    if (!left.has_value()) return f(nullptr);
    return left->With([&f](const AddNormArgs& norm) { return f(&norm); });
  }
  // Returns memory for rows of which other ranks compute a part: RowDivision::Gather() takes no
  // padding.
  RowsView TakeGathered(int64_t rows, int64_t cols, DType dtype) {
    return division.divided() ? workspace.TakeDense(rows, cols, dtype)
                              : workspace.Take(rows, cols, dtype);
  }
  // Computes what `left_norm` describes, for an operation that reads some of the rows.
  void RunLeftNorm() {
    WithLeftNorm([this](const AddNormArgs* norm) {
      if (norm != nullptr) backend.AddNorm(*norm);
    });
  }
  // Must be called before the output of an operation that takes `left_norm` is taken from the
  // workspace. If it reads the rows of this rank only, the norm is computed here. Otherwise, a
  // backend can compute few rows at once only if it may write the output while it still reads the
  // experts' results; of many rows, these would take too much memory.
  void PrepareLeftNorm(const RowDivision& rows) {
    constexpr int64_t kFewRows = 8;
    if (rows.divided() || times != nullptr) return RunLeftNorm();
    if (left_norm.has_value() && left_norm->sum.has_value() && left_norm->x.rows <= kFewRows) {
      workspace.Keep(left_norm->sum->results);
    }
  }
  // What the experts of an attention must do before it (AttentionArgs::append); null: nothing.
  const NormRopeAppendArgs* left_append = nullptr;
  // How the ranks divide what treats rows alone. Inputs and outputs of layers have all rows.
  RowDivision division = {};
  StepTimes* times = nullptr;  // null: nothing is measured
};

}  // namespace moeserve
