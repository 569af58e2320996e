#include "engine/step/report_buffer.h"

namespace moeserve {
namespace {

constexpr int64_t kAlignment = 64;  // floats; a multiple of every kernel's vector width

int64_t Aligned(int64_t floats) { return (floats + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

ReportBuffer::ReportBuffer(const RouteLayout& layout, int hidden_size)
    : layout_(layout), hidden_size_(hidden_size) {
  if (!layout.blocks.empty()) rows_.resize(static_cast<size_t>(layout.blocks.back().slot) + 1);
}

int64_t ReportBuffer::Floats(int64_t tokens, ReportContents contents) const {
  int64_t floats = 0;
  for (const RoutedBlock& block : layout_.blocks) {
    const int64_t rows = tokens * block.sub_tokens;
    if (contents.scores) floats += Aligned(rows * block.num_experts);
    if (contents.inputs) floats += Aligned(tokens * hidden_size_);
  }
  return floats;
}

void ReportBuffer::Place(int64_t tokens, ReportContents contents, const RowsView& memory) {
  memory_ = memory;
  auto* next = static_cast<float*>(memory.data);
  const auto place = [&](bool wanted, int64_t rows, int64_t cols) {
    if (!wanted) return RowsView{};
    const RowsView view{next, DType::kF32, rows, cols, cols};
    next += Aligned(rows * cols);
    return view;
  };
  for (const RoutedBlock& block : layout_.blocks) {
    const int64_t rows = tokens * block.sub_tokens;
    ReportedRows& reported = rows_[static_cast<size_t>(block.slot)];
    reported.scores = place(contents.scores, rows, block.num_experts);
    reported.inputs = place(contents.inputs, rows, hidden_size_ / block.sub_tokens);
  }
}

std::span<const BlockReport> ReportBuffer::Report(Backend& backend, ReportContents contents) {
  reports_.clear();
  if (contents.keeps_rows()) {
    host_.resize(static_cast<size_t>(memory_.cols));
    backend.CopyToHost(memory_, host_);
  }
  for (const RoutedBlock& block : layout_.blocks) {
    BlockReport& report = reports_.emplace_back();
    report.index = static_cast<int>(reports_.size()) - 1;
    report.layer = block.layer;
    report.block = block.block;
    report.plan = backend.HostPlan(block.slot);
    // Padding rows, which fill the step up to a fixed size, come last and are left out.
    const auto on_host = [&](const RowsView& view) -> std::span<const float> {
      if (view.data == nullptr) return {};
      const auto begin =
          static_cast<const float*>(view.data) - static_cast<const float*>(memory_.data);
      return std::span<const float>(host_).subspan(
          static_cast<size_t>(begin),
          static_cast<size_t>(report.plan.rows) * static_cast<size_t>(view.cols));
    };
    report.scores = on_host(of_slot(block.slot).scores);
    report.inputs = on_host(of_slot(block.slot).inputs);
  }
  return reports_;
}

}  // namespace moeserve
