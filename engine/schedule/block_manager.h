// Which cache block belongs to whom: reference counts, and the prefix cache over full blocks.
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

constexpr int64_t BlocksFor(int64_t tokens) {
  return (tokens + kKvBlockTokens - 1) / kKvBlockTokens;
}

// The blocks of the KV cache. A block is held by one sequence or shared by several (a common
// prefix, or samples of one prompt before they part); nobody writes into a block that others hold.
// A full block whose tokens are known can be published: it then stays findable by its content,
// after its last holder left too, until its memory is needed (least recently used first).
//
// Content is compared, not only hashed: a block is known by the content before it and its own 16
// tokens, so a hit is always the right one. Engine thread only.
class BlockManager {
 public:
  // `prefix_cache` false: nothing is ever found.
  BlockManager(int64_t blocks, bool prefix_cache);

  int64_t total() const { return static_cast<int64_t>(blocks_.size()); }
  // Blocks that nobody holds: empty ones and findable ones.
  int64_t available() const { return static_cast<int64_t>(free_.size() + unheld_.size()); }
  int64_t used() const { return total() - available(); }
  // Of the available: those that still hold findable content.
  int64_t evictable() const { return static_cast<int64_t>(unheld_.size()); }
  int references(int32_t block) const { return blocks_[block].references; }

  // A block for the caller alone; its content is undefined. available() must not be 0.
  int32_t Take();
  // One more holder.
  void Share(int32_t block);
  // One holder less. A sequence gives its blocks back from the last to the first, so that the ends
  // of its text are forgotten before the beginnings.
  void Release(int32_t block);

  // The longest run of published blocks that hold the beginning of `tokens`, at most `limit` of
  // them; the caller becomes a holder of each. Texts with different salts never share.
  std::vector<int32_t> TakePrefix(std::span<const TokenId> tokens, const std::string& salt,
                                  int64_t limit);

  // `block` is full: it holds `tokens` [16], which follow the content of `parent` (a block that was
  // published before, or -1 at the start of a text). Where the same content is already findable,
  // that block stays the findable one.
  void Publish(int32_t block, int32_t parent, const std::string& salt,
               std::span<const TokenId> tokens);

 private:
  struct Key {
    uint64_t parent = 0;  // content before; 0: the start
    std::string salt;     // only at the start
    std::vector<TokenId> tokens;

    friend bool operator==(const Key&, const Key&) = default;
    template <typename H>
    friend H AbslHashValue(H state, const Key& key) {
      return H::combine(std::move(state), key.parent, key.salt, key.tokens);
    }
  };
  struct Block {
    int references = 0;
    uint64_t content = 0;                // number of the content that ends here; 0: not published
    bool findable = false;               // `index_` points here
    Key key;                             // while findable
    std::list<int32_t>::iterator place;  // in unheld_, while findable and not held
  };

  static Key MakeKey(uint64_t parent, const std::string& salt, std::span<const TokenId> tokens);

  const bool prefix_cache_;
  std::vector<Block> blocks_;
  std::vector<int32_t> free_;
  std::list<int32_t> unheld_;  // findable blocks without holder, least recently used first
  absl::flat_hash_map<Key, int32_t> index_;
  uint64_t last_content_ = 0;
};

}  // namespace moeserve
