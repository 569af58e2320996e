// What a device counts of its routing plans, where the host does not see them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace moeserve {

// What a token of a step is, for the counters. Recomputed tokens were counted before; of the rows
// that fill up a step nothing is counted.
inline constexpr uint8_t kTokenPrefill = 0, kTokenDecode = 1, kTokenRecompute = 2,
                         kTokenPadding = 255;

// A routed block whose plans are counted.
struct CountedBlock {
  int slot = 0;  // of its plans (RouteArgs)
  int num_experts = 1;
  int sub_tokens = 1;                      // rows of a token
  int most_distinct = 1;                   // experts that one token can touch
  bool diverse = false;                    // counts for the diversity histogram
  std::vector<int64_t> expert_parameters;  // [num_experts]
};

struct CountSettings {
  std::vector<CountedBlock> blocks;
  // Token types of the token x expert table; 0: none is kept.
  int64_t vocabulary = 0;
};

// Sums over all steps, of one expert. All but `recomputed_selections` and `visits` leave recomputed
// tokens out.
struct ExpertCount {
  uint64_t selections = 0;
  uint64_t decode_selections = 0;
  uint64_t recomputed_selections = 0;
  uint64_t touching_tokens = 0;  // tokens of which some row chose the expert
  uint64_t visits = 0;           // steps in which a row chose the expert
  double weight_sum = 0.0;
};

// Bucket i counts values of at most 2^i, the last one all larger ones.
template <size_t kBuckets>
struct PowerHistogram {
  std::array<uint64_t, kBuckets> buckets{};
  uint64_t sum = 0;
};

// Of the model as a whole. Index 1 of the arrays of two: steps whose tokens were all of decode.
struct ModelCounts {
  uint64_t steps = 0;
  uint64_t tokens[3] = {};  // by kTokenPrefill and so on
  PowerHistogram<15> expert_rows[2];
  PowerHistogram<11> active_experts[2];
};

struct BlockCounts {
  std::vector<ExpertCount> experts;
  std::vector<uint64_t> distinct_histogram;  // [most_distinct + 1] tokens by experts they touched
  uint64_t nonfinite_rows = 0;
};

struct CountsSnapshot {
  ModelCounts model;
  std::vector<uint64_t> diversity_histogram;  // [sum of most_distinct of the diverse blocks + 1]
  std::vector<BlockCounts> blocks;
};

// What the experts of all counted blocks did for one token of a step, recomputed ones included.
struct TokenRoutes {
  uint64_t parameters = 0;  // of the experts of its routes
  uint64_t routes = 0;      // (row, expert) pairs
};

// Counters on a device, 0 at first. Made by a backend, which outlives them; no step that counts
// runs when they go.
class RouteCounters {
 public:
  virtual ~RouteCounters() = default;
  // All steps so far. Waits for the device; the backend's thread, between steps.
  virtual Result<CountsSnapshot> Read() = 0;
  // Elements [first, first + part.size()) of the token x expert table [vocabulary, experts of all
  // blocks]: how often each token was sent to each expert, up to the largest number of its type.
  // Any thread; while a step runs a part of it may be in.
  virtual Status ReadTokenExperts(int64_t first, std::span<uint32_t> part) = 0;
};

}  // namespace moeserve
