#include "engine/memory/memory_pool.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/check.h"

namespace moeserve {
namespace {

// Returns the first page that the token at `position` may read with a window: kernels read whole
// blocks of kAttentionAlignment positions.
int64_t FirstSeenPage(int64_t position, int window) {
  const int64_t first = std::max<int64_t>(0, position - window + 1);
  return first / kAttentionAlignment * (kAttentionAlignment / kPageTokens);
}

// Makes room for another page. May throw, so before the page is taken.
void GrowBeforeAdding(std::vector<int32_t>& pages) {
  if (pages.size() == pages.capacity()) pages.reserve(2 * pages.size() + 1);
}

}  // namespace

int64_t PageUse::MostPages(int64_t tokens) const {
  const int64_t all = PagesFor(tokens);
  if (!window.has_value()) return all;
  // The rows of a step, what the first of them sees, and the page that begins within each block.
  const int64_t held = int64_t{*window} + step_tokens + kAttentionAlignment + kPageTokens;
  return std::min(all, PagesFor(held));
}

MemoryPool::MemoryPool(KvCacheStorage& cache, RouteLog& routes, StatePool* states,
                       bool prefix_cache, const std::vector<PageUse>& use,
                       const SnapshotUse& snapshots, RouteLog* source_routes,
                       KvCacheStorage* predictions)
    : cache_(cache),
      predictions_(predictions),
      routes_(routes),
      source_routes_(source_routes),
      states_(states),
      snapshot_use_(snapshots) {
  MOESERVE_CHECK(std::ssize(use) == cache.num_tables(), "a use of every page table");
  for (int t = 0; t < cache.num_tables(); ++t) {
    const PageUse& of_table = use[static_cast<size_t>(t)];
    if (of_table.holds == PageUse::Holds::kTokens) {
      tables_.push_back({of_table, {cache.num_pages(t), prefix_cache}});
    } else if (of_table.holds == PageUse::Holds::kSource) {
      source_.emplace(cache.num_pages(t), false);
    }
  }
  MOESERVE_CHECK(tables_.size() <= kMaxPageTables, "page tables of a sequence");
}

int32_t MemoryPool::TakePage(int table) {
  const int32_t page = tables_[table].pages.Take();
  if (table == 0) routes_.Clear(page);
  return page;
}

bool MemoryPool::SharesNextPage(const SequenceMemory& m, int table) const {
  const auto next = static_cast<size_t>(m.computed / kPageTokens);
  return m.computed % kPageTokens != 0 && pages(table).references(m.tables[table][next]) > 1;
}

bool MemoryPool::SharesNextPage(const SequenceMemory& m) const {
  for (int t = 0; t < num_tables(); ++t) {
    if (SharesNextPage(m, t)) return true;
  }
  return false;
}

void MemoryPool::Extend(SequenceMemory& m, int table, int64_t count) {
  std::vector<int32_t>& pages = m.tables[table];
  while (std::ssize(pages) < count && tables_[table].pages.available() > 0) {
    GrowBeforeAdding(pages);
    pages.push_back(TakePage(table));
  }
}

bool MemoryPool::Admit(SequenceMemory& m, std::span<const TokenId> tokens, const std::string& key,
                       int64_t limit, bool leaves_spare, int64_t source) {
  if (source > 0 && PagesFor(source) > source_->available()) return false;
  absl::Cleanup release = [&] { Release(m); };
  const int64_t found = TakePrefix(m, tokens, key, limit);
  if (states_ != nullptr) AdmitState(m, found);
  m.published = static_cast<int>(found);
  m.computed = m.published * kPageTokens;
  const auto length = std::ssize(tokens);
  std::array<int64_t, kMaxPageTables> wanted{};
  for (int t = 0; t < num_tables(); ++t) {
    ReleaseUnseen(m, t);
    const PagedPool& pool = tables_[t].pages;
    const int64_t held = std::ranges::count_if(m.tables[t], [](int32_t p) { return p != kNoPage; });
    const int64_t needed =
        std::min(PagesFor(length) - found, tables_[t].use.MostPages(length) - held);
    const int64_t spare = leaves_spare ? std::max<int64_t>(1, pool.total() / 100) : 0;
    if (needed + spare > pool.available()) return false;
    wanted[t] = found + needed;
  }
  for (int t = 0; t < num_tables(); ++t) Extend(m, t, wanted[t]);
  while (std::ssize(m.source) < PagesFor(source)) {
    GrowBeforeAdding(m.source);
    m.source.push_back(source_->Take());
    if (source_routes_ != nullptr) source_routes_->Clear(m.source.back());
  }
  std::move(release).Cancel();
  return true;
}

int64_t MemoryPool::TakePrefix(SequenceMemory& m, std::span<const TokenId> tokens,
                               const std::string& key, int64_t limit) {
  std::vector<int32_t>& first = m.tables[0];
  // May throw, so before a page is held.
  for (int t = 1; t < num_tables(); ++t) m.tables[t].reserve(tokens.size() / kPageTokens);
  first = tables_[0].pages.TakePrefix(tokens, key, limit / kPageTokens);
  m.left_at = static_cast<int>(first.size()) * kPageTokens;
  // `usable` is the largest number of pages behind which everything else is cached, too.
  // covered[t] is the first of the adjacent pages of table t that end at page i.
  int64_t usable = 0;
  std::array<int64_t, kMaxPageTables> covered{};
  for (int64_t i = 0; i < std::ssize(first); ++i) {
    const uint64_t content = tables_[0].pages.ContentOf(first[static_cast<size_t>(i)]);
    bool usable_here = states_ == nullptr || states_->HasSnapshot(content);
    for (int t = 1; t < num_tables(); ++t) {
      const int32_t page = tables_[t].pages.Find(content);
      m.tables[t].push_back(page);
      if (page == kNoPage) covered[t] = i + 1;
      usable_here =
          usable_here && covered[t] <= FirstSeenPage((i + 1) * kPageTokens, *tables_[t].use.window);
    }
    if (usable_here) usable = i + 1;
  }
  while (std::ssize(first) > usable) {
    tables_[0].pages.Release(first.back());
    first.pop_back();
  }
  for (int t = 1; t < num_tables(); ++t) {
    std::vector<int32_t>& pages = m.tables[t];
    pages.resize(static_cast<size_t>(usable));
    const int64_t seen = FirstSeenPage(usable * kPageTokens, *tables_[t].use.window);
    for (int64_t i = 0; i < usable; ++i) {
      int32_t& page = pages[static_cast<size_t>(i)];
      if (i < seen) {
        page = kNoPage;
      } else {
        tables_[t].pages.Hold(page);
      }
    }
  }
  return usable;
}

bool MemoryPool::Reserve(SequenceMemory& m, int length) {
  bool enough = true;
  for (int t = 0; t < num_tables(); ++t) {
    if (SharesNextPage(m, t)) {
      PagedPool& pool = tables_[t].pages;
      if (pool.available() == 0) return false;
      int32_t& page = m.tables[t][static_cast<size_t>(m.computed / kPageTokens)];
      const int32_t own = TakePage(t);
      cache_.CopyPage(t, page, own);
      if (t == 0) routes_.Copy(page, own);
      if (t == 0 && predictions_ != nullptr) predictions_->CopyPage(0, page, own);
      pool.Release(std::exchange(page, own));
    }
    Extend(m, t, PagesFor(length));
    enough = enough && std::ssize(m.tables[t]) >= PagesFor(length);
  }
  return enough;
}

int MemoryPool::ReserveUnshared(SequenceMemory& m, int length) {
  if (SharesNextPage(m)) return m.computed;
  int64_t room = length;
  for (int t = 0; t < num_tables(); ++t) {
    Extend(m, t, PagesFor(length));
    room = std::min<int64_t>(room, std::ssize(m.tables[t]) * kPageTokens);
  }
  return static_cast<int>(room);
}

void MemoryPool::Advance(SequenceMemory& m, int count, std::span<const TokenId> tokens,
                         const std::string& key) {
  m.computed += count;
  const std::vector<int32_t>& first = m.tables[0];
  while ((m.published + 1) * kPageTokens <= m.computed) {
    const auto i = static_cast<size_t>(m.published++);
    tables_[0].pages.Publish(first[i], i == 0 ? -1 : first[i - 1], key,
                             tokens.subspan(i * kPageTokens, kPageTokens));
    const uint64_t content = tables_[0].pages.ContentOf(first[i]);
    for (int t = 1; t < num_tables() && content != 0; ++t) {
      tables_[t].pages.Publish(m.tables[t][i], content);
    }
  }
  if (states_ != nullptr) AdvanceState(m);
  for (int t = 0; t < num_tables(); ++t) {
    // A prompt that has not all of its pages yet goes on with those that it releases.
    const int64_t released = ReleaseUnseen(m, t);
    Extend(m, t, std::min(PagesFor(std::ssize(tokens)), std::ssize(m.tables[t]) + released));
  }
}

void MemoryPool::AdmitState(SequenceMemory& m, int64_t pages) {
  m.state = states_->Take();
  m.state_tokens = static_cast<int>(pages) * kPageTokens;
  if (pages == 0) {
    states_->storage().Clear(m.state);
  } else {
    const uint64_t content = tables_[0].pages.ContentOf(m.tables[0].back());
    states_->storage().Advance(states_->Use(content), 0, m.state);
  }
}

bool MemoryPool::WantsSnapshot(const SequenceMemory& m, int tokens, int prompt) const {
  return tokens % snapshot_use_.interval == 0 || tokens == m.left_at ||
         tokens == (prompt - 1) / kPageTokens * kPageTokens;
}

void MemoryPool::AddStates(SequenceMemory& m, int rows, int drafted, int prompt,
                           BatchStates& batch) {
  if (states_ == nullptr) return;
  const size_t first = batch.keep.size();
  batch.Add(states_->storage(), m.state, rows, drafted);
  m.state_tokens = m.computed + rows - drafted;
  for (int n = (m.computed / kPageTokens + 1) * kPageTokens; n <= m.state_tokens;
       n += kPageTokens) {
    if (!WantsSnapshot(m, n, prompt)) continue;
    m.snapshots.reserve(m.snapshots.size() + 1);  // may throw, so before a slot is taken
    const std::optional<int32_t> slot = states_->TakeForSnapshot();
    if (!slot.has_value()) return;
    m.snapshots.push_back({n, *slot});
    batch.snapshot[first + static_cast<size_t>(n - m.computed - 1)] = *slot;
  }
}

void MemoryPool::AdvanceState(SequenceMemory& m) {
  StateStorage& storage = states_->storage();
  const int last = m.computed / snapshot_use_.interval * snapshot_use_.interval;
  if (last > m.state_tokens) {
    m.snapshots.reserve(m.snapshots.size() + 1);
    if (const std::optional<int32_t> slot = states_->TakeForSnapshot()) {
      storage.Advance(m.state, last - m.state_tokens, *slot);
      m.snapshots.push_back({last, *slot});
    }
  }
  if (m.computed > m.state_tokens) storage.Advance(m.state, m.computed - m.state_tokens, m.state);
  m.state_tokens = m.computed;
  for (const auto& [tokens, slot] : std::exchange(m.snapshots, {})) {
    const uint64_t content =
        tables_[0].pages.ContentOf(m.tables[0][static_cast<size_t>(tokens / kPageTokens) - 1]);
    content == 0 ? states_->Drop(slot) : states_->Publish(slot, content);
  }
}

int64_t MemoryPool::ReleaseUnseen(SequenceMemory& m, int table) {
  const PageUse& use = tables_[table].use;
  if (!use.window.has_value()) return 0;
  std::vector<int32_t>& pages = m.tables[table];
  // The last published page stays: in the first table the next one is published as its
  // continuation.
  const int64_t end =
      std::min<int64_t>(FirstSeenPage(m.computed, *use.window), int64_t{m.published} - 1);
  int64_t released = 0;
  for (int64_t i = end - 1; i >= 0 && pages[static_cast<size_t>(i)] != kNoPage; --i) {
    ++released;
    int32_t& page = pages[static_cast<size_t>(i)];
    if (table == 0) {
      const TokenRoutes work = routes_.Total({&page, 1});
      m.released.routes += work.routes;
      m.released.parameters += work.parameters;
    }
    tables_[table].pages.Release(std::exchange(page, kNoPage));
  }
  return released;
}

SequenceMemory MemoryPool::Fork(const SequenceMemory& memory) {
  SequenceMemory fork = memory;  // first, because nothing is shared if that throws
  for (int t = 0; t < num_tables(); ++t) {
    for (const int32_t page : memory.tables[t]) {
      if (page != kNoPage) tables_[t].pages.Share(page);
    }
  }
  for (const int32_t page : memory.source) source_->Share(page);
  fork.drafted_until = 0;
  if (states_ != nullptr) {
    fork.state = states_->Take();
    states_->storage().Advance(memory.state, 0, fork.state);
  }
  return fork;
}

void MemoryPool::Release(SequenceMemory& m) {
  for (int t = 0; t < num_tables(); ++t) {
    for (std::vector<int32_t>& pages = m.tables[t]; !pages.empty(); pages.pop_back()) {
      if (pages.back() != kNoPage) tables_[t].pages.Release(pages.back());
    }
  }
  for (; !m.source.empty(); m.source.pop_back()) source_->Release(m.source.back());
  if (m.state >= 0) states_->Release(m.state);
  for (const StateSnapshot& snapshot : m.snapshots) states_->Drop(snapshot.slot);
  m = {};
}

}  // namespace moeserve
