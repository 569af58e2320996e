// The CPU backend: weights packed for the instruction set, threads from one pool.
#pragma once

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

namespace moeserve::cpu {

class CpuBackend : public Backend {
 public:
  // `table` must be supported by the processor (isa.h); threads >= 1.
  CpuBackend(const KernelTable* table, int threads);

  std::string_view name() const override { return "cpu"; }
  std::string_view description() const override { return description_; }
  int threads() const override { return pool_.threads(); }
  std::string_view instruction_set() const override { return table_->name; }

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
                                                     KvCacheType type, int64_t num_blocks) override;
  int64_t KvBlockBytes(std::span<const KvLayerShape> layers, KvCacheType type) const override;

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
  RoutingPlan Route(const RouteArgs& args) override;
  void Combine(const CombineArgs& args) override;
  void Convert(const RowsView& input, const RowsView& output) override;
  void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                 float scale) override;
  void ScaleBySigmoid(const RowsView& x, const RowsView& gate) override;
  void GatherOutputRows(const RowsView& input, const RowsView& output) override;
  void Scale(const RowsView& x, float factor) override;
  void CopyToHost(const RowsView& input, std::span<float> output) override;
  void CopyFromHost(std::span<const float> input, const RowsView& output) override;
  RoutingPlan HostPlan(int slot) override { return plans_[slot].plan; }
  Result<std::unique_ptr<RouteCounters>> NewRouteCounters(const CountSettings& settings) override;
  StepOutcome FinishStep() override;

  Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) override;
  double MeasureArithmetic(ArithmeticKind kind, int rounds) override;
  // Since construction: expert matrices that Linear() and FusedFeedForward() read for routed plans.
  // Tests use it to see that the rows of one step share grouped products.
  uint64_t expert_visits() const { return expert_visits_; }
  int64_t weight_bytes() const override { return weight_bytes_; }

  const KernelTable& table() const { return *table_; }
  ThreadPool& pool() { return pool_; }

 private:
  // Memory of one plan; grows, never shrinks.
  struct PlanStorage {
    std::vector<int32_t> expert_offsets, expert_of_assignment, row_of_assignment, row_offsets,
        assignments_of_row;
    std::vector<float> weight_of_assignment;
    std::vector<uint8_t> row_nonfinite;
    RoutingPlan plan;
    uint64_t step = 0;  // that `plan` belongs to
  };
  // Scratch of one thread; grows, never shrinks.
  struct Scratch {
    std::vector<float> floats;
    std::vector<uint64_t> keys;
    // Hidden units of a fused feed-forward, and their records.
    std::vector<char> hidden, hidden_records;
    float* Floats(size_t n) {
      if (floats.size() < n) floats.resize(n);
      return floats.data();
    }
  };
  // A row of queries and the token of the step that it belongs to.
  struct AttentionRow {
    int32_t row;
    int32_t token;
  };
  // `count` of the (row, head of the kv head's group) pairs of one sequence, heads running faster,
  // from pair `item` after row attention_rows_[first_row] on.
  struct AttentionTask {
    int kv_head;
    int first_row;
    int item;
    int count;
  };
  // One block of positions of a tile.
  struct AttentionBlockTask {
    int32_t tile;
    int32_t block;
  };
  class AttentionCall;
  // Cosines and sines of the positions of a step, which all layers share.
  struct RopeTable {
    double theta = 0.0;
    int dimensions = 0;
    uint64_t step = 0;                // that `angles` belong to
    std::vector<double> frequencies;  // [dimensions / 2]
    std::vector<float> angles;        // [tokens][cosines, sines]
  };
  // Rows of one task, which reads a block once from memory and keeps it in the second-level cache.
  static constexpr int kRowsPerTask = 192;
  // Up to about this many rows a block is memory-bound.
  static constexpr int kRowsOfStream = 16;
  // A linear layer and where the rows of its tasks lie.
  struct LinearWork {
    const LinearArgs& args;
    const char* records = nullptr;  // with integer weights: QuantizeRowArgs::records of each row
    int64_t record_stride = 0;
    int64_t first_input = 0;   // row of the tasks that is the input's first, unless gathered
    int64_t first_output = 0;  // the same of the output
  };
  // Products of some rows with some adjacent blocks; the unit that threads take.
  struct LinearTask {
    int expert;
    int block_begin;
    int block_end;
    int row_begin;
    int row_end;
    int64_t cost_end;  // of all tasks up to this one
  };
  // Tasks [next, end) of linear_tasks_.
  struct alignas(64) LinearQueue {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  // Some rows with one block: what a register tile computes.
  struct LinearTile {
    int block;
    int rows;                 // 1..row_tile
    int source[kMaxRowTile];  // rows of the input
    char* out[kMaxRowTile];   // first output column of the block
    const char* ahead;        // see LinearTileArgs
    int64_t ahead_stride;
    alignas(64) float sums[kMaxRowTile * kBlock];
  };

  // Runs body(begin, end, worker) over parts of [0, rows); on the calling thread alone when
  // rows * work_per_row (in elementary operations) is small.
  template <typename Body>
  void ForRows(int64_t rows, int64_t work_per_row, const Body& body);

  // Rounds the rows that a product with integers reads.
  void QuantizeInput(const LinearArgs& args, LinearWork* work);
  static int64_t QuantRecordBytes(const CpuLinearBank& bank, int64_t width);
  void QuantizeRowOf(const CpuLinearBank& bank, const RowsView& rows, int64_t row, int64_t width,
                     char* records) const;
  // [tokens of the step][cosines, sines][dimensions / 2]; until the next call.
  const float* RopeAngles(double theta, int dimensions);
  // Calls run(task, end of its queue, worker) for all linear_tasks_, whose total cost is `cost`.
  // Each thread has a queue of neighbouring tasks, so it can prefetch the next one. A thread whose
  // queue is empty takes tasks of other queues, so a thread that lost its core delays nobody.
  void RunLinearQueues(int64_t cost,
                       absl::FunctionRef<void(int64_t task, int64_t end, int worker)> run);
  void RunLinearTask(const LinearWork& work, int64_t index, int64_t end, int worker);
  // `after` is the block to prefetch, needed next; may be empty.
  void RunLinearBlocks(const LinearWork& work, const LinearTask& task, std::span<const char> after,
                       int worker);
  void RunLinearBlock(const LinearWork& work, const LinearTask& task, int block,
                      std::span<const char> next, int worker);
  // Fills tile.sums.
  void MultiplyTile(const LinearWork& work, const CpuLinearBank::Matrix& m, LinearTile& tile,
                    int worker);
  // Rows of an expert whose hidden units a thread keeps in its cache.
  int FusedRows(const CpuLinearBank& up, DType dtype) const;
  void RunFusedTask(const FeedForwardArgs& args, const LinearWork& up, int64_t index, int64_t end,
                    int worker);
  // Routes all rows; row r leaves route_counts_[r] experts and weights at r * widest.
  void SelectRows(const RouteArgs& args, int widest, std::vector<uint8_t>& row_nonfinite);
  // Marks the tokens of rows without a finite largest score as failed.
  void MarkFailed(std::span<const uint8_t> row_nonfinite);
  void BuildPlan(int rows, int experts, const std::vector<int32_t>& offsets,
                 const std::vector<int32_t>& ids, const std::vector<float>& weights,
                 PlanStorage& storage);

  const KernelTable* table_;
  ThreadPool pool_;
  std::string description_;
  std::vector<Scratch> scratch_;  // [threads]
  std::vector<LinearTask> linear_tasks_;
  std::vector<LinearQueue> linear_queues_;  // [threads]
  std::vector<char> quant_records_;         // grows, never shrinks
  std::vector<PlanStorage> plans_;          // by slot
  StepInputs step_;
  uint64_t step_number_ = 0;
  std::vector<uint8_t> failed_;                    // [T] see StepOutcome
  std::vector<TokenRoutes> routes_;                // [T] with counters
  std::vector<const RoutingPlan*> counted_plans_;  // scratch of RunStep()
  std::vector<RopeTable> rope_tables_;             // one for each pair of settings seen
  std::vector<AttentionRow> attention_rows_;
  std::vector<AttentionTask> attention_tiles_;
  std::vector<int32_t> attention_task_ends_;
  std::vector<AttentionBlockTask> attention_blocks_;
  std::vector<float> attention_parts_;
  // Routes of the current Route() before they are sorted into a plan.
  std::vector<int32_t> route_counts_, route_offsets_, route_experts_, route_experts_wide_;
  std::vector<float> route_weights_, route_weights_wide_;
  uint64_t expert_visits_ = 0;
  int64_t weight_bytes_ = 0;
};

template <typename Body>
void CpuBackend::ForRows(int64_t rows, int64_t work_per_row, const Body& body) {
  constexpr int64_t kInlineWork =
      1 << 16;  // below this a hand-over to threads costs more than it gains
  if (pool_.threads() == 1 || rows * work_per_row < kInlineWork || rows < 2) {
    body(int64_t{0}, rows, 0);
    return;
  }
  int64_t part = kInlineWork / 2 / (work_per_row > 0 ? work_per_row : 1);
  if (part < 1) part = 1;
  const int64_t parts = (rows + part - 1) / part;
  pool_.Run(parts, [&](int64_t i, int worker) {
    const int64_t end = (i + 1) * part < rows ? (i + 1) * part : rows;
    body(i * part, end, worker);
  });
}

}  // namespace moeserve::cpu
