// Gives sequences their memory on the device.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/memory/paged_pool.h"
#include "engine/memory/sequence_memory.h"
#include "engine/memory/state_pool.h"
#include "engine/routes/route_log.h"
#include "engine/step/batch.h"
#include "engine/text/token_id.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

// How many pages of a table a sequence holds at most.
struct PageUse {
  // kTokens: the sequence's own tokens. kSource: those of its source. kStep: those of the step, in
  // pages that no sequence keeps.
  enum class Holds : uint8_t { kTokens, kSource, kStep };
  Holds holds = Holds::kTokens;
  // The number of last positions that a token sees in the attention with the widest window of the
  // table. Pages in front of them are released. nullopt: a token sees all positions, or pages must
  // stay for another reason.
  std::optional<int> window;
  int step_tokens = 0;  // largest number of rows in a step

  // Returns the largest number of pages that a sequence of `tokens` tokens holds at a time.
  int64_t MostPages(int64_t tokens) const;
};

// When snapshots of states are taken, so that later texts with the same beginning need not compute
// it again: at the last full page of a prompt, where a prompt has left a text in the prefix cache,
// and after every `interval` tokens, which is a multiple of kPageTokens.
struct SnapshotUse {
  int interval = 1024;
};

// The scheduler decides which sequences get memory; this class knows what that memory is. Functions
// that take pages return false or a smaller number instead of waiting for memory. Engine thread
// only.
class MemoryPool {
 public:
  // The arguments outlive the pool. `use` has an element for each table of `cache`, of which those
  // for tokens are in front; the first table has the widest view. A page of `routes` belongs to the
  // page of the first table with the same id, a page of `source_routes` to that of kSourceTable; it
  // may be null. `states` is null if the model has no states. `predictions`, the cache of
  // prediction layers, may be null; its pages are those of the first table.
  MemoryPool(KvCacheStorage& cache, RouteLog& routes, StatePool* states, bool prefix_cache,
             const std::vector<PageUse>& use, const SnapshotUse& snapshots,
             RouteLog* source_routes = nullptr, KvCacheStorage* predictions = nullptr);

  // Returns the number of page tables of a sequence's tokens, which SequenceMemory::tables has in
  // front.
  int num_tables() const { return static_cast<int>(tables_.size()); }
  // Returns the pages of a table.
  const PagedPool& pages(int table = 0) const { return tables_[static_cast<size_t>(table)].pages; }

  // Returns the number of tables of the cache.
  int num_cache_tables() const { return cache_.num_tables(); }

  // Returns the largest number of pages of a table that a sequence of `tokens` tokens holds.
  int64_t MostPages(int table, int64_t tokens) const {
    return tables_[static_cast<size_t>(table)].use.MostPages(tokens);
  }

  // Fills `memory`, which is empty, with pages for `source` tokens of a source, with what the
  // prefix cache has of the first `limit` of `tokens`, and with pages for the rest: all of them, or
  // as many as MostPages() says. Only texts with equal keys share cached prefixes. Returns false,
  // and leaves `memory` empty, if there are too few pages. If `leaves_spare`, a hundredth of the
  // pages stays free for sequences that grow.
  bool Admit(SequenceMemory& memory, std::span<const TokenId> tokens, const std::string& key,
             int64_t limit, bool leaves_spare, int64_t source = 0);

  // Makes sure that the sequence can compute its tokens up to `length`: that it has pages for them,
  // and that no other sequence shares the page of the next one. Returns false if that takes more
  // pages than there are; what was reached stays.
  bool Reserve(SequenceMemory& memory, int length);
  // As Reserve(), but copies no page. Returns up to which token there is room, at most `length`:
  // none beyond `computed` while other sequences share the page of the next token.
  int ReserveUnshared(SequenceMemory& memory, int length);

  // Adds `rows` rows of a sequence with a prompt of `prompt` tokens to the states of a step; the
  // last `drafted` of them may be rejected. Advance() must follow, or Release() if the step fails.
  void AddStates(SequenceMemory& memory, int rows, int drafted, int prompt, BatchStates& batch);

  // Marks `count` further tokens as computed, publishes full pages and releases those that no later
  // position sees. `tokens` are all known tokens of the sequence.
  void Advance(SequenceMemory& memory, int count, std::span<const TokenId> tokens,
               const std::string& key);

  // Returns memory with the same content, which shares all pages.
  SequenceMemory Fork(const SequenceMemory& memory);
  // Takes everything back. `memory` is then empty.
  void Release(SequenceMemory& memory);

 private:
  struct Table {
    PageUse use;
    PagedPool pages;
  };

  int32_t TakePage(int table);
  // Whether the next token's page has content and other holders, in this table or in any.
  bool SharesNextPage(const SequenceMemory& memory, int table) const;
  bool SharesNextPage(const SequenceMemory& memory) const;
  // Takes free pages until the table has `count`, or none is left.
  void Extend(SequenceMemory& memory, int table, int64_t count);
  // Fills the tables with what the prefix cache has of the first `limit` tokens: as many pages as
  // can be continued from, because windows see only cached pages behind them and the states were
  // kept. Returns how many.
  int64_t TakePrefix(SequenceMemory& memory, std::span<const TokenId> tokens,
                     const std::string& key, int64_t limit);
  // Takes a slot with the snapshot at the end of the cached prefix of `pages` pages, or with the
  // state of an empty text.
  void AdmitState(SequenceMemory& memory, int64_t pages);
  // Accepts the drafted rows up to `computed`, and publishes the snapshots of the step.
  void AdvanceState(SequenceMemory& memory);
  bool WantsSnapshot(const SequenceMemory& memory, int tokens, int prompt) const;
  // Releases the pages of a table in front of those that the token at `computed` and later ones
  // see. Returns how many.
  int64_t ReleaseUnseen(SequenceMemory& memory, int table);

  KvCacheStorage& cache_;
  KvCacheStorage* const predictions_;  // may be null
  RouteLog& routes_;
  RouteLog* const source_routes_;  // may be null
  StatePool* const states_;
  const SnapshotUse snapshot_use_;
  std::vector<Table> tables_;
  std::optional<PagedPool> source_;  // pages of kSourceTable
};

}  // namespace moeserve
