// Linear layers in the device's layout.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Side of a tile of the packed weights: 64 outputs by 64 inputs.
inline constexpr int kImageBlock = 64;

// The place of one expert's matrix: offsets into the bank's arrays.
struct LinearBankEntry {
  int64_t weights;  // bytes
  int64_t bias;     // values
  int32_t row_blocks;
  int32_t k_blocks;
  int32_t in_features;
  int32_t out_features;  // gated: hidden units
};

// The image of a matrix [N, K]: blocks of 64 image rows x 64 inputs, [row block][k block], each
// row-major. A 16-byte piece c of row r of a block is stored at piece c ^ (r % 8), so that a block
// copied as it is into shared memory is read without bank conflicts and is the 128-byte swizzle of
// the tensor cores. Image rows of a gated bank alternate (8 gate rows, 8 up rows): a thread that
// holds rows r and r + 8, or columns r and r + 8, of a product has both halves of a hidden unit. N
// and K are rounded up to 64 by zeros inside each expert, so unequal widths cost nothing else.
//
// Filled by one thread before the first product reads it.
class CudaLinearBank : public LinearBank {
 public:
  // ResourceExhausted names the size.
  static Result<std::unique_ptr<CudaLinearBank>> Create(LinearBankShape shape);

  void LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) override;
  void LoadQuantized(int expert, Half half, int row_begin, const QuantizedMatrix& weight) override;
  void LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) override;

  // Device memory.
  const char* weights() const { return weights_.as<char>(); }
  const float* bias() const { return shape_.bias ? bias_.as<float>() : nullptr; }
  const LinearBankEntry* entries() const { return table_.as<LinearBankEntry>(); }
  // [E] experts by descending size of their matrices, so that the longest work starts first.
  const int32_t* order() const { return order_.as<int32_t>(); }

  const LinearBankEntry& entry(int expert) const { return entries_[expert]; }
  // Row blocks of the n experts that have the most of them.
  int64_t largest_row_blocks(int64_t n) const { return largest_row_blocks_[n]; }
  int max_row_blocks() const { return max_row_blocks_; }
  // All device memory of the bank.
  int64_t bytes() const { return bytes_; }

 private:
  explicit CudaLinearBank(LinearBankShape shape) : LinearBank(std::move(shape)) {}

  std::vector<LinearBankEntry> entries_;
  std::vector<int64_t> largest_row_blocks_;  // [E + 1] prefix sums
  int max_row_blocks_ = 0;
  int64_t bytes_ = 0;
  DeviceMemory weights_;
  DeviceMemory bias_;
  DeviceMemory table_;
  DeviceMemory order_;
};

// output[i] = scale * row ids[i] of the only matrix of an ungated `bank`, widened to f32. `ids` is
// device memory; a negative id reads row 0 (a padding row). `output` f32 [rows, in_features].
void LaunchReadRows(const CudaLinearBank& bank, const int32_t* ids, int rows, float scale,
                    const RowsView& output, cudaStream_t stream);

namespace internal {

struct PackRowsArgs {
  const void* source = nullptr;  // device, [rows, entry.in_features] of `source_dtype`
  DType source_dtype = DType::kF32;
  char* image = nullptr;  // of the whole matrix
  DType image_dtype = DType::kF32;
  int k_blocks = 0;
  int in_features = 0;
  int first_row = 0;  // within its half
  int rows = 0;
  bool gated = false;
  bool gate_half = false;
};

void LaunchPackRows(const PackRowsArgs& args, cudaStream_t stream);

// bias[image row of first_row + i] = values[i]; device memory.
void LaunchPackBias(const float* values, int count, int first_row, bool gated, bool gate_half,
                    float* bias, cudaStream_t stream);

}  // namespace internal
}  // namespace moeserve::cuda
