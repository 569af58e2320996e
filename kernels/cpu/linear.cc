#include "kernels/cpu/linear.h"

#include <algorithm>

#include "base/check.h"

namespace moeserve::cpu {
namespace {

constexpr int64_t kInlineMultiplyAdds = 1 << 16;
// Adjacent small blocks of weights are combined into tasks of up to this size, to amortise handing
// a task to a thread.
constexpr int64_t kTaskBytes = 64 << 10;
// The rows of a dense layer are divided into groups of at least this many, up to one for each
// thread. The weights are then read once for each group, but a thread's rows stay in its cache
// (ForRows).
constexpr int kRowsPerGroup = 128;
constexpr int64_t kLine = 64;  // bytes of a line of the cache
// With at least this many tiles, int4-k weights are multiplied by their factors once for all tiles.
constexpr int kTilesOfWidened = 3;

// With fewer rows of a task, products of integers are faster without a matrix unit.
constexpr int kIntegerRowsOfMatrixUnit = 7;

// Returns the bytes that a row of the matrix's input has in PackRowsArgs.
int64_t RowBytes(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m) {
  if (bank.shape().quantization == Quantization::kNone) return int64_t{m.inputs} * 2;
  return (int64_t{m.inputs} + 63) / 64 * 64;
}

// Fetches the lines of a part of a row into the cache for writing. Without this, the stores of a
// tile wait for lines that another thread has read, and with them the next tile. The lines are
// `stride` bytes apart.
void PrefetchToWrite(const char* line, int64_t bytes, int64_t stride) {
  for (int64_t at = 0; at < bytes; at += kLine, line += stride) {
#if defined(__x86_64__)
    // Compilers emit this instruction only for newer processors; others ignore it.
    asm volatile("prefetchw %0" : : "m"(*line));
#else
    __builtin_prefetch(line, 1);
#endif
  }
}

}  // namespace

void LinearOps::Linear(const LinearArgs& args) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const bool routed = args.plan != nullptr;
  MOESERVE_CHECK(routed ? args.plan->num_experts == bank.num_experts()
                        : args.segments || bank.num_experts() == 1,
                 "experts of plan and bank");
  MOESERVE_CHECK(bank.shape().weight_dtype == DType::kBF16 || args.input.dtype == DType::kF32,
                 "bf16 activations take bf16 weights");
  Work work{.args = args, .product = 2 * ++products_};
  ForExpertParts(args.plan, bank.num_experts(), [&](std::span<const int32_t> experts) {
    tasks_.clear();
    Sums sums;
    for (const int32_t e : experts) AddTasks(args, e, sums);
    if (sums.multiply_adds == 0) return;
    if (bank.shape().quantization != Quantization::kNone && work.records == nullptr) {
      QuantizeInput(&work);
    }
    const int queues = sums.multiply_adds < kInlineMultiplyAdds ? 1 : workers_.threads();
    QueueTasks(queues, sums.cost);
    workers_.RunQueues(queues, 1, [&](int64_t i, int64_t end, int worker) {
      RunBlocks(work, tasks_[i], FirstBlock(bank, i + 1, end), worker);
    });
  });
}

void LinearOps::AddTasks(const LinearArgs& args, int e, Sums& sums) {
  const auto& bank = static_cast<const CpuLinearBank&>(*args.bank);
  const bool routed = args.plan != nullptr;
  const int segments = args.segments ? bank.num_experts() : 1;
  const int begin = routed ? args.plan->expert_offsets[e] : 0;
  const int end = routed ? args.plan->expert_offsets[e + 1] : static_cast<int>(args.input.rows);
  const CpuLinearBank::Matrix& m = bank.matrix(e);
  if (begin == end || m.panels == 0) return;
  if (routed) ++expert_visits_;
  MOESERVE_CHECK(args.input.cols / segments >= m.inputs, "input width of a linear layer");
  sums.multiply_adds += int64_t{end - begin} * m.panels * kPanel * m.inputs;
  const int blocks = static_cast<int>(std::clamp<int64_t>(kTaskBytes / m.block_bytes, 1, m.blocks));
  const int groups = routed || args.segments
                         ? 1
                         : std::clamp((end - begin) / kRowsPerGroup, 1, workers_.threads());
  for (int g = 0; g < groups; ++g) {
    const int first = begin + static_cast<int>(int64_t{end - begin} * g / groups);
    const int last = begin + static_cast<int>(int64_t{end - begin} * (g + 1) / groups);
    for (int b = 0; b < m.blocks; b += blocks) {
      const int b_end = std::min(m.blocks, b + blocks);
      int part = 0;
      for (int r = first; r < last; r += kRowsPerTask, ++part) {
        const int r_end = std::min(last, r + kRowsPerTask);
        sums.cost += (b_end - b) * m.block_bytes * std::max(r_end - r, kRowsOfStream);
        tasks_.push_back({e, b, b_end, r, r_end, part, sums.cost});
      }
    }
  }
}

