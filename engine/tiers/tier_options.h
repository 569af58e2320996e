// Where the experts of a model lie, if they do not fit into memory. On a CPU: in the page cache of
// mapped files, as far as it goes, and on disk. On another device: in its memory, as far as it
// goes, and in the host's.
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
  // Bytes of memory for experts: of the host for those in mapped files, or of the device. Policies
  // or slots are in force if the experts have more. nullopt: what the other weights leave of
  // `total`, or of the device's memory less `cache`.
  std::optional<int64_t> memory = std::nullopt;
  // Bytes of the host's memory for all weights; nullopt: there is room for them.
  std::optional<int64_t> total = std::nullopt;
  // Bytes of device memory that are left for KV caches.
  int64_t cache = 0;
  // With kAhead: the most bytes that a block requests of the experts that the step before has
  // chosen in the next block.
  int64_t read_ahead = 0;
};

struct TierCounts {
  bool in_force = false;
  TierPolicy policy = TierPolicy::kMap;  // of the next step
  // Bytes of chosen experts that were in memory when their block had been routed, and that were
  // not: read from files, or copied to the device. Both 0 unless policies or slots are in force.
  uint64_t hit_bytes = 0;
  uint64_t read_bytes = 0;
  // With slots: the bytes of all experts, and how many products there were of a part of the experts
  // that a block had chosen, because they did not all fit at once.
  int64_t expert_bytes = 0;
  uint64_t waves = 0;
  // How long the model's thread did not run during the products of experts that were not all in
  // memory. 0 with slots: the device waits, not the thread.
  double stall_seconds = 0.0;
};

}  // namespace moeserve
