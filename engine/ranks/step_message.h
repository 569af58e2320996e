// What the leader sends to the followers before each step of the model.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/ranks/page_table_changes.h"
#include "engine/routes/routing_control.h"
#include "kernels/base/kv_cache_type.h"

namespace moeserve {

// What has happened to the leader's caches and states since the step before. Followers do the same
// to theirs, which have the leader's ids.
struct StorageChange {
  enum class Kind : uint8_t {
    kNewCache,      // sizes: [tables] numbers of pages; values[0]: KvCacheType;
                    // values[1]: 1 for a cache of the prediction layers
    kNewStates,     // sizes: slots, pending rows
    kDrop,          // the storage does not exist any more
    kCopyPage,      // values: table, from, to
    kClearState,    // values[0]: slot
    kAdvanceState,  // values: from, rows, to
  };
  static constexpr int kKinds = 6;
  Kind kind = Kind::kDrop;
  uint64_t storage = 0;
  std::array<int32_t, 3> values{};
  std::vector<int64_t> sizes = {};

  bool operator==(const StorageChange&) const = default;
};

// One change of a placement of experts.
struct ExpertMove {
  Stack stack = Stack::kOnly;
  int32_t block = 0;  // index in ModelSpec::blocks
  int32_t expert = 0;
  uint64_t holders = 0;  // HolderSet from now on

  bool operator==(const ExpertMove&) const = default;
};

// A step as the followers need it: they return no logits, so the message has no samples, and logit
// rows only if the ranks divide the vocabulary. The arrays are those of Batch and of
// PredictionSources.
struct StepMessage {
  enum class Kind : uint8_t {
    kForward,
    kEncodeSources,
    kPredict,
    kStop,        // the leader ends; the message has changes only
    kCheckFiles,  // ranks disagree: a follower looks at its files; the message has changes only
  };
  static constexpr int kKinds = 5;

  uint64_t number = 0;  // of the step, ascending by 1
  Kind kind = Kind::kForward;
  std::vector<StorageChange> changes = {};
  uint64_t cache = 0;
  uint64_t states = 0;  // 0: the model has none

  std::vector<int32_t> tokens = {}, positions = {}, sequence = {};
  std::vector<uint8_t> long_sequence = {}, token_types = {};
  int32_t tables = 1;
  std::vector<PageTableChange> page_tables = {};  // [S * tables] from the last step with the cache
  std::vector<int32_t> lengths = {};
  std::vector<int32_t> state_slots = {}, keep = {}, snapshot = {}, pending = {};
  std::vector<int32_t> source_rows = {};  // kPredict
  uint8_t predicted = 0;
  uint8_t divide_rows = 0;  // Batch::divide_rows
  // From this step on, a rank for which another one waits longer is lost. 0: as before.
  uint32_t timeout_ms = 0;
  std::vector<int32_t> logit_rows = {};  // ascending
  // The version of the placement of experts in this step and those that follow.
  uint32_t placement_version = 1;
  // If not 0: the version of the placement after `moves`, which the ranks prepare from now on. It
  // is used when a message says so, or another one is announced before.
  uint32_t next_version = 0;
  std::vector<ExpertMove> moves = {};
  // [S], or empty: what the requests change about their routing; nullopt: nothing.
  std::vector<std::optional<RoutingChange>> controls = {};
};

// The bounds of what a follower accepts. They follow from its own options, which are the leader's.
struct StepLimits {
  int64_t tokens = 0;     // of a step
  int64_t sequences = 0;  // of a step
  int64_t pages = 0;      // of a sequence in a table
  int64_t changes = 0;
};

// Returns the bytes of a message: a version, the length, a checksum, then the fields.
std::string Serialize(const StepMessage& message);

// Returns the message of these bytes. InvalidArgument, with what was expected and found, if they
// have another version, are damaged, or exceed a limit, or if arrays that belong together differ in
// length. Changes of page tables are not compared with the tables, nor ids of slots and storages
// with those that exist.
Result<StepMessage> ParseStepMessage(std::string_view bytes, const StepLimits& limits);

namespace internal {
// The size of what stands before the fields, and the message with these fields, which may be wrong.
inline constexpr size_t kStepHeaderBytes = 24;
std::string WithHeader(std::string_view fields);
}  // namespace internal

}  // namespace moeserve
