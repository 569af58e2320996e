// Keeps the router scores and router inputs that a step captures until the step has ended.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/step_report.h"
#include "engine/routes/route_layout.h"
#include "kernels/backend.h"

namespace moeserve {

// Device memory to which one routed block copies its router scores and router inputs as dense f32
// rows. A view is null if the step does not capture these rows.
struct BlockLook {
  RowsView scores;  // [rows, E], E experts
  RowsView inputs;  // [rows, c], c columns of the router's input
};

// The buffer for all routed blocks of a model. Used only by the thread that runs the model.
class LookBuffer {
 public:
  // `hidden_size` is the model's.
  LookBuffer(const RouteLayout& layout, int hidden_size);

  // Returns the number of floats of device memory that the captures of a step with `tokens` tokens
  // take.
  int64_t Floats(int64_t tokens, StepLooks looks) const;

  // Assigns a part of `memory`, one dense f32 row of Floats() columns, to every block. Assigns
  // nothing if `looks` captures neither scores nor inputs.
  void Place(int64_t tokens, StepLooks looks, const RowsView& memory);
  // Returns the memory that the block with this PlanSlot() fills.
  const BlockLook& of_slot(int slot) const { return looks_[static_cast<size_t>(slot)]; }

  // Copies the routing plans and captured rows of the finished step to host memory. The result is
  // valid until the next call.
  std::span<const BlockReport> Report(Backend& backend, StepLooks looks);

 private:
  const RouteLayout layout_;
  const int hidden_size_;
  RowsView memory_;
  std::vector<BlockLook> looks_;  // indexed by PlanSlot()
  std::vector<float> host_;       // copy of memory_
  std::vector<BlockReport> reports_;
};

}  // namespace moeserve
