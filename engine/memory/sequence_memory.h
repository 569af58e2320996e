// What one sequence keeps on the device between steps.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/route_counters.h"

namespace moeserve {

// Stands in a page table for a page that was released, or that was not found in the prefix cache
// and is not seen.
inline constexpr int32_t kNoPage = -1;
// The largest number of page tables of a sequence: one for attention that sees all positions, and
// one for attention with windows.
inline constexpr int kMaxPageTables = 2;

// The slot of a snapshot of a sequence's states after its first `tokens` tokens.
struct StateSnapshot {
  int tokens = 0;
  int32_t slot = 0;
};

// MemoryPool gives a sequence its memory and takes it back; the others only read this, except
// `drafted_until`.
struct SequenceMemory {
  // For each table of the cache, the ids of the pages with the keys and values of the sequence, in
  // the order of positions. A page that no later position sees may be kNoPage.
  std::array<std::vector<int32_t>, kMaxPageTables> tables;
  // The pages with the keys and values of the source, which are written once (kSourceTable).
  std::vector<int32_t> source;
  int computed = 0;   // number of leading tokens that were computed or found in the prefix cache
  int published = 0;  // number of leading pages that were published (PagedPool)
  // Number of leading tokens whose keys and values the draft model has in its pages, which have the
  // ids of the first table.
  int drafted_until = 0;
  // The following members are used if the model has states.
  int32_t state = -1;    // slot with the states after the first `state_tokens` tokens
  int state_tokens = 0;  // differs from `computed` only during a step
  int left_at = 0;       // tokens that the prefix cache had in pages, but not as states
  std::vector<StateSnapshot> snapshots;  // which the current step writes
  TokenRoutes released;  // the experts' work for the tokens of the pages that are kNoPage

  // Returns the first table. Its attention has the widest view, and routes are kept by its pages.
  const std::vector<int32_t>& pages() const { return tables[0]; }
};

}  // namespace moeserve
