#include "kernels/cpu/storage/state_slots.h"

#include <algorithm>
#include <cstring>

namespace moeserve::cpu {

Result<std::unique_ptr<CpuStates>> CpuStates::Allocate(std::vector<StateShape> shapes,
                                                       int num_slots, int pending_rows,
                                                       const KernelTable& table, Workers& workers) {
  std::unique_ptr<CpuStates> states(
      new CpuStates(std::move(shapes), num_slots, pending_rows, table, workers));
  const int64_t bytes = SlotBytes(states->shapes_, pending_rows) * num_slots;
  MOESERVE_ASSIGN_OR_RETURN(states->memory_, HostBuffer::Allocate(static_cast<size_t>(bytes)));
  return states;
}

RecurrentInputs CpuStates::Pending(int block, int32_t slot, int row) const {
  const RecurrentShape& shape = this->shape(block).recurrence;
  RecurrentInputs inputs;
  inputs.key = Slot(block, slot) + RecurrenceBegin(block) + shape.state_floats() +
               row * shape.input_floats();
  inputs.value = inputs.key + shape.key_width();
  inputs.decay = inputs.value + shape.value_width();
  inputs.strength = inputs.decay + shape.decay_width();
  return inputs;
}

void CpuStates::DoClear(int32_t slot) {
  for (int b = 0; b < num_blocks(); ++b) {
    std::fill_n(Row(b, slot, 0), int64_t{shape(b).rows} * shape(b).cols, 0.0f);
    std::fill_n(Head(b, slot, 0), shape(b).recurrence.state_floats(), 0.0f);
  }
}

void CpuStates::DoAdvance(int32_t from, int rows, int32_t to) {
  for (int b = 0; b < num_blocks(); ++b) {
    const auto bytes = static_cast<size_t>(shape(b).rows) * static_cast<size_t>(shape(b).cols);
    std::memmove(Row(b, to, 0), Row(b, from, rows), bytes * sizeof(float));
    AdvanceRecurrence(b, from, rows, to);
  }
}

void CpuStates::AdvanceRecurrence(int block, int32_t from, int rows, int32_t to) {
  const RecurrentShape& shape = this->shape(block).recurrence;
  if (from == to && rows == 0) return;
  const int64_t size = shape.head_floats();
  workers_.ForEachRow(shape.heads, size * (1 + 4 * rows), [&](int64_t h) {
    const int head = static_cast<int>(h);
    float* const state = Head(block, to, head);
    if (from != to) std::copy_n(Head(block, from, head), size, state);
    for (int column = 0; column < shape.value_dim; column += kRecurrentColumns) {
      for (int row = 0; row < rows; ++row) {
        RecurrentRowArgs args = RecurrentColumns(shape, Pending(block, from, row), head, column);
        args.state = state + shape.block_begin(column);
        table_.recurrent_row(args);
      }
    }
  });
}

RecurrentRowArgs RecurrentColumns(const RecurrentShape& shape, const RecurrentInputs& inputs,
                                  int head, int column) {
  const int key_head = head / (shape.heads / shape.key_heads);
  RecurrentRowArgs args = {};
  args.key_dim = shape.key_dim;
  args.columns = std::min(shape.value_dim - column, kRecurrentColumns);
  args.key = inputs.key + key_head * shape.key_dim;
  args.value = inputs.value + head * shape.value_dim + column;
  args.decay = inputs.decay + head * (shape.decays_keys ? shape.key_dim : 1);
  args.decays_keys = shape.decays_keys;
  args.delta = shape.delta;
  args.strength = inputs.strength[head];
  return args;
}

}  // namespace moeserve::cpu
