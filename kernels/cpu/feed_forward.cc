// Fused feed-forward: one thread computes both products of an expert and keeps the hidden units in
// its cache.

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/linear.h"

namespace moeserve::cpu {
namespace {

// Limits of the bytes of hidden units per thread. The larger one was timed with a second-level
// cache of 2 MiB; a cache that several cores share reports a size that one thread does not have.
constexpr int64_t kMinHiddenBytes = 384 << 10;
constexpr int64_t kMaxHiddenBytes = 1280 << 10;
// What is left of the second-level cache for two blocks of weights and the input rows.
constexpr int64_t kOtherBytes = 768 << 10;
// With fewer experts per thread, some threads would be idle while the last experts are computed.
constexpr int kExpertsPerThread = 16;
// With fewer rows per expert the product is memory-bound, and it is faster when all threads share
// one expert.
constexpr int kFewRows = 8;

const CpuLinearBank& Cpu(const LinearBank& bank) { return static_cast<const CpuLinearBank&>(bank); }

// Returns the bytes of hidden units that one thread keeps in its second-level cache. The size of
// the cache is 0 or -1 where it is unknown.
int64_t HiddenBytes() {
  static const int64_t bytes = std::clamp<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE) - kOtherBytes,
                                                   kMinHiddenBytes, kMaxHiddenBytes);
  return bytes;
}

// Task::part of the hidden units; the part of the input is 0.
constexpr int kPartOfHidden = 1;

// Clears the 64 bytes of each packed row that its columns do not fill, in the layout of
// PackRowsArgs. The row has a multiple of 16 columns in bf16.
void ClearLastLines(char* packed, int rows, int64_t columns) {
  if (columns % 32 == 0) return;
  const int64_t tile_bytes = PackedRowsBytes(kMatrixTileRows, columns * 2);
  for (int tile = 0; tile * kMatrixTileRows < rows; ++tile) {
    std::memset(packed + (tile + 1) * tile_bytes - kMatrixTileRows * 64, 0, kMatrixTileRows * 64);
  }
}

// Returns the number of hidden units of an expert, rounded up to whole panels of 16, because the up
// product writes whole panels.
int64_t HiddenColumns(const CpuLinearBank& bank, int expert) {
  return int64_t{bank.matrix(expert).panels} * kPanel / (bank.shape().gated ? 2 : 1);
}

}  // namespace

int LinearOps::FusedRows(const CpuLinearBank& up, DType dtype) const {
  int64_t widest = 1;
  for (int e = 0; e < up.num_experts(); ++e) widest = std::max(widest, HiddenColumns(up, e));
  const int64_t fit = HiddenBytes() / (widest * static_cast<int64_t>(SizeOf(dtype)));
  return static_cast<int>(std::clamp<int64_t>(fit, table_.row_tile, kRowsPerTask));
}

bool LinearOps::FusesFeedForward(const LinearBank& up, DType dtype, int64_t rows) const {
  const int64_t experts = up.num_experts();
  // The upper limit on rows: if an expert has more rows than one task takes, its weights are read
  // more than once.
  return experts >= int64_t{kExpertsPerThread} * workers_.threads() && rows >= experts * kFewRows &&
         rows <= experts * FusedRows(Cpu(up), dtype) * 3 / 4;
}

