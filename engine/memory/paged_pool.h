// Manages pages of the KV cache: reference counts, and the prefix cache over full pages.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/text/token_id.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

constexpr int64_t PagesFor(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// The pages of the KV cache. A page is held by one sequence or shared by several sequences (a
// common prefix, or samples of one prompt before they diverge). A shared page is never written. A
// full page can be published. A published page can be found by its content, even after its last
// holder has released it, until its memory is needed; the least recently used page is evicted
// first.
//
// The key of a page is the page's own 16 tokens and all content before them. Keys are compared,
// not only hashed, so a hit is never wrong. Engine thread only.
class PagedPool {
 public:
  // If `prefix_cache` is false, TakePrefix() finds nothing.
  PagedPool(int64_t pages, bool prefix_cache);

  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  // Returns the number of pages without a holder, with or without findable content.
  int64_t available() const { return static_cast<int64_t>(free_.size() + unheld_.size()); }
  int64_t used() const { return total() - available(); }
  // Returns the number of pages without a holder whose content can be found.
  int64_t evictable() const { return static_cast<int64_t>(unheld_.size()); }
  int references(int32_t page) const { return pages_[page].references; }

  // Returns a page that the caller alone holds, with undefined contents. Requires available() > 0.
  int32_t Take();
  // Adds a holder.
  void Share(int32_t page);
  // Removes a holder. A sequence releases its pages from the last to the first, so that the ends
  // of texts are evicted before their beginnings.
  void Release(int32_t page);

  // Returns the longest run of published pages that hold the beginning of `tokens`, at most
  // `limit` pages, and makes the caller a holder of each. Texts with different salts never share
  // pages.
  std::vector<int32_t> TakePrefix(std::span<const TokenId> tokens, const std::string& salt,
                                  int64_t limit);

  // Returns the published page with this number from Publish(), without holding it; -1 if there is
  // none.
  int32_t Find(uint64_t number) const;
  // Adds a holder to a published page, which may have none.
  void Hold(int32_t page);

  // Returns a number for the text up to the end of a page, which other pages with the same text
  // have as well; 0 if the page was not published.
  uint64_t ContentOf(int32_t page) const { return pages_[page].content; }

  // Publishes a full page. The page holds `tokens` [16], which follow the content of `parent` (a
  // published page, or -1 at the start of a text). If a page with equal content can be found
  // already, it remains the findable one.
  void Publish(int32_t page, int32_t parent, const std::string& salt,
               std::span<const TokenId> tokens);
  // Publishes a page by a number above 0 that stands for its content, such as ContentOf() a page of
  // another pool. A pool is used with texts or with numbers, not with both.
  void Publish(int32_t page, uint64_t number);

 private:
  struct Key {
    uint64_t parent = 0;  // content id of the preceding page; 0 at the start of a text; or a number
    std::string salt;     // set only in the first page of a text
    std::vector<TokenId> tokens;

    friend bool operator==(const Key&, const Key&) = default;
    template <typename H>
    friend H AbslHashValue(H state, const Key& key) {
      return H::combine(std::move(state), key.parent, key.salt, key.tokens);
    }
  };
  struct Page {
    int references = 0;
    uint64_t content = 0;                // id of the text up to the page's end; 0 if not published
    bool findable = false;               // whether `index_` refers to this page
    Key key;                             // valid if findable
    std::list<int32_t>::iterator place;  // in unheld_ or held_, valid if findable
  };

  void PublishAs(int32_t page, Key key);
  static Key MakeKey(uint64_t parent, const std::string& salt, std::span<const TokenId> tokens);

  const bool prefix_cache_;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::list<int32_t> unheld_;  // findable pages without a holder, least recently used first
  std::list<int32_t> held_;    // findable pages with a holder, so that giving one back cannot throw
  absl::flat_hash_map<Key, int32_t> index_;
  uint64_t last_content_ = 0;
};

}  // namespace moeserve
