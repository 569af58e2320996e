// Multiply-accumulate operations (MACs) that a model takes for a token (MoA, section 4.4 and tables
// 1 to 3).
//
// Counted are products with matrices and, in attention, those of queries with keys and of
// probabilities with values. Norms, biases, activations and weighted sums of outputs are not.
//
// MoA, eq. 18, is the sum over T tokens for a layer of routed attention with one key per position:
// k T^2 d_h + 2 (k + 1) T d_h d. Here, a selected expert takes 2 d_h d MACs, keys and values take
// 2 d_h d together, and a selected expert takes 2 d_h for each key that the token sees. A token
// sees (T + 1) / 2 keys of a causal text on average, so that the sum is k T (T + 1) d_h +
// 2 (k + 1) T d_h d. Eq. 18 leaves the router out, which takes d E; here it counts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "engine/statistics/measures/route_sequence.h"

namespace moeserve {

// Returns the MACs of one row with the matrices of a routed expert; 0 for an expert without
// matrices.
int64_t ExpertMacs(const ModelSpec& spec, int layer, BlockKind block, int expert);

// Returns the MACs of a token with the state of a recurrence: three or, with the delta rule, four
// for each element. 0 for other blocks.
int64_t RecurrenceMacs(const BlockSpec& block);

// Returns the MACs of a token with the matrices that every token uses: all except routed experts,
// embeddings and the LM head. A block that splits tokens scores every sub-token. The states of
// recurrences count as matrices.
int64_t FixedMacs(const ModelSpec& spec);

// Returns the MACs of a token of the source with the keys and values of all attention to the
// source; 0 without such attention. FixedMacs() does not include them.
int64_t SourceMacs(const ModelSpec& spec);

// Returns the MACs of a token with the LM head.
int64_t HeadMacs(const ModelSpec& spec);

// Returns the MACs for each key that a token sees in a layer: those of all heads if the attention
// is dense, those of one selected expert if it is routed.
int64_t MacsPerKey(const AttentionSpec& attention);

// The numbers of positions that tokens could see without a window: each number from `first` to
// `last` equally often.
struct VisiblePositions {
  int64_t first, last;

  // Returns the mean number of positions that a token sees in a layer with this window.
  double Mean(std::optional<int> window, WindowKind kind = WindowKind::kSliding) const;
};

// Bounds on a token's MACs, without attention to keys and without the LM head.
struct MacsRange {
  int64_t min = 0;  // if every row selects the fewest and cheapest experts
  int64_t max = 0;  // if every row selects the most and dearest experts
  // With k experts of mean cost for every row. Absent if a block selects by top-p.
  std::optional<int64_t> nominal;
  // For each key that a token sees, in all layers together; a window bounds the number of keys.
  int64_t min_per_key = 0;
  int64_t max_per_key = 0;
  // For each token of the source, in all layers that attend to it.
  int64_t min_per_source_key = 0;
  int64_t max_per_source_key = 0;
};
MacsRange MacsOf(const ModelSpec& spec);

// Means over tokens that were computed.
struct MeasuredMacs {
  double matrices = 0.0;            // without the LM head
  std::optional<double> attention;  // absent if the number of keys that experts read is not known
};

// Returns the MACs of the tokens that `stats` counts, which ran as sequences of `lengths` tokens,
// one after the other. `routes` are those of the same tokens, by routed block; they may be empty,
// but then attention that selects a varying number of experts has no result. `sources` are the
// lengths of the sequences' sources; empty without attention to them.
MeasuredMacs MacsOf(const ModelSpec& spec, const ExpertStats& stats, std::span<const int> lengths,
                    std::span<const BlockRoutes> routes = {}, std::span<const int> sources = {});

// Returns the bounds for a token of the source of an encoder-decoder, SourceMacs() included.
MacsRange SourceMacsOf(const ModelSpec& decoder);

// Computes the MACs of a request from the sums that the engine keeps of the request's routes.
// Immutable; may be used by any thread.
class RequestMacs {
 public:
  explicit RequestMacs(const ModelSpec& spec);

  // Returns the MACs of usage.routed_tokens tokens from position 0 on, without the LM head; those
  // of the source are included. nullopt if no token was routed or if the sums do not determine the
  // result: if experts differ in how many of their parameters are biases, or if routed attention
  // selected a number of experts that is not the model's.
  std::optional<double> Of(const Usage& usage) const;

 private:
  struct Keys {
    double macs = 0.0;  // for each key
    std::optional<int> window;
    WindowKind window_kind = WindowKind::kSliding;
    bool causal = true;
  };

  // Returns the MACs of tokens of this stack alone, each of which sees `source_tokens` of a source.
  std::optional<double> OfStack(const ExpertWork& work, int64_t source_tokens) const;

  std::shared_ptr<const RequestMacs> source_;  // of the encoder; null without one
  std::vector<Keys> keys_;                     // of the layers with attention
  double source_keys_ = 0.0;                   // MACs for each token of the source
  int64_t source_macs_ = 0;                    // SourceMacs()
  int64_t fixed_ = 0;
  int64_t always_parameters_ = 0;
  // An expert's MACs are slope_ * parameters + offset_. nullopt: not for all experts.
  std::optional<double> slope_ = 1.0;
  double offset_ = 0.0;
  // Selections per token that the MACs of routed attention are computed for; 0: any number.
  uint64_t selections_ = 0;
};

}  // namespace moeserve
