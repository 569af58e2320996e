// Where the experts of a model lie, if they do not fit into memory: in the page cache of mapped
// files, as far as it goes, and on disk.
#pragma once

#include <cstdint>
#include <optional>

namespace moeserve {

// How pages come into memory. The bits of results do not depend on it.
enum class TierPolicy : uint8_t {
  kMap,    // the system reads pages when products touch them, and some ahead
  kAhead,  // the pages of all chosen experts are requested right after a block is routed
};

struct TierOptions {
  // nullopt: both policies are tried in turn, and the faster one is kept.
  std::optional<TierPolicy> policy = std::nullopt;
  // Bytes of memory for experts in mapped files. Policies are in force if the experts have more.
  // nullopt: what the other weights leave of `total`.
  std::optional<int64_t> memory = std::nullopt;
  // Bytes of memory for all weights; nullopt: there is room for them.
  std::optional<int64_t> total = std::nullopt;
  // With kAhead: the most bytes that a block requests of the experts that the step before has
  // chosen in the next block.
  int64_t read_ahead = 0;
};

struct TierCounts {
  bool in_force = false;
  TierPolicy policy = TierPolicy::kMap;  // of the next step
  // Bytes of chosen experts that were in memory when their block had been routed, and that were
  // not; both 0 unless policies are in force.
  uint64_t hit_bytes = 0;
  uint64_t read_bytes = 0;
  // How long the model's thread did not run during the products of experts that were not all in
  // memory.
  double stall_seconds = 0.0;
};

}  // namespace moeserve
