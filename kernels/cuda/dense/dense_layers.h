// Products of dense layers by a library (dense_library.h) in place of the kernels of linear.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/dense/dense_library.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// A library may sum in another order if a product has more rows, which would make the result of a
// row depend on the batch. So each shape of a product has one algorithm, whatever the number of
// rows, and Prepare() takes the first one of the library that passes a test: the same rows, alone
// and among others, must have the same bits. If none passes, the kernels of linear.h compute the
// product, and warnings() says so.
//
// Only one thread at a time may use an object.
class DenseLayers {
 public:
  explicit DenseLayers(std::unique_ptr<DenseLibrary> library) : library_(std::move(library)) {}

  // Returns whether the arguments are a product that libraries compute: bf16 rows times the only
  // matrix of a bf16 bank, without a plan and without segments, where every row starts at a
  // multiple of 16 bytes.
  static bool Fits(const LinearArgs& args);
  // Returns whether the products of a bank are always among those of Fits(), if their rows have
  // type `rows` and there is no plan.
  static bool Fits(const LinearBank& bank, DType rows);

  // Returns whether Run() can be called with these arguments.
  bool Ready(const LinearArgs& args) const;
  // Selects the algorithm of the shape if it has none yet, and allocates memory for the sums. If
  // the library takes the shape, the weights of the bank are stored row-major from now on. Waits
  // for the device; must not be called while the stream captures, nor while a recorded step can
  // still be replayed. ResourceExhausted if memory runs out.
  absl::Status Prepare(const LinearArgs& args, cudaStream_t stream);
  // Computes the product documented at LinearArgs (kernels/backend.h), for which Ready() is true.
  // Returns false, and does nothing, if the kernels of linear.h compute products of this shape.
  bool Run(const LinearArgs& args, cudaStream_t stream);

  // Returns one message for each shape that the library does not compute.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  static DenseShape ShapeOf(const LinearArgs& args);
  // Returns the first algorithm whose rows are independent, or nullopt.
  Result<std::optional<int>> Select(const DenseShape& shape, const char* weights,
                                    cudaStream_t stream);
  // Returns whether the algorithm computes the same bits for the same rows in products of several
  // sizes. `rows` random rows of the shape are at `input`; `whole` and `part` have memory for their
  // outputs.
  Result<bool> RowsAreIndependent(const DenseShape& shape, int algorithm, const char* weights,
                                  const char* input, int64_t rows, float* whole, float* part,
                                  cudaStream_t stream);

  std::unique_ptr<DenseLibrary> library_;
  std::map<DenseShape, std::optional<int>> algorithms_;  // nullopt: the kernels of linear.h
  DeviceMemory sums_;
  std::vector<std::string> warnings_;
};

namespace internal {

// Applies bias, activation, gating and rounding to f32 sums [rows, N], or [rows, 2 N] with the sums
// of the gate after those of the up half, and stores the outputs. `stride` is that of the sums.
void LaunchDenseEpilogue(const LinearArgs& args, const float* sums, int64_t stride,
                         cudaStream_t stream);

// Adds the number of 32-bit words that differ between `a` and `b` to *count.
void LaunchCountDifferences(const float* a, const float* b, int64_t words,
                            unsigned long long* count, cudaStream_t stream);

}  // namespace internal
}  // namespace moeserve::cuda
