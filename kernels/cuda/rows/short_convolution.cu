#include "kernels/base/dtype.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/short_convolution.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;

// One column of the convolution; its functions do for this column what ShortConvolution() of the
// CPU backend does for rows.
struct Column {
  const ShortConvolutionLaunch& args;
  int c;

  __device__ float Input(int64_t row, int part) const {
    const float* const in = static_cast<const float*>(args.input.data) + row * args.input.stride;
    return in[part * args.output.cols + c];
  }
  __device__ float* State(int32_t slot, int row) const {
    return args.states + slot * args.slot_floats + row * args.output.cols + c;
  }
  // Returns how many rows of the sequence of row `t` stand before it in the step, at most `most`.
  __device__ int Before(int64_t t, int most) const {
    int count = 0;
    while (count < most && t - count > 0 && args.sequence[t - count - 1] == args.sequence[t]) {
      ++count;
    }
    return count;
  }
  // Returns the convolution's input `back` rows before row `t`. `before` is Before() of the row.
  __device__ float Product(int64_t t, int back, int before) const {
    if (back <= before) {
      const float first = Input(t - back, 0);
      return args.gated ? __fmul_rn(first, Input(t - back, 2)) : first;
    }
    const int32_t slot = args.slot[t];
    return slot < 0 ? 0.0f : *State(slot, args.taps - 1 - (back - before));
  }
  // Stores the state after row `t`, the oldest row first.
  __device__ void Keep(int64_t t, int32_t slot) const {
    const int rows = args.taps - 1;
    const int before = Before(t, rows);
    for (int r = 0; r < rows; ++r) *State(slot, r) = Product(t, rows - 1 - r, before);
  }
};

__global__ void ConvolveKernel(const ShortConvolutionLaunch args) {
  GridDependencyPass();
  const int64_t t = blockIdx.x;
  const Column column{args, static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x)};
  const int c = column.c;
  if (c >= args.output.cols) return;
  const int before = column.Before(t, args.taps - 1);
  float sum = args.bias == nullptr ? 0.0f : args.bias[c];
  for (int j = 0; j < args.taps; ++j) {
    const float u = column.Product(t, args.taps - 1 - j, before);
    sum = __fadd_rn(sum, __fmul_rn(args.weight[j * args.output.cols + c], u));
  }
  sum = args.gated ? __fmul_rn(sum, column.Input(t, 1)) : sum / (1.0f + expf(-sum));
  const int64_t i = t * args.output.stride + c;
  if (args.output.dtype == DType::kF32) {
    static_cast<float*>(args.output.data)[i] = sum;
  } else {
    static_cast<uint16_t*>(args.output.data)[i] = Bf16FromF32(sum);
  }
  if (args.snapshot[t] >= 0) column.Keep(t, args.snapshot[t]);
  if (args.pending[t] >= 0 && args.slot[t] >= 0) {
    *column.State(args.slot[t], args.taps - 1 + args.pending[t]) = column.Product(t, 0, 0);
  }
}

// A state is overwritten only after every row has read it.
__global__ void KeepStatesKernel(const ShortConvolutionLaunch args) {
  GridDependencyPass();
  const int64_t t = blockIdx.x;
  const Column column{args, static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x)};
  if (column.c < args.output.cols && args.keep[t] >= 0) column.Keep(t, args.keep[t]);
}

}  // namespace

void LaunchShortConvolution(const ShortConvolutionLaunch& args, cudaStream_t stream) {
  const auto columns = static_cast<unsigned>((args.output.cols + kThreads - 1) / kThreads);
  const LaunchShape shape{
      {static_cast<unsigned>(args.output.rows), columns, 1}, {kThreads, 1, 1}, 0, stream, true};
  Launch(ConvolveKernel, shape, args);
  if (args.taps > 1) Launch(KeepStatesKernel, shape, args);
}

}  // namespace moeserve::cuda
