#include "engine/memory/paged_pool.h"

#include <utility>

#include "base/check.h"

namespace moeserve {

PagedPool::PagedPool(int64_t blocks, bool prefix_cache)
    : prefix_cache_(prefix_cache), blocks_(static_cast<size_t>(blocks)) {
  for (int64_t b = blocks - 1; b >= 0; --b) free_.push_back(static_cast<int32_t>(b));
}

int32_t PagedPool::Take() {
  MOESERVE_CHECK(available() > 0, "blocks of the KV cache");
  int32_t taken;
  if (!free_.empty()) {
    taken = free_.back();
    free_.pop_back();
  } else {
    taken = unheld_.front();
    unheld_.pop_front();
    index_.erase(blocks_[taken].key);
  }
  Block& block = blocks_[taken];
  block.references = 1;
  block.content = 0;
  block.findable = false;
  block.key = {};
  return taken;
}

void PagedPool::Share(int32_t block) {
  MOESERVE_CHECK(blocks_[block].references > 0, "a shared cache block is held");
  ++blocks_[block].references;
}

void PagedPool::Release(int32_t block) {
  Block& b = blocks_[block];
  MOESERVE_CHECK(b.references > 0, "a cache block was given back twice");
  if (--b.references > 0) return;
  if (b.findable) {
    b.place = unheld_.insert(unheld_.end(), block);
  } else {
    b.content = 0;
    free_.push_back(block);
  }
}

PagedPool::Key PagedPool::MakeKey(uint64_t parent, const std::string& salt,
                                  std::span<const TokenId> tokens) {
  return {parent, parent == 0 ? salt : std::string(), {tokens.begin(), tokens.end()}};
}

std::vector<int32_t> PagedPool::TakePrefix(std::span<const TokenId> tokens, const std::string& salt,
                                           int64_t limit) {
  std::vector<int32_t> found;
  uint64_t parent = 0;
  while (prefix_cache_ && static_cast<int64_t>(found.size()) < limit) {
    const size_t begin = found.size() * kKvBlockTokens;
    if (begin + kKvBlockTokens > tokens.size()) break;
    const auto it = index_.find(MakeKey(parent, salt, tokens.subspan(begin, kKvBlockTokens)));
    if (it == index_.end()) break;
    Block& block = blocks_[it->second];
    if (block.references++ == 0) unheld_.erase(block.place);
    parent = block.content;
    found.push_back(it->second);
  }
  return found;
}

void PagedPool::Publish(int32_t block, int32_t parent, const std::string& salt,
                        std::span<const TokenId> tokens) {
  MOESERVE_CHECK(tokens.size() == kKvBlockTokens, "a published block is full");
  Block& b = blocks_[block];
  if (!prefix_cache_ || b.content != 0) return;
  const uint64_t before = parent < 0 ? 0 : blocks_[parent].content;
  MOESERVE_CHECK(parent < 0 || before != 0, "blocks are published in order");
  Key key = MakeKey(before, salt, tokens);
  const auto [it, fresh] = index_.try_emplace(key, block);
  if (!fresh) {
    b.content = blocks_[it->second].content;
    return;
  }
  b.content = ++last_content_;
  b.findable = true;
  b.key = std::move(key);
}

}  // namespace moeserve
