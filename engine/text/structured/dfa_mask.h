// Masks of the tokens that an automaton accepts in one of its states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/mutex.h"
#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/vocabulary_index.h"

namespace moeserve::structured {

// Number of trie nodes that a walk of one automaton visits in the time of one matcher step.
inline constexpr int64_t kNodesPerStep = 4;

// A trie node whose bytes lead an automaton to an accepting state.
struct DfaExit {
  int32_t node;
  int32_t chars;  // characters completed on the path to the node
};

struct DfaMask {
  // [mask_words] bits of the tokens after which the automaton can continue
  std::vector<uint32_t> tokens;
  // Nodes at which the automaton accepts.
  std::vector<DfaExit> exits;
  int64_t visited = 0;  // number of trie nodes visited to compute the mask
};

// The result of NodesAfterEnds().
struct NodesAfter {
  std::vector<int32_t> nodes;
  int64_t visited = 0;
};

// Limits of a walk: on the characters of a string, and on the bytes that complete the value.
struct WalkLimits {
  // Whether min_chars and max_chars apply.
  bool counted = false;
  // Number of the string's characters read before the walk.
  int64_t count = 0;
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  // Only tokens are allowed after which at most this many bytes complete the value.
  int64_t max_rest = kUnreachable - 1;
  // Whether the value is the whole text, so that its end may take an end-of-sequence token.
  bool at_root = false;
};

// Sets the bits of the tokens that lead from `state` to a state in which the automaton can
// continue, and appends to `exits` the nodes at which the automaton accepts. Clears no bits.
// Returns the number of trie nodes visited.
int64_t WalkDfa(const VocabularyIndex& vocabulary, const ByteDfa& dfa, int32_t state,
                const WalkLimits& limits, std::span<uint32_t> tokens, std::vector<DfaExit>* exits);

// Returns the nodes whose byte is in `bytes` and at whose parents the automaton, begun in `state`,
// accepts and may also continue: where tokens go on after the end of a text that the automaton need
// not end. The root counts as a parent if `state` accepts. Adds the number of trie nodes visited to
// `*visited`.
std::vector<int32_t> NodesAfterEnds(const VocabularyIndex& vocabulary, const ByteDfa& dfa,
                                    int32_t state, const ByteSet& bytes, int64_t* visited);

// Caches the results of walks that are limited only by a number of characters. The key is the
// automaton, the state and that number. Thread-safe.
class DfaMaskCache {
 public:
  // Stops adding results when the cached ones take `max_bytes`.
  explicit DfaMaskCache(size_t max_bytes) : max_bytes_(max_bytes) {}

  // Returns the mask of `dfa` in `state`. `room` is the number of characters that may follow;
  // values from the vocabulary's max_depth() on mean no limit.
  std::shared_ptr<const DfaMask> Get(const VocabularyIndex& vocabulary, const ByteDfa& dfa,
                                     int32_t dfa_id, int32_t state, bool at_root, int64_t room);
  // Returns what NodesAfterEnds() returns.
  std::shared_ptr<const NodesAfter> GetAfter(const VocabularyIndex& vocabulary, const ByteDfa& dfa,
                                             int32_t dfa_id, int32_t state, const ByteSet& bytes);

 private:
  const size_t max_bytes_;
  Mutex mutex_;
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::tuple<int32_t, int32_t, bool, int64_t>, std::shared_ptr<const DfaMask>> masks_
      ABSL_GUARDED_BY(mutex_);
  std::map<std::tuple<int32_t, int32_t, std::string>, std::shared_ptr<const NodesAfter>> after_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve::structured
