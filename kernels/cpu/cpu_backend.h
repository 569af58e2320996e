// The CPU backend: weights are packed for the CPU's vector instructions, and all threads belong to
// one pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/packed_bank.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/weight_memory.h"

namespace moeserve::cpu {

class CpuBackend : public Backend {
 public:
  // `table` must be supported by the processor (isa.h); threads >= 1.
  CpuBackend(const KernelTable* table, int threads);

  std::string_view name() const override { return "cpu"; }
  std::string_view description() const override { return description_; }
  int threads() const override { return pool_.threads(); }
  std::string_view instruction_set() const override { return table_->name; }
  bool rounds_head_input() const override { return table_->bf16_dot; }

  Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t bytes) override;
  Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) override;
  std::string_view packed_layout() const override { return kPackedLayout; }
  int64_t PackedBankBytes(const LinearBankShape& shape) const override;
  Result<std::unique_ptr<LinearBank>> NewPackedBank(LinearBankShape shape,
                                                    PackedBytes packed) override;
  Result<std::unique_ptr<NormBank>> NewNormBank(NormShape shape, std::span<const HostTensor> scales,
                                                std::span<const HostTensor> shifts) override;
  Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor& table) override;
  Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank& bank) override;
  Result<std::unique_ptr<Router>> NewRouter(const RouteSettings& settings,
                                            const RouterTensors& tensors) override;
  Result<std::unique_ptr<DeviceBuffer>> Upload(std::span<const float> values) override;
  Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape> layers,
                                                     KvCacheType type, int64_t num_pages) override;
  int64_t PageBytes(std::span<const KvLayerShape> layers, KvCacheType type) const override;

  Result<std::unique_ptr<StateStorage>> NewStates(std::vector<StateShape> shapes, int num_slots,
                                                  int pending_rows) override;

  StepRows BeginStep(const StepInputs& inputs, const void* owner, bool replayable) override;
  void RunStep(const std::function<void()>& operations) override;
  void ForgetSteps(const void*) override {}
  void Embed(const EmbedArgs& args) override;
  void Norm(const NormArgs& args) override;
  void Linear(const LinearArgs& args) override;
  bool FusesFeedForward(const LinearBank& up, const LinearBank& down, DType dtype,
                        int64_t rows) const override;
  void FusedFeedForward(const FeedForwardArgs& args) override;
  void Rope(const RopeArgs& args) override;
  void AppendKv(const AppendKvArgs& args) override;
  void Attention(const AttentionArgs& args) override;
  void ShortConvolution(const ShortConvolutionArgs& args) override;
  RoutingPlan Route(const RouteArgs& args) override;
  RoutingPlan FirstExperts(const RoutingPlan& plan, int count) const override;
  void AssignRows(const AssignRowsArgs& args) override;
  void Combine(const CombineArgs& args) override;
  void Convert(const RowsView& input, const RowsView& output) override;
  void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                 float scale) override;
  void ScaleBySigmoid(const RowsView& x, const RowsView& gate) override;
  void MultiplyBySigmoid(const RowsView& x, const RowsView& gate) override;
  void GatherOutputRows(const RowsView& input, const RowsView& output) override;
  void Scale(const RowsView& x, float factor) override;
  void SoftCapRows(const RowsView& x, float cap) override;
  void Clamp(const RowsView& x, float limit) override;
  void Exchange(const ExchangeArgs& args) override;
  void CopyToHost(const RowsView& input, std::span<float> output) override;
  void CopyFromHost(std::span<const float> input, const RowsView& output) override;
  RoutingPlan HostPlan(int slot) override { return plans_[slot].plan; }
  Result<std::unique_ptr<RouteCounters>> NewRouteCounters(const CountSettings& settings) override;
  StepOutcome FinishStep() override;
  std::span<const TokenRoutes> CountStep(std::span<const uint8_t> kind) override;

  Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) override;
  double MeasureArithmetic(ArithmeticKind kind, int rounds) override;
  // Returns the number of expert matrices that Linear() and FusedFeedForward() have read for routed
  // plans since construction. Tests use it to verify that the rows of one step share grouped
  // products.
  uint64_t expert_visits() const { return expert_visits_; }
  int64_t weight_bytes() const override { return weight_bytes_; }

  const KernelTable& table() const { return *table_; }
  ThreadPool& pool() { return pool_; }

 private:
  // Adds the step's plans to its counters and sets routes_.
  void CountRoutes(std::span<const uint8_t> kind);

  // Memory of one routing plan; grows and never shrinks.
  struct PlanStorage {
    std::vector<int32_t> expert_offsets, expert_of_assignment, row_of_assignment, row_offsets,
        assignments_of_row;
    std::vector<float> weight_of_assignment;
    std::vector<uint8_t> row_nonfinite;
    RoutingPlan plan;
    uint64_t step = 0;  // number of the step that computed `plan`
  };
  struct LinearTask;
  // The rows of a linear task in the layout of PackRowsArgs, which the task's next blocks of
  // weights find again.
  struct PackedRows {
    uint64_t product = 0;  // LinearWork::product; 0: there are no rows
    int expert = 0;
    int row_begin = 0;
    int row_end = 0;
    struct alignas(64) Line {
      char bytes[64];
    };
    std::vector<Line> lines;

    bool Has(uint64_t p, const LinearTask& t) const {
      return product == p && expert == t.expert && row_begin == t.row_begin && row_end == t.row_end;
    }
    void Set(uint64_t p, const LinearTask& t) {
      product = p;
      expert = t.expert;
      row_begin = t.row_begin;
      row_end = t.row_end;
    }
  };
  // Scratch memory of one thread; grows and never shrinks.
  struct Scratch {
    std::vector<float> floats;
    std::vector<uint64_t> keys;
    std::vector<uint32_t> orders;
    // Hidden units of a fused feed-forward, and these units rounded to integers (QuantizeRowArgs).
    std::vector<char> hidden, hidden_records;
    std::vector<PackedRows> packed;  // [LinearTask::part]
    // Returns memory aligned to 64 bytes.
    float* Floats(size_t n) {
      constexpr size_t kAlign = 64;
      if (floats.size() < n + kAlign / sizeof(float)) floats.resize(n + kAlign / sizeof(float));
      const auto address = reinterpret_cast<uintptr_t>(floats.data());
      return floats.data() + (kAlign - address % kAlign) % kAlign / sizeof(float);
    }
  };
  // A row of queries and the token of the step to which it belongs.
  struct AttentionRow {
    int32_t row;
    int32_t token;
  };
  // A tile of query rows for one kv head. The (row, query head of that kv head) pairs of one
  // sequence are numbered, the head running fastest, starting at row attention_rows_[first_row];
  // the tile consists of pairs [item, item + count).
  struct AttentionTask {
    int kv_head;
    int first_row;
    int item;
    int count;
  };
  // One block of positions for one tile.
  struct AttentionBlockTask {
    int32_t tile;
    int32_t block;
  };
  class AttentionCall;
  // Cosines and sines for the positions of a step; all layers share them.
  struct RopeTable {
    RopeSettings settings;
    uint64_t step = 0;                     // number of the step for which `angles` were computed
    std::vector<double> frequencies;       // [dimensions / 2]
    std::vector<double> long_frequencies;  // of long sequences; empty if they have the same
    std::vector<double> xpos_rates;        // XposRates()
    std::vector<float> angles;             // [tokens][cosines, sines]
  };
  // The largest number of rows of a linear task. A task reads a block of weights from memory once
  // and keeps it in the second-level cache.
  static constexpr int kRowsPerTask = 192;
  // Up to about this many rows, the product with a block is limited by memory bandwidth.
  static constexpr int kRowsOfStream = 16;
  // The arguments of a linear layer, and where its rows are. Tasks identify a row by its assignment
  // index (without a plan, by its row index).
  struct LinearWork {
    const LinearArgs& args;
    const char* records = nullptr;  // null unless weights are integers: QuantizeRowArgs::records of
                                    // each row
    int64_t record_stride = 0;
    int64_t record_rows = 0;   // with LinearArgs::segments, the records of segment e begin at row
                               // e * record_rows
    int64_t first_input = 0;   // assignment whose input is row 0 of the input, unless gathered
    int64_t first_output = 0;  // assignment whose output is row 0 of the output
    // If not null, the output in the layout of PackRowsArgs, for an input of the next product. It
    // takes the place of args.output, which has its columns and its type, bf16.
    char* packed_output = nullptr;
    uint64_t product = 0;  // identifies the input; not 0
  };
  // The product of some rows with some adjacent blocks of weights; threads take work in this unit.
  struct LinearTask {
    int expert;
    int block_begin;
    int block_end;
    int row_begin;
    int row_end;
    int part;  // the index of these rows among the groups of rows that the block multiplies
    // The cost of this and all earlier tasks. A task costs its bytes of weights times its rows, but
    // at least times kRowsOfStream.
    int64_t cost_end;
  };
  // The part [next, end) of some numbered items that one thread takes first.
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  // The product of a few rows with one block, which is what a register tile computes.
  struct LinearTile {
    int block;
    int segment;              // LinearArgs::segments: the segment of the input; else 0
    int rows;                 // 1..row_tile or, of packed rows, 1..matrix_rows
    int source[kMatrixRows];  // rows of the input
    char* out[kMatrixRows];   // each row's first output column for the block
    const char* ahead;        // weights to prefetch meanwhile (LinearTileArgs::ahead)
    int64_t ahead_stride;
    const char* widened;  // the block in the layout of WidenArgs, or null
    const char* packed;   // the rows in the layout of PackRowsArgs, or null
    alignas(64) float sums[kMatrixRows * kBlock];
  };

  // Returns the block in the layout of WidenArgs if `tiles` tiles are computed faster with it, else
  // null. Valid until the worker's next call.
  const char* WidenedBlock(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m, int block,
                           int tiles, int worker);

  // AppendKv() for the tokens [first, last), whose positions are all in one block of the cache.
  // `rounded` is memory for one head.
  void AppendBlock(const AppendKvArgs& args, int64_t block, int64_t first, int64_t last,
                   float* rounded) const;
  // Writes one head's key [dim] or value [dim] to a slot of its block.
  void AppendKey(KvCacheType type, const float* k, int dim, int64_t slot, char* key,
                 float* rounded) const;
  void AppendValue(KvCacheType type, const float* v, int dim, int64_t slot, int64_t row_bytes,
                   char* value) const;

  // Calls run(begin, end of its queue, worker) for every `step` items of queues_[0, queues). Each
  // thread has a queue of adjacent items, the same one in every call with as many queues. A thread
  // whose queue is empty takes items from the other queues, so that a descheduled thread does not
  // delay the others.
  void RunQueues(int queues, int64_t step,
                 absl::FunctionRef<void(int64_t begin, int64_t end, int worker)> run);
  // Runs body(begin, end, worker) on parts of [0, rows). If rows * work_per_row (in elementary
  // operations) is small, the calling thread runs all rows. Else a thread mostly gets the same rows
  // in all operations of a step, which its cache still holds from the operation before.
  template <typename Body>
  void ForRows(int64_t rows, int64_t work_per_row, const Body& body);

  // Rounds to int8 the rows that a product with integer weights reads, and stores them in
  // quant_records_.
  void QuantizeInput(const LinearArgs& args, LinearWork* work);
  void QuantizeRowOf(const CpuLinearBank& bank, const RowsView& rows, int64_t row, int64_t width,
                     char* records) const;
  // Returns [tokens of the step][cosines, sines][dimensions / 2]; valid until the next call.
  const float* RopeAngles(const RopeSettings& settings);
  // Calls run(task, end of its queue, worker) for all linear_tasks_, whose total cost is `cost`.
  // Each thread has a queue of adjacent tasks, so it can prefetch the weights of its next task.
  void RunLinearQueues(int64_t cost,
                       absl::FunctionRef<void(int64_t task, int64_t end, int worker)> run);
  void RunLinearTask(const LinearWork& work, int64_t index, int64_t end, int worker);
  // `after` is the block needed after the task's last block; it is prefetched. It may be empty.
  void RunLinearBlocks(const LinearWork& work, const LinearTask& task, std::span<const char> after,
                       int worker);
  void RunLinearBlock(const LinearWork& work, const LinearTask& task, int block,
                      std::span<const char> next, int worker);
  // Returns whether a matrix unit multiplies `rows` rows of a task by the bank's matrix. For
  // floating-point weights this does not depend on the rows, because it decides their rounding.
  bool UsesMatrixUnit(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m, DType input,
                      int rows) const;
  // Returns the task's rows in the layout of PackRowsArgs. Valid until the worker packs other rows
  // with the same LinearTask::part.
  const char* PackTask(const LinearWork& work, const LinearTask& task, int worker);
  // Returns memory for the packed rows of a task. Valid as for PackTask().
  char* PackedMemory(int part, int rows, int64_t row_bytes, int worker);
  // Returns a row of a product's input, or the records to which it is rounded.
  static const char* InputRow(const LinearWork& work, int segment, int row);
  // Returns the row of the input that an assignment multiplies.
  static int SourceOf(const LinearWork& work, int assignment) {
    return work.args.gather ? work.args.plan->row_of_assignment[assignment]
                            : assignment - work.first_input;
  }
  // Returns where a row of the output has its first column of a block. Blocks that are written to
  // `packed_output` begin with a line.
  static char* OutputOf(const LinearWork& work, int assignment, int64_t first_column);
  // Computes the products of one tile and stores them in tile.sums.
  void MultiplyTile(const LinearWork& work, const CpuLinearBank::Matrix& m, LinearTile& tile,
                    int worker);
  // Returns the number of rows of an expert whose hidden units fit into a thread's cache.
  int FusedRows(const CpuLinearBank& up, DType dtype) const;
  void RunFusedTask(const FeedForwardArgs& args, const LinearWork& up, int64_t index, int64_t end,
                    int worker);
  // Selects the experts of all rows. The route_counts_[r] experts and weights of row r are stored
  // from index r * widest on in route_experts_wide_ and route_weights_wide_.
  void SelectRows(const RouteArgs& args, int widest, std::vector<uint8_t>& row_nonfinite);
  // Returns the row [input_width] whose scores select the experts: the input's, or `changed`, to
  // which it is written in f32 if it differs from it.
  const float* RouterInput(const RouteArgs& args, int64_t row, float* changed) const;
  // Selects the experts of one row with these scores [E], for SelectRows(). `listed` has the
  // experts that a table lists, or is null; `values` is memory for two floats per expert.
  void SelectRow(const RouteArgs& args, int64_t row, const int32_t* listed, float* scores,
                 float* values, int widest, Scratch& scratch, uint8_t* nonfinite);
  // Marks as failed the tokens that have a row without a finite largest score.
  void MarkFailed(std::span<const uint8_t> row_nonfinite);
  void BuildPlan(int rows, int experts, const std::vector<int32_t>& offsets,
                 const std::vector<int32_t>& ids, const std::vector<float>& weights,
                 PlanStorage& storage);

  const KernelTable* table_;
  const bool fetch_l1_;  // PrefetchesToL1()
  ThreadPool pool_;
  WeightMemory weight_memory_;
  std::string description_;
  std::vector<Scratch> scratch_;  // [threads]
  std::vector<LinearTask> linear_tasks_;
  std::vector<Queue> queues_;        // [threads]
  std::vector<char> quant_records_;  // grows and never shrinks
  std::vector<PlanStorage> plans_;   // indexed by slot
  StepInputs step_;
  uint64_t step_number_ = 0;
  std::vector<uint8_t> failed_;                    // [T] see StepOutcome
  std::vector<TokenRoutes> routes_;                // [T] used if the step has counters
  std::vector<const RoutingPlan*> counted_plans_;  // scratch of CountRoutes()
  std::vector<RopeTable> rope_tables_;             // their SameAngles() is false for each two
  std::vector<AttentionRow> attention_rows_;
  std::vector<AttentionTask> attention_tiles_;
  std::vector<int32_t> attention_task_ends_;
  std::vector<AttentionBlockTask> attention_blocks_;
  std::vector<float> attention_parts_;
  // The routes of the current Route() call, before they are sorted into a plan.
  std::vector<int32_t> route_counts_, route_offsets_, route_experts_, route_experts_wide_;
  std::vector<float> route_weights_, route_weights_wide_;
  uint64_t products_ = 0;  // number of the last product, in LinearWork::product
  uint64_t expert_visits_ = 0;
  int64_t weight_bytes_ = 0;
};

template <typename Body>
void CpuBackend::ForRows(int64_t rows, int64_t work_per_row, const Body& body) {
  constexpr int64_t kInlineWork =
      1 << 15;  // with less work, handing parts to threads costs more than it saves
  if (pool_.threads() == 1 || rows * work_per_row < kInlineWork || rows < 2) {
    body(int64_t{0}, rows, 0);
    return;
  }
  int64_t part = kInlineWork / 2 / (work_per_row > 0 ? work_per_row : 1);
  if (part < 1) part = 1;
  const int queues = static_cast<int>(std::min<int64_t>(pool_.threads(), (rows + part - 1) / part));
  for (int q = 0; q < queues; ++q) {
    queues_[q].next.store(rows * q / queues, std::memory_order_relaxed);
    queues_[q].end = rows * (q + 1) / queues;
  }
  RunQueues(queues, part, [&](int64_t begin, int64_t end, int worker) {
    body(begin, std::min(begin + part, end), worker);
  });
}

}  // namespace moeserve::cpu
