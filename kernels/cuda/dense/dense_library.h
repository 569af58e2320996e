// A library that computes the products of dense layers: cuBLASLt. The emulated device of the tests
// has a plain one instead.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>

#include "base/status.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// A product apart from its number of rows. All matrices are row-major in device memory, and start
// at a multiple of 16 bytes, as does each row of the input and of the output.
struct DenseShape {
  int out_features = 0;       // N
  int in_features = 0;        // K, a multiple of 8
  int64_t input_stride = 0;   // elements, a multiple of 8
  int64_t output_stride = 0;  // elements, a multiple of 4

  bool operator<(const DenseShape& other) const {
    return std::tie(out_features, in_features, input_stride, output_stride) <
           std::tie(other.out_features, other.in_features, other.input_stride, other.output_stride);
  }
};

// Only one thread at a time may use an object.
class DenseLibrary {
 public:
  virtual ~DenseLibrary() = default;

  // Returns the number of algorithms for products of this shape, which are numbered from the one
  // that is expected to be the fastest for `rows` rows. None of them splits sums over K.
  virtual Result<int> FindAlgorithms(const DenseShape& shape, int64_t rows) = 0;

  // Enqueues output[r, n] = sum over k of input[r, k] * weights[n, k] with bf16 inputs and weights
  // and f32 sums. FindAlgorithms() must have been called for the shape. Internal: the library
  // refuses this algorithm for these arguments, and nothing is enqueued. Permitted while the stream
  // captures.
  virtual absl::Status Multiply(const DenseShape& shape, int algorithm, const void* weights,
                                const void* input, int64_t rows, float* output,
                                cudaStream_t stream) = 0;
};

// Opens the library. Unavailable if it is not installed or this build has no support for it; the
// message names the file that is missing.
Result<std::unique_ptr<DenseLibrary>> OpenDenseLibrary();

}  // namespace moeserve::cuda
