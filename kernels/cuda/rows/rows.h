// Launches of the kernels that process rows separately: embeddings, norms, sums, conversions.
//
// All pointers are device pointers. Every launch is asynchronous on its stream. The result of a row
// depends on that row alone, and the order of its operations on the row's width alone.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// An embedding table [entries, width].
struct TableView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
};

// Computes output[t] = table[ids[t]] * scale, f32.
void LaunchEmbed(const TableView& table, const int32_t* ids, float scale, const RowsView& output,
                 cudaStream_t stream);
// Compute output[t] += table[ids[t]], f32.
void LaunchAddEmbedding(const TableView& table, const int32_t* ids, const RowsView& output,
                        cudaStream_t stream);
void LaunchAddEmbedding(const TableView& table, const uint8_t* ids, const RowsView& output,
                        cudaStream_t stream);
// Adds sinusoidal positions to output[t] as EmbedArgs states. `first` is added to every position.
void LaunchAddSinusoids(const int32_t* position, int first, bool half_spacing,
                        const RowsView& output, cudaStream_t stream);

struct NormLaunch {
  NormShape shape;
  const float* scales = nullptr;         // scales of all groups, one group after the other
  const float* shifts = nullptr;         // null if there are none
  const int32_t* group_begin = nullptr;  // [groups + 1] index of each group's first element in
                                         // `scales`
  int width = 0;  // with a plan: width of the widest group; without: width of group 0
  const RoutingPlan* plan = nullptr;  // the group of a row is its expert; null: every row uses
                                      // group 0
  int segments = 1;
  RowsView input;   // f32
  RowsView output;  // f32 or bf16
  // If `branch` is not empty, input += scale * (branch + bias) is computed first. If `sum` is not
  // null either, the branch is the weighted sum that it describes; its output is not written.
  RowsView branch = {};  // f32
  const CombineArgs* sum = nullptr;
  const float* bias = nullptr;  // [cols]; null if there is none
  float scale = 1.0f;
};
void LaunchNorm(const NormLaunch& args, cudaStream_t stream);

void LaunchAssignRows(const AssignRowsArgs& args, cudaStream_t stream);
void LaunchCombine(const CombineArgs& args, cudaStream_t stream);
// Converts f32 to f32 or bf16, or bf16 to f32.
void LaunchConvert(const RowsView& input, const RowsView& output, cudaStream_t stream);
void LaunchAddScaled(const RowsView& x, const RowsView& branch, const float* bias, float scale,
                     cudaStream_t stream);
void LaunchScaleBySigmoid(const RowsView& x, const RowsView& gate, cudaStream_t stream);
void LaunchMultiplyByGate(const RowsView& x, const RowsView& gate, GateActivation activation,
                          cudaStream_t stream);
void LaunchScale(const RowsView& x, float factor, cudaStream_t stream);
void LaunchSoftCap(const RowsView& x, float cap, cudaStream_t stream);
// Limits every element of x to [-limit, limit], f32, in place.
void LaunchClamp(const RowsView& x, float limit, cudaStream_t stream);
// Computes output[i] = input[rows[i]], f32.
void LaunchGather(const RowsView& input, const int32_t* rows, const RowsView& output,
                  cudaStream_t stream);
// `ranges` are in device memory, one for each row of args.output.
void LaunchPool(const PoolArgs& args, const RowRange* ranges, cudaStream_t stream);

}  // namespace moeserve::cuda
