// One step's work: a ragged batch of tokens from many sequences.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "engine/routes/routing_control.h"
#include "engine/spec/spec.h"
#include "engine/step/phase.h"
#include "kernels/backend.h"

namespace moeserve {

// Where the tokens of a step find and leave the states of their sequences: StepStates. Empty for
// models without states.
struct BatchStates {
  StateStorage* storage = nullptr;
  std::vector<int32_t> slot;                     // [S]
  std::vector<int32_t> keep, snapshot, pending;  // [T]

  StepStates view() const { return {slot, keep, snapshot, pending}; }

  // Adds the rows of the next sequence, whose state is in a slot of `to` and is left there after
  // the rows before the last `drafted` ones.
  void Add(StateStorage& to, int32_t state_slot, int rows, int drafted = 0) {
    storage = &to;
    slot.push_back(state_slot);
    for (auto* places : {&keep, &snapshot, &pending}) {
      places->resize(places->size() + static_cast<size_t>(rows), -1);
    }
    *(keep.end() - 1 - drafted) = state_slot;
    std::iota(pending.end() - drafted, pending.end(), 0);
  }
};

// T tokens of S sequences. The tokens of one sequence are adjacent. Their positions are consecutive
// and begin where the sequence's cached tokens end.
struct Batch {
  std::vector<int32_t> tokens;     // [T]
  std::vector<int32_t> positions;  // [T] position in the sequence; its first token is at 0
  std::vector<int32_t> sequence;   // [T] index of the token's sequence
  std::vector<Phase> phase;        // [T] used for statistics
  // [T] 1 for the tokens of long sequences (LongSequencesFrom()); empty: no sequence is long.
  std::vector<uint8_t> long_sequence;
  int tables = 1;  // page tables of each sequence: KvCacheStorage::num_tables()
  std::vector<std::span<const int32_t>> page_tables;  // [S, tables] ids of each sequence's pages
  int route_table = 0;  // the table with whose pages RouteLog keeps the tokens' routes
  // [S, tables] number of positions of each sequence in each table; empty if all attention is
  // causal.
  std::vector<int32_t> lengths;
  std::vector<uint8_t> token_types;  // [T] type of each token; empty: all 0
  BatchStates states;
  std::vector<int32_t> logit_rows;  // rows whose logits are needed, ascending
  // Rows that are texts by themselves, without pooling, and rows that are pooled.
  std::vector<int32_t> text_rows;
  std::vector<RowRange> pool_ranges;
  // [logit_rows] what the device samples from each of these rows; if SampleRow::row < 0, the row's
  // logits are copied to the host instead. Empty: all logits are copied to the host.
  std::vector<SampleRow> samples;
  // [S] routing override of each sequence; null if there is none. Empty: no sequence has one.
  std::vector<const RoutingControl*> controls;
  // Indexed like ModelSpec::blocks: routes that replace the router's choice in that block; null:
  // the router chooses. Empty: the router chooses in every block.
  std::vector<const GivenRoutes*> given;
  // Whether the ranks divide the rows of the step (RowDivision); nullopt: as ModelOptions say.
  std::optional<bool> divide_rows;

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  int64_t num_texts() const { return std::ssize(text_rows) + std::ssize(pool_ranges); }
  // Returns the id of the page of `route_table` that holds token `t`.
  int32_t RoutePageOf(size_t t) const {
    return page_tables[static_cast<size_t>(sequence[t] * tables + route_table)]
                      [static_cast<size_t>(positions[t] / kPageTokens)];
  }
};

}  // namespace moeserve