void LinearOps::FusedFeedForward(const FeedForwardArgs& args) {
  const CpuLinearBank& up = Cpu(*args.up);
  const CpuLinearBank& down = Cpu(*args.down);
  const RoutingPlan* plan = args.plan;
  MOESERVE_CHECK(plan == nullptr || plan->num_experts == up.num_experts(),
                 "experts of plan and bank");
  MOESERVE_CHECK(up.num_experts() == down.num_experts(), "experts of both products");
  MOESERVE_CHECK(up.shape().weight_dtype == DType::kBF16 || args.input.dtype == DType::kF32,
                 "bf16 activations take bf16 weights");
  const int rows_per_task = FusedRows(up, args.input.dtype);
  const LinearArgs first{.bank = args.up,
                         .plan = plan,
                         .gather = args.gather,
                         .input = args.input,
                         .output = {},
                         .activation = args.activation,
                         .pad_output = true};
  Work work{.args = first, .product = 2 * ++products_};
  ForExpertParts(plan, up.num_experts(), [&](std::span<const int32_t> experts) {
    tasks_.clear();
    int64_t cost = 0;
    for (const int32_t e : experts) {
      const int begin = plan == nullptr ? 0 : plan->expert_offsets[e];
      const int end =
          plan == nullptr ? static_cast<int>(args.input.rows) : plan->expert_offsets[e + 1];
      const CpuLinearBank::Matrix& m = up.matrix(e);
      if (begin == end || m.panels == 0) continue;
      if (plan != nullptr) expert_visits_ += 2;
      MOESERVE_CHECK(args.input.cols >= m.inputs, "input width of a feed-forward");
      MOESERVE_CHECK(down.matrix(e).inputs == m.outputs, "hidden width of a feed-forward");
      for (int r = begin; r < end; r += rows_per_task) {
        const int r_end = std::min(end, r + rows_per_task);
        cost += m.blocks * m.block_bytes * std::max(r_end - r, kRowsOfStream);
        tasks_.push_back({e, 0, m.blocks, r, r_end, 0, cost});
      }
    }
    if (cost == 0) return;
    if (up.shape().quantization != Quantization::kNone && work.records == nullptr) {
      QuantizeInput(&work);
    }
    QueueTasks(workers_.threads(), cost);
    workers_.RunQueues(workers_.threads(), 1, [&](int64_t i, int64_t end, int worker) {
      RunFusedTask(args, work, i, end, worker);
    });
  });
}

void LinearOps::RunFusedTask(const FeedForwardArgs& args, const Work& up, int64_t index,
                             int64_t end, int worker) {
  const CpuLinearBank& up_bank = Cpu(*args.up);
  const CpuLinearBank& down_bank = Cpu(*args.down);
  Task task = tasks_[index];
  const CpuLinearBank::Matrix& down = down_bank.matrix(task.expert);
  Scratch& scratch = scratch_[worker];

  const int rows = task.row_end - task.row_begin;
  const int64_t columns = HiddenColumns(up_bank, task.expert);
  RowsView hidden{.dtype = args.input.dtype, .rows = rows, .cols = columns, .stride = columns};
  char* packed = nullptr;  // the hidden units as the next product's packed rows
  const bool packs = down_bank.shape().quantization == Quantization::kNone &&
                     UsesMatrixUnit(down_bank, down, hidden.dtype, rows);
  if (packs) {
    packed = PackedMemory(kPartOfHidden, rows, columns * 2, worker);
    ClearLastLines(packed, rows, columns);
    hidden.data = packed;
  } else {
    const auto bytes = static_cast<size_t>(rows * columns) * SizeOf(hidden.dtype);
    if (scratch.hidden.size() < bytes) scratch.hidden.resize(bytes);
    hidden.data = scratch.hidden.data();
  }

  LinearArgs first = up.args;
  first.output = hidden;
  Work first_work{first, up.records, up.record_stride};
  first_work.first_output = task.row_begin;
  first_work.packed_output = packed;
  first_work.product = up.product;
  RunBlocks(first_work, task, down_bank.block_span(down, 0), worker);
  if (packed != nullptr) {
    task.part = kPartOfHidden;
    // PackTask() finds the rows.
    scratch.packed[kPartOfHidden].key = {up.product + 1, task.expert, task.row_begin, task.row_end};
  }

  const LinearArgs second{
      .bank = args.down, .plan = args.plan, .input = hidden, .output = args.output};
  Work second_work{.args = second, .first_input = task.row_begin, .product = up.product + 1};
  if (down_bank.shape().quantization != Quantization::kNone) {
    const int64_t stride = QuantRecordBytes(down_bank.shape().quantization, down.inputs);
    const auto size = static_cast<size_t>(hidden.rows * stride);
    if (scratch.hidden_records.size() < size) scratch.hidden_records.resize(size);
    for (int64_t r = 0; r < hidden.rows; ++r) {
      QuantizeRowOf(down_bank, hidden, r, down.inputs, scratch.hidden_records.data() + r * stride);
    }
    second_work.records = scratch.hidden_records.data();
    second_work.record_stride = stride;
  }
  task.block_end = down.blocks;
  RunBlocks(second_work, task, FirstBlock(up_bank, index + 1, end), worker);
}

}  // namespace moeserve::cpu
