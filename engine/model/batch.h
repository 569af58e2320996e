// One step's work: a ragged batch of tokens from many sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/phase.h"
#include "engine/routes/routing_control.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve {

// T tokens of S sequences. The tokens of a sequence are adjacent and their positions consecutive,
// following what the cache already holds.
struct Batch {
  std::vector<int32_t> tokens;                         // [T]
  std::vector<int32_t> positions;                      // [T] first position is 0
  std::vector<int32_t> sequence;                       // [T] index into block_tables
  std::vector<Phase> phase;                            // [T] for statistics
  std::vector<std::span<const int32_t>> block_tables;  // [S] cache blocks of each sequence
  std::vector<int32_t> logit_rows;                     // rows whose logits are wanted, ascending
  // [logit_rows] what the device draws; row < 0: the host wants the logits. Empty: of all rows.
  std::vector<SampleRow> samples;
  // [S] how the routing of each sequence is changed, null: not at all. Empty: of none.
  std::vector<const RoutingControl*> controls;
  // By PlanSlot(): routes that replace a block's own; null: the block routes. Empty: all do.
  std::vector<const GivenRoutes*> given;

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  // The cache block that holds token `t`.
  int32_t CacheBlockOf(size_t t) const {
    return block_tables[static_cast<size_t>(sequence[t])]
                       [static_cast<size_t>(positions[t] / kKvBlockTokens)];
  }
};

}  // namespace moeserve
