// Dense and grouped linear layers, and pairs of them that are computed together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/weights/packed_bank.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

// A dense layer is a grouped layer with one expert. The banks of all arguments are CpuLinearBanks.
// Only the backend's thread calls these functions.
class LinearOps {
 public:
  // `table` and `workers` must outlive this object.
  LinearOps(const KernelTable& table, Workers& workers)
      : table_(table), workers_(workers), scratch_(static_cast<size_t>(workers.threads())) {}

  void Linear(const LinearArgs& args);
  // See Backend::FusesFeedForward().
  bool FusesFeedForward(const LinearBank& up, DType dtype, int64_t rows) const;
  void FusedFeedForward(const FeedForwardArgs& args);
  // Returns the number of expert matrices that have been read for routed plans. Tests use it to
  // verify that the rows of one step share grouped products.
  uint64_t expert_visits() const { return expert_visits_; }

 private:
  // The largest number of rows of a task. A task reads a block of weights from memory once and
  // keeps it in the second-level cache.
  static constexpr int kRowsPerTask = 192;
  // Up to about this many rows, the product with a block is limited by memory bandwidth.
  static constexpr int kRowsOfStream = 16;
  // The product of some rows with some adjacent blocks of weights; threads take work in this unit.
  // Rows are identified by their assignments (without a plan, by their index).
  struct Task {
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
  // The rows of a task in the layout of PackRowsArgs, which the task's next blocks of weights find
  // again.
  struct PackedRows {
    struct Key {
      uint64_t product = 0;  // Work::product; 0: there are no rows
      int expert = 0;
      int row_begin = 0;
      int row_end = 0;
      bool operator==(const Key&) const = default;
    };
    struct alignas(64) Line {
      char bytes[64];
    };
    Key key;
    std::vector<Line> lines;
  };
  // Memory of one thread; grows and never shrinks.
  struct Scratch {
    // Hidden units of a fused feed-forward, and these units rounded to integers (QuantizeRowArgs).
    std::vector<char> hidden, hidden_records;
    std::vector<PackedRows> packed;  // [Task::part]
  };
  // The arguments of a linear layer, and where its rows are.
  struct Work {
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

    const CpuLinearBank& bank() const { return static_cast<const CpuLinearBank&>(*args.bank); }
  };
  // The product of a few rows with one block, which is what a register tile computes.
  struct Tile {
    int block;
    int rows;                    // 1..row_tile or, of packed rows, 1..matrix_rows
    const char* x[kMatrixRows];  // InputRow() of each row
    char* out[kMatrixRows];      // each row's first output column for the block
    const char* ahead;           // weights to prefetch meanwhile (LinearTileArgs::ahead)
    int64_t ahead_stride;
    const char* widened;  // the block in the layout of WidenArgs, or null
    const char* packed;   // the rows in the layout of PackRowsArgs, or null
    alignas(64) float sums[kMatrixRows * kBlock];
  };

  // Rounds to int8 the rows that a product with integer weights reads, and stores them in
  // quant_records_.
  void QuantizeInput(Work* work);
  void QuantizeRowOf(const CpuLinearBank& bank, const RowsView& rows, int64_t row, int64_t width,
                     char* records) const;
  // Work of some tasks.
  struct Sums {
    int64_t multiply_adds = 0;
    int64_t cost = 0;  // Task::cost_end of the last one
  };
  // Calls run(experts) for the experts of a bank in the order of the plan: at once, or first for
  // those that the plan wants early. Threads thus wait for the pages of the others last.
  template <typename Run>
  void ForExpertParts(const RoutingPlan* plan, int num_experts, const Run& run) {
    if (plan != nullptr && plan->order != nullptr) {
      const std::span<const int32_t> order(plan->order, static_cast<size_t>(num_experts));
      run(order.first(static_cast<size_t>(plan->num_early)));
      run(order.subspan(static_cast<size_t>(plan->num_early)));
      return;
    }
    while (std::ssize(ascending_) < num_experts) {
      ascending_.push_back(static_cast<int32_t>(ascending_.size()));
    }
    run(std::span<const int32_t>(ascending_).first(static_cast<size_t>(num_experts)));
  }
  // Adds the tasks of an expert to tasks_.
  void AddTasks(const LinearArgs& args, int expert, Sums& sums);
  // Divides tasks_, whose total cost is `cost`, between the queues [0, queues) of workers_. A queue
  // has adjacent tasks, so that a thread can prefetch the weights of its next task.
  void QueueTasks(int queues, int64_t cost);
  // Returns the first block of task `index` of a bank, or an empty span if the queue has no such
  // task.
  std::span<const char> FirstBlock(const CpuLinearBank& bank, int64_t index,
                                   int64_t queue_end) const;
  void RunFusedTask(const FeedForwardArgs& args, const Work& up, int64_t index, int64_t end,
                    int worker);
  // `after` is the block needed after the task's last block; it is prefetched. It may be empty.
  void RunBlocks(const Work& work, const Task& task, std::span<const char> after, int worker);
  void RunBlock(const Work& work, const Task& task, int block, std::span<const char> next,
                int worker);
  // Computes the products of one tile and stores them in tile.sums.
  void MultiplyTile(const Work& work, const CpuLinearBank::Matrix& m, Tile& tile, int worker);
  // Returns the block in the layout of WidenArgs if `tiles` tiles are computed faster with it, else
  // null. Valid until the worker's next call.
  const char* WidenedBlock(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m, int block,
                           int tiles, int worker);
  // Returns whether a matrix unit multiplies `rows` rows of a task by the bank's matrix. For
  // floating-point weights this does not depend on the rows, because it decides their rounding.
  bool UsesMatrixUnit(const CpuLinearBank& bank, const CpuLinearBank::Matrix& m, DType input,
                      int rows) const;
  // Returns the task's rows in the layout of PackRowsArgs. Valid until the worker packs other rows
  // with the same Task::part.
  const char* PackTask(const Work& work, const Task& task, int worker);
  // Returns memory for the packed rows of a task. Valid as for PackTask().
  char* PackedMemory(int part, int rows, int64_t row_bytes, int worker);
  // Returns the input row that an assignment to `expert` multiplies, or the records to which it is
  // rounded.
  static const char* InputRow(const Work& work, int expert, int assignment);
  // Returns where a row of the output has its first column of a block. Blocks that are written to
  // `packed_output` begin with a line.
  static char* OutputOf(const Work& work, int assignment, int64_t first_column);
  // Returns the number of rows of an expert whose hidden units fit into a thread's cache.
  int FusedRows(const CpuLinearBank& up, DType dtype) const;

  const KernelTable& table_;
  const bool fetch_l1_ = PrefetchesToL1();
  Workers& workers_;
  std::vector<Scratch> scratch_;  // [threads]
  std::vector<Task> tasks_;
  std::vector<int32_t> ascending_;   // 0, 1, ...; grows and never shrinks
  std::vector<char> quant_records_;  // grows and never shrinks
  uint64_t products_ = 0;            // number of the last product, in Work::product
  uint64_t expert_visits_ = 0;
};

}  // namespace moeserve::cpu
