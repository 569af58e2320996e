// Attention over the KV cache, and what it needs of a step's positions: rotary angles, and keys and
// values in the cache.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

// The caches of all arguments are CpuKvCaches. Only the backend's thread calls these functions.
class AttentionOps {
 public:
  // All arguments must outlive this object. `step` has the inputs of the current step.
  AttentionOps(const KernelTable& table, Workers& workers, const StepInputs& step)
      : table_(table), workers_(workers), step_(step) {}

  // Must be called when a step begins.
  void BeginStep() {
    for (RopeTable& table : rope_tables_) table.laid_out = false;
  }
  void Rope(const RopeArgs& args);
  void ScaleByPosition(const PositionScaleArgs& args);
  void AppendKv(const AppendKvArgs& args);
  void Attention(const AttentionArgs& args);

 private:
  // Cosines and sines for the positions of a step; all layers share them.
  struct RopeTable {
    RopeSettings settings;
    bool laid_out = false;                 // whether `angles` are those of this step
    std::vector<double> frequencies;       // [dimensions / 2]
    std::vector<double> long_frequencies;  // of long sequences; empty if they have the same
    std::vector<double> xpos_rates;        // XposRates()
    std::vector<float> angles;             // [tokens][cosines, sines]
  };
  // A row of queries and the token of the step to which it belongs.
  struct Row {
    int32_t row;
    int32_t token;
  };
  // A tile of query rows for one kv head. The (row, query head of that kv head) pairs of one
  // sequence are numbered, the head running fastest, starting at row rows_[first_row]; the tile
  // consists of pairs [item, item + count).
  struct TileTask {
    int kv_head;
    int first_row;
    int item;
    int count;
  };
  // One block of positions for one tile.
  struct BlockTask {
    int32_t tile;
    int32_t block;
  };
  class Call;

  // Returns [tokens of the step][cosines, sines][dimensions / 2]; valid until the next call.
  const float* RopeAngles(const RopeSettings& settings);
  // AppendKv() for the tokens [first, last), whose positions are all in one block of the cache.
  // `rounded` is memory for one head.
  void AppendBlock(const AppendKvArgs& args, int64_t block, int64_t first, int64_t last,
                   float* rounded) const;

  const KernelTable& table_;
  Workers& workers_;
  const StepInputs& step_;
  std::vector<RopeTable> rope_tables_;  // their SameAngles() is false for each two
  // Of the current call of Attention(). They grow and never shrink.
  std::vector<Row> rows_;
  std::vector<TileTask> tiles_;
  std::vector<int32_t> task_bounds_;  // [tasks + 1] the tiles of each task
  std::vector<BlockTask> blocks_;
  std::vector<float> parts_;  // [blocks][PartFloats()]
};

}  // namespace moeserve::cpu
