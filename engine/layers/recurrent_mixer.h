// Linear attention with a delta rule and state-space layers, which take the place of an attention.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/layers/branch.h"
#include "engine/layers/short_convolution.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Projections, a convolution, RecurrenceArgs, a gate and a norm of the outputs, and a projection
// back. DeltaSpec and StateSpaceSpec (engine/spec/recurrent.h) say what each of the two does.
// Immutable after loading.
class RecurrentMixer : public Branch {
 public:
  static Result<std::unique_ptr<RecurrentMixer>> Load(LoadContext& load, const ModelSpec& model,
                                                      int block, const DeltaSpec& spec);
  static Result<std::unique_ptr<RecurrentMixer>> Load(LoadContext& load, const ModelSpec& model,
                                                      int block, const StateSpaceSpec& spec);

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

 private:
  // Some columns of the projection of the rows, or of a second product behind them.
  struct Part {
    int64_t first = 0;
    int64_t columns = 0;
    std::unique_ptr<LinearBank> second;  // null: the columns are the part itself
    int64_t width = 0;                   // of the part
  };

  // Adds the part `name` to the projection: with a rank above 0, the product of two matrices.
  absl::Status AddPart(LoadContext& load, const std::string& name, int width, int rank, bool bias,
                       std::vector<LinearPart>& projection, Part& part);
  // Loads what both kinds have.
  absl::Status LoadRest(LoadContext& load, const ModelSpec& model, int block,
                        const std::vector<LinearPart>& projection,
                        const std::vector<LinearPart>& convolution, int taps,
                        const std::string& bias_name, bool bias);
  // What the recurrence reads of all tokens: the columns of the convolution, and RecurrenceArgs'
  // decays and strengths.
  struct Inputs {
    RowsView columns, decays, strengths;
  };
  // Returns the inputs of all tokens. `own` are those of the rows that this rank computes.
  Inputs Gather(StepContext& ctx, const Inputs& own, int64_t tokens) const;
  // Returns the rows of a part. `all` are those of the projection.
  static RowsView RowsOf(StepContext& ctx, const Part& part, const RowsView& all);

  int state_ = 0;  // index of the block's states
  RecurrentShape shape_;
  RecurrenceSettings settings_;
  StackedLinear projection_;  // the columns of the convolution, and then those of the parts
  int64_t columns_ = 0;       // of the projection
  Part gate_, decay_, strength_;
  // Where the convolution's columns have queries, keys and values.
  int64_t queries_ = 0, keys_ = 0, values_ = 0;
  Convolution convolution_;
  std::unique_ptr<DeviceBuffer> rate_, decay_bias_, skip_;  // `skip_` is null if there is none
  std::unique_ptr<NormBank> norm_;
  bool gate_first_ = false;  // the gate multiplies what the norm reads, else what it returns
  GateActivation gate_activation_ = GateActivation::kSilu;
  std::unique_ptr<LinearBank> output_;
};

}  // namespace moeserve
