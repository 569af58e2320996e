// A linear bank in the CPU's packed layout.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/weights/weight_memory.h"
#include "kernels/movable_experts.h"

namespace moeserve::cpu {

// The name of the packed layout, which is documented below and in kernel_table.h and is equal for
// all instruction sets. Files with packed weights contain this name (Backend::packed_layout()), so
// a change of the layout needs a new name.
inline constexpr std::string_view kPackedLayout = "cpu 2";

// Every matrix [N, K] is packed into blocks of up to 64 outputs (kernel_table.h), one block after
// the other, so that a product reads the matrix once from front to back. In a gated bank, panels of
// 16 gate rows and of 16 up rows alternate, so a block holds both halves of the same 32 hidden
// units. N is padded to a multiple of 16 with zeros (a padded output is exactly 0 before its
// activation). The biases of a matrix, f32 for each packed output of its blocks, follow it.
class CpuLinearBank : public LinearBank, public MovableExperts {
 public:
  // Takes memory for the weights from `memory`. Loading packs weights on the threads of `pool`,
  // which must outlive the loading.
  static Result<std::unique_ptr<LinearBank>> Create(LinearBankShape shape, WeightMemory& memory,
                                                    ThreadPool* pool);
  // The bank reads its weights from `packed`, which holds Bytes(shape, e) bytes of each expert e.
  static std::unique_ptr<LinearBank> View(LinearBankShape shape, PackedBytes packed,
                                          ThreadPool* pool);
  // Returns the bytes of the matrix and the biases of an expert, or of all experts.
  static int64_t Bytes(const LinearBankShape& shape, int expert);
  static int64_t Bytes(const LinearBankShape& shape);

  void LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) override;
  void LoadQuantized(int expert, Half half, int row_begin, const QuantizedMatrix& weight) override;
  void LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) override;

  std::span<const char> packed_bytes(int expert) const override {
    return {matrices_[static_cast<size_t>(expert)].weights,
            static_cast<size_t>(Bytes(shape_, expert))};
  }

  // Not if View() made this bank: whoever reads the file's pages ahead looks for its experts there.
  bool CanTake() const override { return writable_; }
  bool TakesFrom(const LinearBank& other) const override;
  void TakeExperts(const LinearBank& other) override;
  // Experts of View() stay: their memory is the file's.
  std::shared_ptr<const void> DropExpert(int expert) override;

  struct Matrix {
    const char* weights;
    const float* bias;  // one per packed output, padded to whole blocks; null if there is none
    int panels;         // number of panels of 16 packed outputs, gate panels included
    int blocks;
    int outputs;          // number of results without padding; a gate and its up row count as one
    int inputs;           // K
    int64_t steps;        // over K in a block: the number of lines of each of its panels
    int64_t block_bytes;  // bytes of a full block
  };
  const Matrix& matrix(int expert) const { return matrices_[expert]; }
  const char* block(const Matrix& m, int b) const { return m.weights + b * m.block_bytes; }
  int panels_of_block(const Matrix& m, int b) const {
    const int left = m.panels - b * kPanelsPerBlock;
    return left < kPanelsPerBlock ? left : kPanelsPerBlock;
  }
  std::span<const char> block_span(const Matrix& m, int b) const {
    const int64_t bytes = m.block_bytes / kPanelsPerBlock * panels_of_block(m, b);
    return {block(m, b), static_cast<size_t>(bytes)};
  }

  // Reads row `row` of matrix `expert` (neither gated nor quantized), widened to f32.
  void ReadRow(int expert, int row, float* out) const;

 private:
  CpuLinearBank(LinearBankShape shape, ThreadPool* pool)
      : LinearBank(std::move(shape)), pool_(pool) {}
  // Adds the matrix of the next expert, whose Bytes() begin at `bytes`.
  void PlaceMatrix(const char* bytes);
  // Returns `p`, which points to weights or biases, as a writable pointer. Stops the process if
  // View() made this bank.
  char* Writable(const void* p);
  int PackedRow(Half half, int row) const;
  // Returns the byte offset of element (packed_row, k) within its matrix.
  int64_t ElementOffset(const Matrix& m, int packed_row, int64_t k) const;
  // Stores the integers [QuantRowValues] and scales [QuantScales] of one packed row.
  void StoreQuantizedRow(const Matrix& m, int packed_row, const int8_t* values, const F16* scales);
  // Stores rows [begin, end) of `weight`, which are not quantized.
  void LoadRows(const Matrix& m, Half half, int row_begin, const HostTensor& weight, int64_t begin,
                int64_t end);

  bool writable_ = false;              // whether Create() made this bank
  std::shared_ptr<const void> owner_;  // keeps the packed bytes alive
  ThreadPool* pool_;
  std::vector<Matrix> matrices_;
  // [experts] what keeps the matrices that were taken from other banks alive; empty before.
  std::vector<std::shared_ptr<const void>> taken_;
};

}  // namespace moeserve::cpu
