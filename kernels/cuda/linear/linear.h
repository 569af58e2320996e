// Dense and grouped linear layers on the device.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// The product of kernels/backend.h with device pointers; args.bank is a CudaLinearBank. With a
// plan, the number of assignments is read from plan->expert_offsets on the device and may be
// anything up to plan->capacity, for which `output` (and `input` without gather) has rows.
//
// bf16 rows take bf16 weights and run on the tensor cores; f32 rows take any weights: f32 and f16
// ones are summed by one fused multiply-add per input in ascending order, bf16 ones on the tensor
// cores without rounding the rows. A result depends on its row and its matrix alone: tiles of every
// shape sum in the same order.
void LaunchLinear(const LinearArgs& args, cudaStream_t stream);

// Which kernel multiplies bf16 rows, for tests and measurements; kAuto is what LaunchLinear uses.
// kRows*: mma.sync with tiles of that many rows. kWarpgroup*: wgmma with tiles of 128 rows by that
// many outputs, or by what suits the layer; kRows128 where the device or the rows' alignment forbid
// it.
enum class LinearTile : uint8_t {
  kAuto,
  kRows8,
  kRows16,
  kRows32,
  kRows64,
  kRows128,
  kWarpgroup,
  kWarpgroup128,
  kWarpgroup256
};
void LaunchLinear(const LinearArgs& args, LinearTile tile, cudaStream_t stream);

}  // namespace moeserve::cuda
