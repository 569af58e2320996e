#include "engine/text/structured/dfa_mask.h"

#include <algorithm>

namespace moeserve::structured {

int64_t WalkDfa(const VocabularyIndex& vocabulary, const ByteDfa& dfa, int32_t state,
                const WalkLimits& limits, std::span<uint32_t> tokens, std::vector<DfaExit>* exits) {
  struct Level {
    int32_t state;
    int64_t count;
  };
  std::vector<Level> levels(static_cast<size_t>(vocabulary.max_depth()) + 1);
  levels[0] = {state, limits.count};
  const std::vector<int64_t>& distance = limits.at_root ? dfa.end_distance : dfa.distance;
  const std::vector<VocabularyIndex::Node>& nodes = vocabulary.nodes();
  const int32_t end = static_cast<int32_t>(nodes.size());
  int64_t visited = 0;
  for (int32_t i = 1; i < end;) {
    ++visited;
    const VocabularyIndex::Node& node = nodes[i];
    const Level& above = levels[node.depth - 1];
    const int32_t next = dfa.Next(above.state, node.byte);
    int64_t count = above.count;
    bool live = next != kDead;
    if (live && limits.counted) {
      if (dfa.boundary[above.state]) {
        live = dfa.accepting[next] ? count >= limits.min_chars : count < limits.max_chars;
      }
    }
    if (live && dfa.boundary[next]) ++count;
    if (!live) {
      i = node.end;
      continue;
    }
    if (dfa.accepting[next] && !dfa.has_next[next]) {
      exits->push_back({i, static_cast<int32_t>(count - limits.count)});
      i = node.end;
      continue;
    }
    levels[node.depth] = {next, count};
    const std::span<const TokenId> here = vocabulary.TokensAt(i);
    if (!here.empty()) {
      int64_t rest = distance[next];
      if (limits.counted) {
        const int64_t begun = dfa.boundary[next] ? 0 : 1;
        rest += std::max<int64_t>(limits.min_chars - count - begun, 0);
      }
      if (rest <= limits.max_rest) {
        for (const TokenId id : here) tokens[id / 32] |= uint32_t{1} << (id % 32);
      }
    }
    ++i;
  }
  return visited;
}

std::vector<int32_t> NodesAfterEnds(const VocabularyIndex& vocabulary, const ByteDfa& dfa,
                                    int32_t state, const ByteSet& bytes, int64_t* visited) {
  std::vector<int32_t> out;
  std::vector<int32_t> states(static_cast<size_t>(vocabulary.max_depth()) + 1);
  states[0] = state;
  const std::vector<VocabularyIndex::Node>& nodes = vocabulary.nodes();
  const int32_t end = static_cast<int32_t>(nodes.size());
  for (int32_t i = 1; i < end;) {
    ++*visited;
    const VocabularyIndex::Node& node = nodes[i];
    const int32_t above = states[node.depth - 1];
    if (dfa.accepting[above] && bytes[node.byte]) out.push_back(i);
    const int32_t next = dfa.Next(above, node.byte);
    if (next == kDead || !dfa.has_next[next]) {
      i = node.end;
      continue;
    }
    states[node.depth] = next;
    ++i;
  }
  return out;
}

std::shared_ptr<const DfaMask> DfaMaskCache::Get(const VocabularyIndex& vocabulary,
                                                 const ByteDfa& dfa, int32_t dfa_id, int32_t state,
                                                 bool at_root, int64_t room) {
  // A token has at most as many characters as bytes, so a larger `room` does not restrict any
  // token.
  const bool counted = room < vocabulary.max_depth();
  const std::tuple key(dfa_id, state, at_root, counted ? room : kNoLimit);
  {
    MutexLock lock(mutex_);
    const auto it = masks_.find(key);
    if (it != masks_.end()) return it->second;
  }
  auto mask = std::make_shared<DfaMask>();
  mask->tokens.resize(vocabulary.mask_words());
  WalkLimits limits;
  limits.at_root = at_root;
  limits.counted = counted;
  if (counted) limits.max_chars = room;
  mask->visited = WalkDfa(vocabulary, dfa, state, limits, mask->tokens, &mask->exits);
  const size_t bytes =
      sizeof(uint32_t) * mask->tokens.size() + sizeof(DfaExit) * mask->exits.size() + 192;
  MutexLock lock(mutex_);
  if (bytes_ + bytes <= max_bytes_ && masks_.try_emplace(key, mask).second) bytes_ += bytes;
  return mask;
}

std::shared_ptr<const NodesAfter> DfaMaskCache::GetAfter(const VocabularyIndex& vocabulary,
                                                         const ByteDfa& dfa, int32_t dfa_id,
                                                         int32_t state, const ByteSet& bytes) {
  const std::tuple key(dfa_id, state, bytes.to_string());
  {
    MutexLock lock(mutex_);
    const auto it = after_.find(key);
    if (it != after_.end()) return it->second;
  }
  auto after = std::make_shared<NodesAfter>();
  after->nodes = NodesAfterEnds(vocabulary, dfa, state, bytes, &after->visited);
  const size_t size = sizeof(int32_t) * after->nodes.size() + 512;
  MutexLock lock(mutex_);
  if (bytes_ + size <= max_bytes_ && after_.try_emplace(key, after).second) bytes_ += size;
  return after;
}

}  // namespace moeserve::structured
