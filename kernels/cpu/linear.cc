// Dense and grouped linear layers: one code path, a dense layer is a group of one.

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/packed_bank.h"

namespace moeserve::cpu {
namespace {

// Rows that one task takes through a block: the block stays in the second-level cache meanwhile.
constexpr int kRowsPerTask = 192;
constexpr int64_t kInlineMultiplyAdds = 1 << 16;

EpilogueActivation ToEpilogue(ActivationKind a) {
  switch (a) {
    case ActivationKind::kNone:
      return EpilogueActivation::kNone;
    case ActivationKind::kSilu:
      return EpilogueActivation::kSilu;
    case ActivationKind::kGelu:
      return EpilogueActivation::kGelu;
    case ActivationKind::kGeluTanh:
      return EpilogueActivation::kGeluTanh;
    case ActivationKind::kRelu:
      return EpilogueActivation::kRelu;
  }
  return EpilogueActivation::kNone;
}

}  // namespace

void CpuBackend::Linear(const LinearArgs& args) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const bool routed = args.plan != nullptr;
  MOESERVE_CHECK(!routed || args.plan->num_experts == bank.num_experts(),
                 "experts of plan and bank");
  linear_tasks_.clear();
  int64_t multiply_adds = 0;
  for (int e = 0; e < bank.num_experts(); ++e) {
    const int begin = routed ? args.plan->expert_offsets[e] : 0;
    const int end = routed ? args.plan->expert_offsets[e + 1] : static_cast<int>(args.input.rows);
    if (begin == end) continue;
    if (routed) ++expert_visits_;
    const CpuLinearBank::Matrix& m = bank.matrix(e);
    MOESERVE_CHECK(args.input.cols >= m.inputs, "input width of a linear layer");
    multiply_adds += int64_t{end - begin} * m.panels * kPanel * m.inputs;
    for (int b = 0; b < m.blocks; ++b) {
      for (int r = begin; r < end; r += kRowsPerTask) {
        linear_tasks_.push_back({e, b, r, std::min(end, r + kRowsPerTask)});
      }
    }
  }
  if (bank.shape().quantization != Quantization::kNone) QuantizeInput(args);
  const int64_t tasks = static_cast<int64_t>(linear_tasks_.size());
  if (multiply_adds < kInlineMultiplyAdds) {
    for (const LinearTask& t : linear_tasks_) RunLinearTask(args, t, 0);
    return;
  }
  pool_.Run(tasks, [&](int64_t i, int worker) { RunLinearTask(args, linear_tasks_[i], worker); });
}

void CpuBackend::QuantizeInput(const LinearArgs& args) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const Quantization type = bank.shape().quantization;
  const RoutingPlan* plan = args.plan;
  const int64_t rows = plan == nullptr || args.gather ? args.input.rows : plan->num_assignments;
  int64_t widest = 0;
  for (int e = 0; e < bank.num_experts(); ++e) {
    widest = std::max<int64_t>(widest, bank.matrix(e).inputs);
  }
  QuantRows& to = quant_rows_;
  to.padded = (widest + 63) / 64 * 64;
  to.groups = QuantGroups(type, widest);
  to.values.resize(std::max(to.values.size(), static_cast<size_t>(rows * to.padded)));
  to.scales.resize(std::max(to.scales.size(), static_cast<size_t>(rows * to.groups)));
  to.corrections.resize(to.scales.size());
  ForRows(rows, widest * 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int expert = plan == nullptr || args.gather ? 0 : plan->expert_of_assignment[r];
      const int64_t n = bank.matrix(expert).inputs;
      table_->quantize_row({.x = args.input.row(r),
                            .bf16 = args.input.dtype == DType::kBF16,
                            .n = n,
                            .group = QuantGroup(type),
                            .zero = type == Quantization::kInt8 ? 128 : 8,
                            .padded = (n + 7) / 8 * 8,
                            .values = to.values.data() + r * to.padded,
                            .scales = to.scales.data() + r * to.groups,
                            .corrections = to.corrections.data() + r * to.groups});
    }
  });
}

void CpuBackend::RunLinearTask(const LinearArgs& args, const LinearTask& task, int worker) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const CpuLinearBank::Matrix& m = bank.matrix(task.expert);
  const bool gated = bank.shape().gated;
  const int64_t k = m.inputs;
  const bool quantized = bank.shape().quantization != Quantization::kNone;
  const bool bf16_rows = args.input.dtype == DType::kBF16 && !quantized;
  MOESERVE_CHECK(!bf16_rows || bank.shape().weight_dtype == DType::kBF16,
                 "bf16 activations take bf16 weights");
  const bool widen = bf16_rows && !table_->bf16_dot;
  const int tile_rows = table_->row_tile;
  alignas(64) float tile[kMaxRowTile * kBlock];
  float* widened = widen ? scratch_[worker].Floats(static_cast<size_t>(tile_rows * k)) : nullptr;

  const int panels = bank.panels_of_block(m, task.block);
  const int halves = gated ? 2 : 1;
  const int first_column = task.block * kBlock / halves;
  const int packed_columns = panels * kPanel / halves;
  const int columns =
      args.pad_output ? packed_columns : std::min(packed_columns, m.outputs - first_column);
  const int64_t out_size = static_cast<int64_t>(SizeOf(args.output.dtype));

  for (int r = task.row_begin; r < task.row_end; r += tile_rows) {
    const int rows = std::min(tile_rows, task.row_end - r);
    const void* x[kMaxRowTile];
    const int8_t* values[kMaxRowTile];
    const float* scales[kMaxRowTile];
    const int32_t* corrections[kMaxRowTile];
    char* out[kMaxRowTile];
    for (int i = 0; i < rows; ++i) {
      const int source = args.gather ? args.plan->row_of_assignment[r + i] : r + i;
      out[i] = args.output.row(r + i) + first_column * out_size;
      if (quantized) {
        values[i] = quant_rows_.values.data() + source * quant_rows_.padded;
        scales[i] = quant_rows_.scales.data() + source * quant_rows_.groups;
        corrections[i] = quant_rows_.corrections.data() + source * quant_rows_.groups;
        continue;
      }
      x[i] = args.input.row(source);
      if (widen) {
        table_->widen_bf16(static_cast<const Bf16*>(x[i]), widened + i * k, k);
        x[i] = widened + i * k;
      }
    }
    const LinearTileArgs linear{.weights = bank.block(m, task.block),
                                .weight_dtype = bank.shape().weight_dtype,
                                .panels = panels,
                                .rows = rows,
                                .k = k,
                                .x = x,
                                .out = tile};
    if (quantized) {
      table_->linear_quantized({.weights = bank.block(m, task.block),
                                .int4 = bank.shape().quantization == Quantization::kInt4,
                                .panels = panels,
                                .rows = rows,
                                .k = k,
                                .x = values,
                                .scales = scales,
                                .corrections = corrections,
                                .out = tile});
    } else if (bf16_rows && !widen) {
      table_->linear_bf16(linear);
    } else {
      table_->linear_f32(linear);
    }
    table_->epilogue({.tile = tile,
                      .rows = rows,
                      .panels = panels,
                      .gated = gated,
                      .activation = ToEpilogue(args.activation),
                      .bias = m.bias == nullptr ? nullptr : m.bias + task.block * kBlock,
                      .out = out,
                      .out_bf16 = args.output.dtype == DType::kBF16,
                      .cols = columns});
  }
}

}  // namespace moeserve::cpu
