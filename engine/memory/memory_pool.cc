#include "engine/memory/memory_pool.h"

#include <algorithm>
#include <utility>

namespace moeserve {
namespace {

// Returns the first page that the token at `position` may read with a window: kernels read whole
// blocks of kAttentionAlignment positions.
int64_t FirstSeenPage(int64_t position, int window) {
  const int64_t first = std::max<int64_t>(0, position - window + 1);
  return first / kAttentionAlignment * (kAttentionAlignment / kPageTokens);
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
                       bool prefix_cache, const PageUse& use, const SnapshotUse& snapshots)
    : cache_(cache),
      routes_(routes),
      states_(states),
      use_(use),
      snapshot_use_(snapshots),
      pages_(cache.num_pages(), prefix_cache) {}

int32_t MemoryPool::TakePage() {
  const int32_t page = pages_.Take();
  routes_.Clear(page);
  return page;
}

bool MemoryPool::SharesNextPage(const SequenceMemory& m) const {
  const auto next = static_cast<size_t>(m.computed / kPageTokens);
  return m.computed % kPageTokens != 0 && pages_.references(m.pages[next]) > 1;
}

void MemoryPool::Extend(SequenceMemory& m, int64_t count) {
  while (std::ssize(m.pages) < count && pages_.available() > 0) m.pages.push_back(TakePage());
}

bool MemoryPool::Admit(SequenceMemory& m, std::span<const TokenId> tokens, const std::string& key,
                       int64_t limit, int64_t spare) {
  m.pages = pages_.TakePrefix(tokens, key, limit / kPageTokens);
  if (states_ != nullptr) AdmitState(m);
  m.published = static_cast<int>(m.pages.size());
  m.computed = m.published * kPageTokens;
  ReleaseUnseen(m);
  const int64_t held = std::ranges::count_if(m.pages, [](int32_t page) { return page != kNoPage; });
  const auto length = std::ssize(tokens);
  const int64_t needed =
      std::min(PagesFor(length) - std::ssize(m.pages), use_.MostPages(length) - held);
  if (needed + spare > pages_.available()) {
    Release(m);
    return false;
  }
  Extend(m, std::ssize(m.pages) + needed);
  return true;
}

bool MemoryPool::Reserve(SequenceMemory& m, int length) {
  if (SharesNextPage(m)) {
    if (pages_.available() == 0) return false;
    int32_t& page = m.pages[static_cast<size_t>(m.computed / kPageTokens)];
    const int32_t own = TakePage();
    cache_.CopyPage(page, own);
    routes_.Copy(page, own);
    pages_.Release(std::exchange(page, own));
  }
  Extend(m, PagesFor(length));
  return std::ssize(m.pages) >= PagesFor(length);
}

int MemoryPool::ReserveUnshared(SequenceMemory& m, int length) {
  if (SharesNextPage(m)) return m.computed;
  Extend(m, PagesFor(length));
  return static_cast<int>(std::min<int64_t>(std::ssize(m.pages) * kPageTokens, length));
}

void MemoryPool::Advance(SequenceMemory& m, int count, std::span<const TokenId> tokens,
                         const std::string& key) {
  m.computed += count;
  while ((m.published + 1) * kPageTokens <= m.computed) {
    const auto i = static_cast<size_t>(m.published++);
    pages_.Publish(m.pages[i], i == 0 ? -1 : m.pages[i - 1], key,
                   tokens.subspan(i * kPageTokens, kPageTokens));
  }
  if (states_ != nullptr) AdvanceState(m);
  // A prompt that has not all of its pages yet goes on with those that it releases.
  const int64_t released = ReleaseUnseen(m);
  Extend(m, std::min(PagesFor(std::ssize(tokens)), std::ssize(m.pages) + released));
}

void MemoryPool::AdmitState(SequenceMemory& m) {
  m.left_at = static_cast<int>(m.pages.size()) * kPageTokens;
  while (!m.pages.empty() && !states_->HasSnapshot(pages_.ContentOf(m.pages.back()))) {
    pages_.Release(m.pages.back());
    m.pages.pop_back();
  }
  m.state = states_->Take();
  m.state_tokens = static_cast<int>(m.pages.size()) * kPageTokens;
  if (m.pages.empty()) {
    states_->storage().Clear(m.state);
  } else {
    states_->storage().Advance(states_->Use(pages_.ContentOf(m.pages.back())), 0, m.state);
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
        pages_.ContentOf(m.pages[static_cast<size_t>(tokens / kPageTokens) - 1]);
    content == 0 ? states_->Drop(slot) : states_->Publish(slot, content);
  }
}

int64_t MemoryPool::ReleaseUnseen(SequenceMemory& m) {
  if (!use_.window.has_value()) return 0;
  // The last published page stays: the next one is published as its continuation.
  const int64_t end =
      std::min<int64_t>(FirstSeenPage(m.computed, *use_.window), int64_t{m.published} - 1);
  int64_t released = 0;
  for (int64_t i = end - 1; i >= 0 && m.pages[static_cast<size_t>(i)] != kNoPage; --i) {
    ++released;
    int32_t& page = m.pages[static_cast<size_t>(i)];
    const TokenRoutes work = routes_.Total({&page, 1});
    m.released.routes += work.routes;
    m.released.parameters += work.parameters;
    pages_.Release(std::exchange(page, kNoPage));
  }
  return released;
}

SequenceMemory MemoryPool::Fork(const SequenceMemory& memory) {
  for (const int32_t page : memory.pages) {
    if (page != kNoPage) pages_.Share(page);
  }
  SequenceMemory fork = memory;
  fork.drafted_until = 0;
  if (states_ != nullptr) {
    fork.state = states_->Take();
    states_->storage().Advance(memory.state, 0, fork.state);
  }
  return fork;
}

void MemoryPool::Release(SequenceMemory& m) {
  for (; !m.pages.empty(); m.pages.pop_back()) {
    if (m.pages.back() != kNoPage) pages_.Release(m.pages.back());
  }
  if (m.state >= 0) states_->Release(m.state);
  for (const StateSnapshot& snapshot : m.snapshots) states_->Drop(snapshot.slot);
  m = {};
}

}  // namespace moeserve