void LinearOps::QueueTasks(int queues, int64_t cost) {
  const auto tasks = static_cast<int64_t>(tasks_.size());
  int64_t begin = 0, end = 0;
  for (int q = 0; q < queues; ++q, begin = end) {
    const int64_t share = cost / queues * (q + 1);
    while (end < tasks && (q + 1 == queues || tasks_[end].cost_end <= share)) ++end;
    workers_.SetQueue(q, begin, end);
  }
}

void LinearOps::QuantizeInput(Work* work) {
  const LinearArgs& args = work->args;
  const CpuLinearBank& bank = work->bank();
  const RoutingPlan* plan = args.plan;
  const int64_t rows = plan == nullptr || args.gather ? args.input.rows : plan->num_assignments;
  int64_t widest = 0;
  for (int e = 0; e < bank.num_experts(); ++e) {
    widest = std::max<int64_t>(widest, bank.matrix(e).inputs);
  }
  const int64_t stride = QuantRecordBytes(bank.shape().quantization, widest);
  const int segments = args.segments ? bank.num_experts() : 1;
  quant_records_.resize(
      std::max(quant_records_.size(), static_cast<size_t>(rows * segments * stride)));
  work->records = quant_records_.data();
  work->record_stride = stride;
  work->record_rows = rows;
  const int64_t width = args.input.cols / segments;
  workers_.ForEachRow(rows, widest * segments, [&](int64_t r) {
    for (int e = 0; e < segments; ++e) {
      const bool routed = plan != nullptr && !args.gather;
      const int expert = routed ? plan->expert_of_assignment[r] : e;
      QuantizeRowOf(bank, args.input.Columns(e * width, width), r, bank.matrix(expert).inputs,
                    quant_records_.data() + (e * rows + r) * stride);
    }
  });
}

void LinearOps::QuantizeRowOf(const CpuLinearBank& bank, const RowsView& rows, int64_t row,
                              int64_t width, char* records) const {
  table_.quantize_row({.x = rows.row(row),
                       .bf16 = rows.dtype == DType::kBF16,
                       .n = width,
                       .quantization = bank.shape().quantization,
                       .records = records});
}

std::span<const char> LinearOps::FirstBlock(const CpuLinearBank& bank, int64_t index,
                                            int64_t queue_end) const {
  if (index >= queue_end) return {};
  return bank.block_span(bank.matrix(tasks_[index].expert), tasks_[index].block_begin);
}

void LinearOps::RunBlocks(const Work& work, const Task& task, std::span<const char> after,
                          int worker) {
  const CpuLinearBank& bank = work.bank();
  const CpuLinearBank::Matrix& m = bank.matrix(task.expert);
  for (int b = task.block_begin; b < task.block_end; ++b) {
    const bool last = b + 1 == task.block_end;
    RunBlock(work, task, b, last ? after : bank.block_span(m, b + 1), worker);
  }
}

