// Keeps the router scores and router inputs that a step reports until the step has ended.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/step/step_report.h"
#include "kernels/backend.h"

namespace moeserve {

// Device memory to which one routed block copies its router scores and router inputs as dense f32
// rows. A view is null if the step does not report these rows.
struct ReportedRows {
  RowsView scores;  // [rows, E], E experts
  RowsView inputs;  // [rows, c], c columns of the router's input
};

// The buffer for all routed blocks of a model. Used only by the thread that runs the model.
class ReportBuffer {
 public:
  // `hidden_size` is the model's.
  ReportBuffer(const RouteLayout& layout, int hidden_size);

  // Returns the number of floats of device memory that a step with `tokens` tokens needs for its
  // reported rows.
  int64_t Floats(int64_t tokens, ReportContents contents) const;

  // Assigns a part of `memory`, one dense f32 row of Floats() columns, to every block. Assigns
  // nothing if `contents` has neither scores nor inputs.
  void Place(int64_t tokens, ReportContents contents, const RowsView& memory);
  // Returns the memory that the block with this RoutedBlock::slot fills.
  const ReportedRows& of_slot(int slot) const { return rows_[static_cast<size_t>(slot)]; }

  // Copies the routing plans and reported rows of the finished step to host memory. The result is
  // valid until the next call.
  std::span<const BlockReport> Report(Backend& backend, ReportContents contents);

 private:
  const RouteLayout layout_;
  const int hidden_size_;
  RowsView memory_;
  std::vector<ReportedRows> rows_;  // indexed by RoutedBlock::slot
  std::vector<float> host_;         // copy of memory_
  std::vector<BlockReport> reports_;
};

}  // namespace moeserve
