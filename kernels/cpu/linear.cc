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
constexpr int kTasksPerThread = 32;
constexpr int kMaxTaskBlocks = 8;

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
  int64_t blocks = 0;
  for (int e = 0; e < bank.num_experts(); ++e) {
    const int begin = routed ? args.plan->expert_offsets[e] : 0;
    const int end = routed ? args.plan->expert_offsets[e + 1] : static_cast<int>(args.input.rows);
    if (begin == end) continue;
    if (routed) ++expert_visits_;
    const CpuLinearBank::Matrix& m = bank.matrix(e);
    MOESERVE_CHECK(args.input.cols >= m.inputs, "input width of a linear layer");
    multiply_adds += int64_t{end - begin} * m.panels * kPanel * m.inputs;
    blocks += m.blocks;
  }
  if (multiply_adds == 0) return;
  // Neighbouring blocks are one stream for the thread that takes them; enough tasks are left that a
  // thread which is off its core does not hold up the others.
  const int blocks_per_task = static_cast<int>(std::clamp<int64_t>(
      blocks / (int64_t{pool_.threads()} * kTasksPerThread), 1, kMaxTaskBlocks));
  for (int e = 0; e < bank.num_experts(); ++e) {
    const int begin = routed ? args.plan->expert_offsets[e] : 0;
    const int end = routed ? args.plan->expert_offsets[e + 1] : static_cast<int>(args.input.rows);
    const int of_expert = begin == end ? 0 : bank.matrix(e).blocks;
    for (int b = 0; b < of_expert; b += blocks_per_task) {
      for (int r = begin; r < end; r += kRowsPerTask) {
        linear_tasks_.push_back(
            {e, b, std::min(of_expert, b + blocks_per_task), r, std::min(end, r + kRowsPerTask)});
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
  const int group = QuantGroup(type);
  quant_rows_.stride = QuantGroups(type, widest) * (group + 8);
  quant_rows_.records.resize(
      std::max(quant_rows_.records.size(), static_cast<size_t>(rows * quant_rows_.stride)));
  ForRows(rows, widest, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int expert = plan == nullptr || args.gather ? 0 : plan->expert_of_assignment[r];
      table_->quantize_row({.x = args.input.row(r),
                            .bf16 = args.input.dtype == DType::kBF16,
                            .n = bank.matrix(expert).inputs,
                            .group = group,
                            .zero = -QuantMin(type) + (type == Quantization::kInt8),
                            .records = quant_rows_.records.data() + r * quant_rows_.stride});
    }
  });
}

void CpuBackend::RunLinearTask(const LinearArgs& args, const LinearTask& task, int worker) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.shape().weight_dtype == DType::kBF16 || args.input.dtype == DType::kF32,
                 "bf16 activations take bf16 weights");
  for (int b = task.block_begin; b < task.block_end; ++b) RunLinearBlock(args, task, b, worker);
}

void CpuBackend::RunLinearBlock(const LinearArgs& args, const LinearTask& task, int block,
                                int worker) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const CpuLinearBank::Matrix& m = bank.matrix(task.expert);
  const int panels = bank.panels_of_block(m, block);
  const int halves = bank.shape().gated ? 2 : 1;
  const int first_column = block * kBlock / halves;
  const int packed_columns = panels * kPanel / halves;
  const int columns =
      args.pad_output ? packed_columns : std::min(packed_columns, m.outputs - first_column);
  const int64_t out_size = static_cast<int64_t>(SizeOf(args.output.dtype));

  // Tiles of about equal size: a full one beside one of a single row would be slower.
  const int rows = task.row_end - task.row_begin;
  const int tiles = (rows + table_->row_tile - 1) / table_->row_tile;
  // While tiles work on this block from the cache, the next one of the task comes from memory.
  const int64_t ahead_per_tile = 2 * bank.block_bytes(m, block) / panels;  // two lines a step
  const char* ahead = bank.block(m, block + 1);
  const char* const last_ahead =
      block + 1 < task.block_end ? ahead + bank.block_bytes(m, block + 1) : ahead;

  LinearTile tile;
  tile.block = block;
  for (int t = 0; t < tiles; ++t) {
    const int begin = task.row_begin + static_cast<int>(int64_t{rows} * t / tiles);
    const int end = task.row_begin + static_cast<int>(int64_t{rows} * (t + 1) / tiles);
    tile.rows = end - begin;
    for (int i = 0; i < tile.rows; ++i) {
      tile.source[i] = args.gather ? args.plan->row_of_assignment[begin + i] : begin + i;
      tile.out[i] = args.output.row(begin + i) + first_column * out_size;
    }
    tile.ahead = tiles == 1 ? nullptr : ahead < last_ahead ? ahead : bank.block(m, block);
    ahead += ahead_per_tile;
    MultiplyTile(args, m, tile, worker);
    table_->epilogue({.tile = tile.sums,
                      .rows = tile.rows,
                      .panels = panels,
                      .gated = bank.shape().gated,
                      .activation = ToEpilogue(args.activation),
                      .bias = m.bias == nullptr ? nullptr : m.bias + block * kBlock,
                      .out = tile.out,
                      .out_bf16 = args.output.dtype == DType::kBF16,
                      .cols = columns});
  }
}

void CpuBackend::MultiplyTile(const LinearArgs& args, const CpuLinearBank::Matrix& m,
                              LinearTile& tile, int worker) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const int panels = bank.panels_of_block(m, tile.block);
  if (bank.shape().quantization != Quantization::kNone) {
    const char* x[kMaxRowTile];
    for (int i = 0; i < tile.rows; ++i) {
      x[i] = quant_rows_.records.data() + tile.source[i] * quant_rows_.stride;
    }
    table_->linear_quantized({.weights = bank.block(m, tile.block),
                              .int4 = bank.shape().quantization == Quantization::kInt4,
                              .panels = panels,
                              .rows = tile.rows,
                              .k = m.inputs,
                              .x = x,
                              .ahead = tile.ahead,
                              .out = tile.sums});
    return;
  }
  const bool bf16_rows = args.input.dtype == DType::kBF16;
  const bool widen = bf16_rows && !table_->bf16_dot;
  float* widened =
      widen ? scratch_[worker].Floats(static_cast<size_t>(int64_t{tile.rows} * m.inputs)) : nullptr;
  const void* x[kMaxRowTile];
  for (int i = 0; i < tile.rows; ++i) {
    x[i] = args.input.row(tile.source[i]);
    if (!widen) continue;
    table_->widen_bf16(static_cast<const Bf16*>(x[i]), widened, m.inputs);
    x[i] = widened;
    widened += m.inputs;
  }
  const LinearTileArgs linear{.weights = bank.block(m, tile.block),
                              .weight_dtype = bank.shape().weight_dtype,
                              .panels = panels,
                              .rows = tile.rows,
                              .k = m.inputs,
                              .x = x,
                              .ahead = tile.ahead,
                              .out = tile.sums};
  if (bf16_rows && !widen) {
    table_->linear_bf16(linear);
  } else {
    table_->linear_f32(linear);
  }
}

}  // namespace moeserve::cpu