void LinearOps::RunBlock(const Work& work, const Task& task, int block, std::span<const char> next,
                         int worker) {
  const LinearArgs& args = work.args;
  const CpuLinearBank& bank = work.bank();
  const CpuLinearBank::Matrix& m = bank.matrix(task.expert);
  const int panels = bank.panels_of_block(m, block);
  const int halves = bank.shape().gated ? 2 : 1;
  const int first_column = block * kBlock / halves;
  const int packed_columns = panels * kPanel / halves;
  const int columns =
      args.pad_output ? packed_columns : std::min(packed_columns, m.outputs - first_column);
  const int64_t out_size = static_cast<int64_t>(SizeOf(args.output.dtype));
  const int64_t line_stride = work.packed_output == nullptr ? kLine : kLine * kMatrixTileRows;

  const int rows = task.row_end - task.row_begin;
  const bool matrix = UsesMatrixUnit(bank, m, args.input.dtype, rows);
  const int most = matrix                                             ? table_.matrix_rows
                   : bank.shape().quantization == Quantization::kNone ? table_.row_tile
                                                                      : table_.quant_row_tile;
  const int tiles = (rows + most - 1) / most;

  Tile tile;
  tile.block = block;
  const int64_t output_begin =
      args.segments ? task.expert * (args.output.cols / bank.num_experts()) : 0;
  // While tiles compute with this block from the cache, the next block is prefetched at an even
  // rate, because requests beyond the memory bandwidth stall the products. A single tile reads its
  // block from memory instead, if it reads all panels in one pass: a pass over some of the panels
  // reads with gaps, which is slow.
  tile.widened = WidenedBlock(bank, m, block, matrix ? kTilesOfWidened : tiles, worker);
  const char* const packed = matrix ? PackTask(work, task, worker) : nullptr;
  const int panels_at_once = matrix ? panels : table_.panels_of_tile(rows / tiles);
  const int passes = (panels + panels_at_once - 1) / panels_at_once;
  const bool stream = tiles == 1 && tile.widened == nullptr && passes == 1;
  const int64_t tile_fetches = m.steps * passes;
  const int64_t fetches = tiles * tile_fetches;
  tile.ahead_stride = std::min<int64_t>((static_cast<int64_t>(next.size()) + fetches - 1) / fetches,
                                        kLine * table_.lines_ahead);
  for (int t = 0; t < tiles; ++t) {
    // Tiles of about equal size are faster than full tiles followed by a small one, but on a matrix
    // unit a full tile takes no longer than a small one.
    const int first = matrix ? t * most : static_cast<int>(int64_t{rows} * t / tiles);
    const int last =
        matrix ? std::min(rows, first + most) : static_cast<int>(int64_t{rows} * (t + 1) / tiles);
    const int begin = task.row_begin + first;
    tile.rows = last - first;
    tile.packed = matrix ? packed + first * PackedRowsBytes(kMatrixTileRows, RowBytes(bank, m)) /
                                        kMatrixTileRows
                         : nullptr;
    for (int i = 0; i < tile.rows; ++i) {
      tile.x[i] = InputRow(work, task.expert, begin + i);
      tile.out[i] = OutputOf(work, begin + i, output_begin + first_column);
      PrefetchToWrite(tile.out[i], columns * out_size, line_stride);
    }
    tile.ahead = stream         ? nullptr
                 : next.empty() ? bank.block(m, block)
                                : next.data() + t * tile_fetches * tile.ahead_stride;
    MultiplyTile(work, m, tile, worker);
    table_.epilogue({.tile = tile.sums,
                     .rows = tile.rows,
                     .panels = panels,
                     .gated = bank.shape().gated,
                     .activation = args.activation,
                     .bias = m.bias == nullptr ? nullptr : m.bias + block * kBlock,
                     .out = tile.out,
                     .out_bf16 = args.output.dtype == DType::kBF16,
                     .cols = columns,
                     .line_stride = line_stride});
  }
}

const char* LinearOps::WidenedBlock(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m,
                                    int block, int tiles, int worker) {
  if (table_.widen_block == nullptr || !HasSubGroups(bank.shape().quantization) ||
      tiles < kTilesOfWidened || m.inputs > kWholeRow) {
    return nullptr;
  }
  const int panels = bank.panels_of_block(m, block);
  const auto floats = static_cast<size_t>(WidenedBytes(panels, m.inputs)) / sizeof(float);
  float* const out = workers_.Floats(worker, floats);
  table_.widen_block({.weights = bank.block(m, block),
                      .panels = panels,
                      .k = m.inputs,
                      .fetch_l1 = fetch_l1_,
                      .out = reinterpret_cast<char*>(out)});
  return reinterpret_cast<const char*>(out);
}

bool LinearOps::UsesMatrixUnit(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m,
                               DType input, int rows) const {
  if (table_.matrix_rows == 0) return false;
  switch (bank.shape().quantization) {
    case Quantization::kNone:
      return input == DType::kBF16;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
    case Quantization::kInt4K:
      return rows >= kIntegerRowsOfMatrixUnit && m.inputs <= kWholeRow;
    case Quantization::kInt4:
      break;
  }
  return false;
}

const char* LinearOps::InputRow(const Work& work, int expert, int assignment) {
  const LinearArgs& args = work.args;
  const int64_t row =
      args.gather ? args.plan->row_of_assignment[assignment] : assignment - work.first_input;
  const int64_t segment = args.segments ? expert : 0;
  if (work.records != nullptr) {
    return work.records + (segment * work.record_rows + row) * work.record_stride;
  }
  const auto size = static_cast<int64_t>(SizeOf(args.input.dtype));
  const int64_t columns = args.segments ? args.input.cols / args.bank->num_experts() : 0;
  return args.input.row(row) + segment * columns * size;
}

char* LinearOps::OutputOf(const Work& work, int assignment, int64_t first_column) {
  const RowsView& output = work.args.output;
  const int64_t row = assignment - work.first_output;
  const int64_t at = first_column * static_cast<int64_t>(SizeOf(output.dtype));
  if (work.packed_output == nullptr) return output.row(row) + at;
  const int64_t tile_bytes = PackedRowsBytes(kMatrixTileRows, output.cols * 2);
  return work.packed_output + row / kMatrixTileRows * tile_bytes + row % kMatrixTileRows * kLine +
         at * kMatrixTileRows;
}

