// The states of the CPU backend in memory.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/base/buffer.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/workers.h"
#include "kernels/state_storage.h"

namespace moeserve::cpu {

// What one token does to the state of a recurrence: after the preparation of its inputs.
struct RecurrentInputs {
  float* key = nullptr;       // [key_width()]
  float* value = nullptr;     // [value_width()]
  float* decay = nullptr;     // [decay_width()]
  float* strength = nullptr;  // [heads]
};

class CpuStates : public StateStorage {
 public:
  // `table` and `workers` outlive the states.
  static Result<std::unique_ptr<CpuStates>> Allocate(std::vector<StateShape> shapes, int num_slots,
                                                     int pending_rows, const KernelTable& table,
                                                     Workers& workers);

  // Returns a row of a convolution; those of pending tokens follow those of the state.
  float* Row(int block, int32_t slot, int row) const {
    return Slot(block, slot) + int64_t{row} * shape(block).cols;
  }
  // Returns the state of a head of a recurrence.
  float* Head(int block, int32_t slot, int head) const {
    return Slot(block, slot) + RecurrenceBegin(block) +
           head * shape(block).recurrence.head_floats();
  }
  // Returns the recurrence's inputs of a pending token.
  RecurrentInputs Pending(int block, int32_t slot, int row) const;

  void DoClear(int32_t slot) override;
  void DoAdvance(int32_t from, int rows, int32_t to) override;

 private:
  CpuStates(std::vector<StateShape> shapes, int num_slots, int pending_rows,
            const KernelTable& table, Workers& workers)
      : StateStorage(std::move(shapes), num_slots, pending_rows),
        table_(table),
        workers_(workers) {}

  float* Slot(int block, int32_t slot) const {
    return reinterpret_cast<float*>(memory_.data()) + Begin(block, slot);
  }
  void AdvanceRecurrence(int block, int32_t from, int rows, int32_t to);

  const KernelTable& table_;
  Workers& workers_;
  HostBuffer memory_;
};

// Returns what a row does to some columns of a head's state, without a query.
RecurrentRowArgs RecurrentColumns(const RecurrentShape& shape, const RecurrentInputs& inputs,
                                  int head, int column);

}  // namespace moeserve::cpu
