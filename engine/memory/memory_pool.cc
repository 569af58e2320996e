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

MemoryPool::MemoryPool(KvCacheStorage& cache, RouteLog& routes, bool prefix_cache,
                       const PageUse& use)
    : cache_(cache), routes_(routes), use_(use), pages_(cache.num_pages(), prefix_cache) {}

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
  // A prompt that has not all of its pages yet goes on with those that it releases.
  const int64_t released = ReleaseUnseen(m);
  Extend(m, std::min(PagesFor(std::ssize(tokens)), std::ssize(m.pages) + released));
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
  return fork;
}

void MemoryPool::Release(SequenceMemory& m) {
  for (; !m.pages.empty(); m.pages.pop_back()) {
    if (m.pages.back() != kNoPage) pages_.Release(m.pages.back());
  }
  m = {};
}

}  // namespace moeserve
