#include "engine/memory/paged_pool.h"

#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/check.h"

namespace moeserve {

PagedPool::PagedPool(int64_t pages, bool prefix_cache)
    : prefix_cache_(prefix_cache), pages_(static_cast<size_t>(pages)) {
  for (int64_t b = pages - 1; b >= 0; --b) free_.push_back(static_cast<int32_t>(b));
}

int32_t PagedPool::Take() {
  MOESERVE_CHECK(available() > 0, "pages of the KV cache");
  int32_t taken;
  if (!free_.empty()) {
    taken = free_.back();
    free_.pop_back();
  } else {
    taken = unheld_.front();
    unheld_.pop_front();
    index_.erase(pages_[taken].key);
  }
  Page& page = pages_[taken];
  page.references = 1;
  page.content = 0;
  page.findable = false;
  page.key = {};
  return taken;
}

void PagedPool::Share(int32_t page) {
  MOESERVE_CHECK(pages_[page].references > 0, "a shared page is held");
  ++pages_[page].references;
}

void PagedPool::Release(int32_t page) {
  Page& b = pages_[page];
  MOESERVE_CHECK(b.references > 0, "a page was given back twice");
  if (--b.references > 0) return;
  if (b.findable) {
    unheld_.splice(unheld_.end(), held_, b.place);
  } else {
    b.content = 0;
    free_.push_back(page);
  }
}

PagedPool::Key PagedPool::MakeKey(uint64_t parent, const std::string& salt,
                                  std::span<const TokenId> tokens) {
  return {parent, parent == 0 ? salt : std::string(), {tokens.begin(), tokens.end()}};
}

std::vector<int32_t> PagedPool::TakePrefix(std::span<const TokenId> tokens, const std::string& salt,
                                           int64_t limit) {
  std::vector<int32_t> found;
  // Making a key may throw.
  absl::Cleanup release = [&] {
    for (const int32_t page : found) Release(page);
  };
  uint64_t parent = 0;
  while (prefix_cache_ && static_cast<int64_t>(found.size()) < limit) {
    const size_t begin = found.size() * kPageTokens;
    if (begin + kPageTokens > tokens.size()) break;
    const auto it = index_.find(MakeKey(parent, salt, tokens.subspan(begin, kPageTokens)));
    if (it == index_.end()) break;
    found.push_back(it->second);
    Hold(it->second);
    parent = pages_[it->second].content;
  }
  std::move(release).Cancel();
  return found;
}

int32_t PagedPool::Find(uint64_t number) const {
  const auto it = index_.find(Key{number, {}, {}});
  return it == index_.end() ? -1 : it->second;
}

void PagedPool::Hold(int32_t page) {
  Page& p = pages_[page];
  if (p.references++ == 0) held_.splice(held_.end(), unheld_, p.place);
}

void PagedPool::Publish(int32_t page, int32_t parent, const std::string& salt,
                        std::span<const TokenId> tokens) {
  MOESERVE_CHECK(tokens.size() == kPageTokens, "a published page is full");
  if (!prefix_cache_ || pages_[page].content != 0) return;
  const uint64_t before = parent < 0 ? 0 : pages_[parent].content;
  MOESERVE_CHECK(parent < 0 || before != 0, "pages are published in order");
  PublishAs(page, MakeKey(before, salt, tokens));
}

void PagedPool::Publish(int32_t page, uint64_t number) {
  MOESERVE_CHECK(number != 0, "a number stands for the content");
  if (!prefix_cache_ || pages_[page].content != 0) return;
  PublishAs(page, {number, {}, {}});
}

void PagedPool::PublishAs(int32_t page, Key key) {
  Page& b = pages_[page];
  std::list<int32_t> place = {page};
  const auto [it, fresh] = index_.try_emplace(key, page);
  if (!fresh) {
    b.content = pages_[it->second].content;
    return;
  }
  b.content = ++last_content_;
  b.findable = true;
  b.key = std::move(key);
  held_.splice(held_.end(), place);
  b.place = std::prev(held_.end());
}

}  // namespace moeserve
