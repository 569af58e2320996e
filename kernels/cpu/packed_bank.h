// Linear layers in the CPU's layout.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/buffer.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/thread_pool.h"

namespace moeserve::cpu {

// Name of the layout below and in kernel_table.h, the same for all instruction sets. Files contain
// it (Backend::packed_layout()): a change of the layout needs a new name.
inline constexpr std::string_view kPackedLayout = "cpu 1";

// Every matrix [N, K] is packed into blocks of up to 64 outputs (kernel_table.h),
// one after the other, so a product streams it once from front to back. In a gated bank panels
// alternate (16 gate rows, 16 up rows), so one block holds both halves of the same 32 hidden units.
// N is padded to a multiple of 16 with zeros (a padded output is exactly 0 before its activation).
class CpuLinearBank : public LinearBank {
 public:
  // Packs on the threads of `pool`, which outlives the loading.
  static Result<std::unique_ptr<LinearBank>> Create(LinearBankShape shape, ThreadPool* pool);
  // Reads out of `packed`, which has Bytes(shape) bytes at a multiple of 64.
  static std::unique_ptr<LinearBank> View(LinearBankShape shape, PackedBytes packed,
                                          ThreadPool* pool);
  // Of all matrices and biases.
  static int64_t Bytes(const LinearBankShape& shape);

  void LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) override;
  void LoadQuantized(int expert, Half half, int row_begin, const QuantizedMatrix& weight) override;
  void LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) override;

  std::span<const char> packed_bytes() const override { return bytes_; }

  struct Matrix {
    const char* weights;
    const float* bias;  // per packed output, whole blocks; null: none
    int panels;         // of 16 packed outputs, gate panels included
    int blocks;
    int outputs;          // true number of results, gated halves counted once
    int inputs;           // K
    int64_t block_bytes;  // of a full block
  };
  const Matrix& matrix(int expert) const { return matrices_[expert]; }
  const char* block(const Matrix& m, int b) const { return m.weights + b * m.block_bytes; }
  int panels_of_block(const Matrix& m, int b) const {
    const int left = m.panels - b * kPanelsPerBlock;
    return left < kPanelsPerBlock ? left : kPanelsPerBlock;
  }
  int64_t block_bytes(const Matrix& m, int b) const {
    return m.block_bytes / kPanelsPerBlock * panels_of_block(m, b);
  }
  std::span<const char> block_span(const Matrix& m, int b) const {
    return {block(m, b), static_cast<size_t>(block_bytes(m, b))};
  }
  // Steps of a block: lines of each of its panels.
  int64_t steps(const Matrix& m) const;
  int64_t bytes() const { return static_cast<int64_t>(bytes_.size()); }

  // Row `row` of matrix `expert` (not gated, not quantized) widened to f32.
  void ReadRow(int expert, int row, float* out) const;

 private:
  CpuLinearBank(LinearBankShape shape, ThreadPool* pool)
      : LinearBank(std::move(shape)), pool_(pool) {}
  // Fills matrices_ with places within bytes_.
  void PlaceMatrices();
  // Where `p`, of bytes_, can be written to.
  char* Writable(const void* p);
  int PackedRow(Half half, int row) const;
  // Byte offset of element (packed row, k) within its matrix.
  int64_t ElementOffset(const Matrix& m, int packed_row, int64_t k) const;
  // Integers [K] and scales [groups] of one packed row.
  void StoreQuantizedRow(const Matrix& m, int packed_row, const int8_t* values, const F16* scales);
  // Rows of `weight` one by one.
  void LoadRows(const Matrix& m, Half half, int row_begin, const HostTensor& weight, int64_t begin,
                int64_t end);

  HostBuffer memory_;                  // of a bank that was created
  std::shared_ptr<const void> owner_;  // of the bytes of a view
  std::span<const char> bytes_;        // of either
  ThreadPool* pool_;
  std::vector<Matrix> matrices_;
};

}  // namespace moeserve::cpu
