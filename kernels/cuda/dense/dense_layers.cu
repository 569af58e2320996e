// The kernels around the products of a library: the epilogue, and the comparison of its tests.

#include "base/check.h"
#include "kernels/cuda/dense/dense_layers.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/activation.cuh"
#include "kernels/cuda/linear/linear_image.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;

struct EpilogueParams {
  const float* sums;
  int64_t stride;
  const float* bias;  // null if there is none
  char* output;
  int64_t output_stride;  // elements
  int out_features;
  int columns;  // that are written; those after out_features become 0
  bool gated;
  bool bf16;
  Activation activation;
};

// Each thread computes one output of the row blockIdx.x.
__global__ void EpilogueKernel(EpilogueParams p) {
  GridDependencyPass();
  const int column = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (column >= p.columns) return;
  const int64_t row = blockIdx.x;
  float value = 0.0f;
  if (column < p.out_features) {
    const float* const sums = p.sums + row * p.stride;
    const auto biased = [&](int at, bool gate) {
      return sums[at] + (p.bias == nullptr ? 0.0f : p.bias[ImageRow(p.gated, gate, column)]);
    };
    float main[1] = {biased(column, false)};
    if (p.gated) {
      float gate[1] = {biased(p.out_features + column, true)};
      ActivateGated(p.activation, p.bf16, gate, main);
      value = gate[0];
    } else {
      Activate(p.activation.kind, p.bf16, main);
      value = main[0];
    }
  }
  const int64_t at = row * p.output_stride + column;
  if (p.bf16) {
    reinterpret_cast<uint16_t*>(p.output)[at] = Bf16FromF32(value);
  } else {
    reinterpret_cast<float*>(p.output)[at] = value;
  }
}

__global__ void CountDifferencesKernel(const uint32_t* a, const uint32_t* b, int64_t words,
                                       unsigned long long* count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  unsigned long long mine = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += step) {
    mine += a[i] != b[i] ? 1 : 0;
  }
  if (mine > 0) atomicAdd(count, mine);
}

}  // namespace

namespace internal {

void LaunchDenseEpilogue(const LinearArgs& args, const float* sums, int64_t stride,
                         cudaStream_t stream) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const int out = bank.shape().out_features[0];
  const int columns = args.pad_output ? (out + 15) / 16 * 16 : out;
  const EpilogueParams params{.sums = sums,
                              .stride = stride,
                              .bias = bank.bias(),
                              .output = static_cast<char*>(args.output.data),
                              .output_stride = args.output.stride,
                              .out_features = out,
                              .columns = columns,
                              .gated = bank.shape().gated,
                              .bf16 = args.output.dtype == DType::kBF16,
                              .activation = args.activation};
  const dim3 grid(static_cast<unsigned>(args.input.rows),
                  static_cast<unsigned>((columns + kThreads - 1) / kThreads));
  Launch(EpilogueKernel, {grid, dim3(kThreads), 0, stream, true}, params);
}

void LaunchCountDifferences(const float* a, const float* b, int64_t words,
                            unsigned long long* count, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1024;
  const int64_t blocks = (words + kThreads - 1) / kThreads;
  Launch(CountDifferencesKernel,
         {dim3(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kThreads), 0,
          stream},
         reinterpret_cast<const uint32_t*>(a), reinterpret_cast<const uint32_t*>(b), words, count);
}

}  // namespace internal
}  // namespace moeserve::cuda
