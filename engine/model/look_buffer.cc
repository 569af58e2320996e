#include "engine/model/look_buffer.h"

namespace moeserve {
namespace {

constexpr int64_t kAlignment = 64;  // floats; a multiple of every kernel's vector width

int64_t Aligned(int64_t floats) { return (floats + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

LookBuffer::LookBuffer(const RouteLayout& layout, int hidden_size)
    : layout_(layout), hidden_size_(hidden_size), looks_(layout.block_of_layer.size()) {}

int64_t LookBuffer::Floats(int64_t tokens, StepLooks looks) const {
  int64_t floats = 0;
  for (const RoutedBlock& block : layout_.blocks) {
    const int64_t rows = tokens * block.sub_tokens;
    if (looks.scores) floats += Aligned(rows * block.num_experts);
    if (looks.inputs) floats += Aligned(tokens * hidden_size_);
  }
  return floats;
}

void LookBuffer::Place(int64_t tokens, StepLooks looks, const RowsView& memory) {
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
    BlockLook& look = looks_[static_cast<size_t>(PlanSlot(block.layer, block.block))];
    look.scores = place(looks.scores, rows, block.num_experts);
    look.inputs = place(looks.inputs, rows, hidden_size_ / block.sub_tokens);
  }
}

std::span<const BlockReport> LookBuffer::Report(Backend& backend, StepLooks looks) {
  reports_.clear();
  if (looks.keeps_rows()) {
    host_.resize(static_cast<size_t>(memory_.cols));
    backend.CopyToHost(memory_, host_);
  }
  for (const RoutedBlock& block : layout_.blocks) {
    const int slot = PlanSlot(block.layer, block.block);
    BlockReport& report = reports_.emplace_back();
    report.layer = block.layer;
    report.block = block.block;
    report.plan = backend.HostPlan(slot);
    // Padding rows, which fill the step up to a fixed size, come last and are left out.
    const auto on_host = [&](const RowsView& view) -> std::span<const float> {
      if (view.data == nullptr) return {};
      const auto begin =
          static_cast<const float*>(view.data) - static_cast<const float*>(memory_.data);
      return std::span<const float>(host_).subspan(
          static_cast<size_t>(begin),
          static_cast<size_t>(report.plan.rows) * static_cast<size_t>(view.cols));
    };
    report.scores = on_host(of_slot(slot).scores);
    report.inputs = on_host(of_slot(slot).inputs);
  }
  return reports_;
}

}  // namespace moeserve
