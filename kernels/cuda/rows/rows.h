// Launches of the kernels that work on rows one by one: embeddings, norms, sums, conversions.
//
// All pointers are device pointers. Every launch is asynchronous on its stream and computes a row
// from that row alone, in an order that depends on the row's width alone.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// [entries, width] of one type.
struct TableView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
};

// output[t] = table[ids[t]] * scale, f32.
void LaunchEmbed(const TableView& table, const int32_t* ids, float scale, const RowsView& output,
                 cudaStream_t stream);
// output[t] += table[position[t]], f32.
void LaunchAddPositions(const TableView& table, const int32_t* position, const RowsView& output,
                        cudaStream_t stream);
// output[t] += sines of the first half, cosines of the second ("Attention Is All You Need", with
// the frequencies of fairseq).
void LaunchAddSinusoids(const int32_t* position, const RowsView& output, cudaStream_t stream);

struct NormLaunch {
  NormShape shape;
  const float* scales = nullptr;         // of all groups, one after the other
  const float* shifts = nullptr;         // null: none
  const int32_t* group_begin = nullptr;  // [groups + 1] into scales
  int width = 0;                         // of the widest vector; without a plan of group 0
  const RoutingPlan* plan = nullptr;     // group of a row = its expert; null: group 0
  int segments = 1;
  RowsView input;   // f32
  RowsView output;  // f32 or bf16
  // Not empty: input += scale * (branch + bias) comes first.
  RowsView branch = {};         // f32
  const float* bias = nullptr;  // [cols]; null: none
  float scale = 1.0f;
};
void LaunchNorm(const NormLaunch& args, cudaStream_t stream);

void LaunchCombine(const CombineArgs& args, cudaStream_t stream);
// f32 to f32 or bf16, or bf16 to f32.
void LaunchConvert(const RowsView& input, const RowsView& output, cudaStream_t stream);
void LaunchAddScaled(const RowsView& x, const RowsView& branch, const float* bias, float scale,
                     cudaStream_t stream);
void LaunchScaleBySigmoid(const RowsView& x, const RowsView& gate, cudaStream_t stream);
void LaunchScale(const RowsView& x, float factor, cudaStream_t stream);
// output[i] = input[rows[i]], f32.
void LaunchGather(const RowsView& input, const int32_t* rows, const RowsView& output,
                  cudaStream_t stream);

}  // namespace moeserve::cuda
