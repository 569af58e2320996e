// The library of dense products on the emulated device: one multiply-add after the other.

#include "kernels/base/dtype.h"
#include "kernels/cuda/dense/dense_library.h"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 32;

struct Params {
  DenseShape shape;
  const uint16_t* weights;
  const uint16_t* input;
  float* output;
};

// Each block computes one row.
__global__ void MultiplyKernel(Params p) {
  const int64_t row = blockIdx.x;
  const uint16_t* const x = p.input + row * p.shape.input_stride;
  for (int n = static_cast<int>(threadIdx.x); n < p.shape.out_features; n += kThreads) {
    const uint16_t* const w = p.weights + int64_t{n} * p.shape.in_features;
    float sum = 0.0f;
    for (int k = 0; k < p.shape.in_features; ++k) {
      sum = __builtin_fmaf(F32FromBf16(x[k]), F32FromBf16(w[k]), sum);
    }
    p.output[row * p.shape.output_stride + n] = sum;
  }
}

class PlainDenseLibrary : public DenseLibrary {
 public:
  Result<int> FindAlgorithms(const DenseShape&, int64_t) override { return 1; }
  absl::Status Multiply(const DenseShape& shape, int, const void* weights, const void* input,
                        int64_t rows, float* output, cudaStream_t stream) override {
    const Params params{shape, static_cast<const uint16_t*>(weights),
                        static_cast<const uint16_t*>(input), output};
    Launch(MultiplyKernel, {dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream}, params);
    return absl::OkStatus();
  }
};

}  // namespace

Result<std::unique_ptr<DenseLibrary>> OpenDenseLibrary() {
  return std::unique_ptr<DenseLibrary>(std::make_unique<PlainDenseLibrary>());
}

}  // namespace moeserve::cuda
