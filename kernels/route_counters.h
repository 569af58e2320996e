// Counters of routing plans. While a backend runs a step, it adds the step's plans to the counters.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/base/host_device.h"

namespace moeserve {

// Why a step computes a token: as part of a prompt, as a generated token, again after a preemption
// (it was counted before), as a drafted token that the model then did not draw, or only to fill the
// step up to a fixed size (not counted).
inline constexpr uint8_t kTokenPrefill = 0, kTokenDecode = 1, kTokenRecompute = 2,
                         kTokenRejected = 3, kTokenPadding = 255;
inline constexpr int kCountedKinds = 4;  // the kinds before kTokenPadding

// Returns whether tokens of this kind have counters of their own and are left out of all others.
MOESERVE_HOST_DEVICE constexpr bool IsCountedApart(uint8_t kind) {
  return kind == kTokenRecompute || kind == kTokenRejected;
}

// An MoE block whose routing plans are counted.
struct CountedBlock {
  int slot = 0;  // the slot of the block's plans (RouteArgs::slot)
  int num_experts = 1;
  int sub_tokens = 1;         // rows per token
  int most_distinct = 1;      // the largest number of distinct experts that one token can use
  bool in_diversity = false;  // whether CountsSnapshot::diversity_histogram includes the block
  std::vector<int64_t> expert_parameters;  // [num_experts] number of parameters per expert
};

struct CountSettings {
  std::vector<CountedBlock> blocks;
  // Number of token ids; 0 disables the token x expert table.
  int64_t vocabulary = 0;
  // 0: row v of the table belongs to token v. Otherwise RouteCounters::AssignTokenRows() gives the
  // first `own_rows` rows to tokens, and one more row is shared by all other tokens.
  int64_t own_rows = 0;

  int64_t table_rows() const { return own_rows == 0 ? vocabulary : own_rows + 1; }
};

// A row of the token x expert table that changes hands.
struct TokenRowChange {
  int32_t row = 0;
  int32_t token = 0;      // receives the row
  int32_t replaced = -1;  // the token that had the row; -1: none
};

// Sums for one expert over all steps. A selection is a row that selected the expert. Only `visits`
// and the counters named after them include recomputed and rejected tokens.
struct ExpertCount {
  uint64_t selections = 0;
  uint64_t decode_selections = 0;
  uint64_t recomputed_selections = 0;
  uint64_t rejected_selections = 0;
  uint64_t touching_tokens = 0;  // tokens with at least one row that selected the expert
  uint64_t visits = 0;           // steps in which at least one row selected the expert
  double weight_sum = 0.0;
};

// A histogram: bucket i counts the values in (2^(i-1), 2^i], bucket 0 the values up to 1, and the
// last bucket all larger values.
template <size_t kBuckets>
struct PowerHistogram {
  std::array<uint64_t, kBuckets> buckets{};
  uint64_t sum = 0;

  void Observe(uint64_t value, uint64_t times = 1) {
    size_t i = 0;
    while (i + 1 < kBuckets && value > uint64_t{1} << i) ++i;
    buckets[i] += times;
    sum += value * times;
  }
};

// Counts over the whole model. In arrays with two elements, index 1 is for steps in which all
// tokens were kTokenDecode or kTokenRejected, index 0 for all other steps.
struct ModelCounts {
  uint64_t steps = 0;
  uint64_t tokens[kCountedKinds] = {};  // indexed by kTokenPrefill and so on
  // One observation of expert_rows per step, block and expert that has rows: the number of its
  // rows. One observation of active_experts per step and block: the number of experts that have
  // rows. Both include recomputed and rejected rows.
  PowerHistogram<15> expert_rows[2];
  PowerHistogram<11> active_experts[2];
};

struct BlockCounts {
  std::vector<ExpertCount> experts;
  std::vector<uint64_t> distinct_histogram;  // [most_distinct + 1]: number of tokens by the number
                                             // of distinct experts they used
  uint64_t nonfinite_rows = 0;               // rows with RoutingPlan::row_nonfinite != 0
};

struct CountsSnapshot {
  ModelCounts model;
  // Element n is the number of tokens that used n experts in all blocks with in_diversity together.
  // The size is 1 + the sum of most_distinct over these blocks.
  std::vector<uint64_t> diversity_histogram;
  std::vector<BlockCounts> blocks;  // in the order of CountSettings::blocks
};

// Returns a snapshot whose arrays have the sizes that `settings` require, with every count 0.
CountsSnapshot ZeroCounts(const CountSettings& settings);

// The work of one token of a step, of whatever kind, in the experts of all counted blocks.
struct TokenRoutes {
  uint64_t parameters = 0;  // sum of the expert's parameters over all (row, expert) pairs
  uint64_t routes = 0;      // number of (row, expert) pairs
};

// Counters of one model, initially 0. The backend that creates them outlives them. They must not be
// destroyed while a step that uses them is running.
class RouteCounters {
 public:
  virtual ~RouteCounters() = default;
  // Makes all finished steps visible to Read(). A CUDA backend waits for the device; on the CPU,
  // every step is visible as soon as it ends. Must be called on the backend's thread, between
  // steps. Internal if the device fails.
  virtual Status Refresh() = 0;
  // Returns the counts of whole steps, at least of those finished before the last Refresh(). Any
  // thread may call it.
  virtual CountsSnapshot Read() const = 0;
  // Requires CountSettings::own_rows. Adds the counts of each row to the shared row, sets them to 0
  // and counts the token in the row from the next step on; the replaced token returns to the shared
  // row. No row and no token may occur twice. Must be called on the backend's thread, between
  // steps.
  virtual void AssignTokenRows(std::span<const TokenRowChange> changes) = 0;
  // Copies elements [first, first + part.size()) of the token x expert table [table_rows(), experts
  // of all blocks], which counts how often the tokens of each row were routed to each expert,
  // saturating at UINT32_MAX. Any thread may call it; the result may include a part of the running
  // step. Internal if the device fails.
  virtual Status ReadTokenExperts(int64_t first, std::span<uint32_t> part) const = 0;
};

}  // namespace moeserve