char* LinearOps::PackedMemory(int part, int rows, int64_t row_bytes, int worker) {
  std::vector<PackedRows>& parts = scratch_[worker].packed;
  if (parts.size() <= static_cast<size_t>(part)) parts.resize(part + 1);
  PackedRows& packed = parts[part];
  const auto lines = static_cast<size_t>(PackedRowsBytes(rows, row_bytes) / kLine);
  packed.key = {};
  if (packed.lines.size() < lines) packed.lines.resize(lines);
  return packed.lines.data()->bytes;
}

const char* LinearOps::PackTask(const Work& work, const Task& task, int worker) {
  const CpuLinearBank& bank = work.bank();
  std::vector<PackedRows>& parts = scratch_[worker].packed;
  const PackedRows::Key key{work.product, task.expert, task.row_begin, task.row_end};
  if (static_cast<size_t>(task.part) < parts.size() && parts[task.part].key == key) {
    return parts[task.part].lines.data()->bytes;
  }
  const int rows = task.row_end - task.row_begin;
  const int64_t bytes = RowBytes(bank, bank.matrix(task.expert));
  char* const out = PackedMemory(task.part, rows, bytes, worker);
  const char* x[kRowsPerTask];
  for (int i = 0; i < rows; ++i) x[i] = InputRow(work, task.expert, task.row_begin + i);
  const Quantization type = bank.shape().quantization;
  const bool groups = type != Quantization::kNone && QuantGroup(type) < bytes;
  table_.pack_rows({.x = x,
                    .rows = rows,
                    .bytes = bytes,
                    .group_bytes = groups ? QuantGroup(type) : bytes,
                    .group_stride = groups ? QuantRecordBytes(type, QuantGroup(type)) : 0,
                    .out = out});
  parts[task.part].key = key;
  return out;
}

void LinearOps::MultiplyTile(const Work& work, const CpuLinearBank::Matrix& m, Tile& tile,
                             int worker) {
  const CpuLinearBank& bank = work.bank();
  const int panels = bank.panels_of_block(m, tile.block);
  if (bank.shape().quantization != Quantization::kNone) {
    const bool widened = tile.widened != nullptr;
    const Quantization type = bank.shape().quantization;
    const bool wide_inputs = table_.wide_inputs && tile.rows > 1 &&
                             (type == Quantization::kInt8 || type == Quantization::kInt8Channel);
    const auto wide_bytes = static_cast<size_t>(tile.rows * WideRecordBytes(m.inputs));
    table_.linear_quantized({.weights = widened ? tile.widened : bank.block(m, tile.block),
                             .quantization = type,
                             .panels = panels,
                             .rows = tile.rows,
                             .k = m.inputs,
                             .x = tile.x,
                             .ahead = tile.ahead,
                             .ahead_stride = tile.ahead_stride,
                             .fetch_l1 = fetch_l1_,
                             .widened = widened,
                             .wide = wide_inputs ? reinterpret_cast<char*>(workers_.Floats(
                                                       worker, wide_bytes / sizeof(float)))
                                                 : nullptr,
                             .packed = tile.packed,
                             .out = tile.sums});
    return;
  }
  const bool bf16_rows = work.args.input.dtype == DType::kBF16;
  const bool widen = bf16_rows && !table_.bf16_dot;
  float* widened =
      widen ? workers_.Floats(worker, static_cast<size_t>(int64_t{tile.rows} * m.inputs)) : nullptr;
  for (int i = 0; widen && i < tile.rows; ++i, widened += m.inputs) {
    table_.widen_bf16(reinterpret_cast<const Bf16*>(tile.x[i]), widened, m.inputs);
    tile.x[i] = reinterpret_cast<const char*>(widened);
  }
  const void* rows[kMatrixRows];
  std::copy(tile.x, tile.x + tile.rows, rows);
  const LinearTileArgs linear{.weights = bank.block(m, tile.block),
                              .weight_dtype = bank.shape().weight_dtype,
                              .panels = panels,
                              .rows = tile.rows,
                              .k = m.inputs,
                              .x = rows,
                              .ahead = tile.ahead,
                              .ahead_stride = tile.ahead_stride,
                              .fetch_l1 = fetch_l1_,
                              .packed = tile.packed,
                              .out = tile.sums};
  if (bf16_rows && !widen) {
    table_.linear_bf16(linear);
  } else {
    table_.linear_f32(linear);
  }
}

}  // namespace moeserve::cpu
