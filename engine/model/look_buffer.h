// Keeps the rows that a step reports of its routed blocks until the step has ended.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/step_report.h"
#include "engine/routes/route_layout.h"
#include "kernels/backend.h"

namespace moeserve {

// Device memory, dense f32 rows, that a routed block copies its scores and inputs to. A view
// without data was not requested.
struct BlockLook {
  RowsView scores;  // [rows, E]
  RowsView inputs;  // [rows, c]
};

// Used by the thread that runs the model.
class LookBuffer {
 public:
  // `hidden_size`: of the model.
  LookBuffer(const RouteLayout& layout, int hidden_size);

  // Floats of device memory that a step of so many tokens takes.
  int64_t Floats(int64_t tokens, StepLooks looks) const;

  // Places the rows of all blocks in `memory`, one dense f32 row of Floats() columns. Without looks
  // that keep rows nothing is placed.
  void Place(int64_t tokens, StepLooks looks, const RowsView& memory);
  // What the block with this PlanSlot() fills.
  const BlockLook& of_slot(int slot) const { return looks_[static_cast<size_t>(slot)]; }

  // After the step: copies plans and rows to host memory. Valid until the next call.
  std::span<const BlockReport> Report(Backend& backend, StepLooks looks);

 private:
  const RouteLayout layout_;
  const int hidden_size_;
  RowsView memory_;
  std::vector<BlockLook> looks_;  // by PlanSlot()
  std::vector<float> host_;       // copy of memory_
  std::vector<BlockReport> reports_;
};

}  // namespace moeserve
