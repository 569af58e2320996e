#include "engine/text/structured/ending_search.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace moeserve::structured {
namespace {

// Limit on the work (StackPool::work) of one search, reached in some milliseconds.
constexpr int64_t kMaxSearchWork = 200000;
// Number of states of a level that are followed; the search is repeated with the next number if it
// finds nothing.
constexpr size_t kWidths[] = {4, 32, 256};

// Clears what does not change how few tokens complete `frame`.
void Normalise(const Grammar& grammar, Frame* frame) {
  frame->below = 0;
  frame->space = std::min<uint8_t>(frame->space, 2);
  if (frame->kind == FrameKind::kScalar) {
    const auto& scalar = std::get<ScalarNode>(grammar.nodes[frame->node].value);
    frame->count = scalar.counted ? std::min(frame->count, scalar.min_chars) : 0;
  } else if (frame->kind == FrameKind::kArray) {
    const auto& array = std::get<ArrayNode>(grammar.nodes[frame->node].value);
    const auto prefix = static_cast<int64_t>(array.prefix.size());
    frame->count = std::min(frame->count, std::max(array.min_items, prefix));
  } else if (frame->kind == FrameKind::kObject) {
    const auto& object = std::get<ObjectNode>(grammar.nodes[frame->node].value);
    // Which properties are left matters only if some of them are needed.
    const bool enough = frame->count >= object.min_properties;
    frame->count = std::min(frame->count, object.min_properties);
    if (enough) frame->num_others = 0;
    if (enough && object.properties.size() <= 64) {
      frame->seen_hash = 0;
      for (size_t i = 0; i < object.properties.size(); ++i) {
        if (!object.properties[i].required) frame->seen &= ~(uint64_t{1} << i);
      }
    }
    if (frame->first == frame->last) frame->length = 0;
    frame->hash = 0;
  }
}

}  // namespace

bool EndingSearch::Overworked() const { return found_ >= 0 || pool_.work > work_end_; }

uint64_t EndingSearch::Hash(const Frame& top) const {
  uint64_t hash = kHashBasis;
  const Frame* at = &top;
  while (true) {
    Frame frame = *at;
    Normalise(matcher().grammar(), &frame);
    hash = HashWith(HashWith(hash, frame.Hash()), static_cast<uint64_t>(frame.pending));
    hash = HashWith(hash, frame.decoder.at_boundary());
    if (at->parent < 0) return hash;
    at = &pool_.frames[at->parent];
  }
}

bool EndingSearch::EndsWithin(const std::vector<Frame>& tops, int64_t most) const {
  return std::any_of(tops.begin(), tops.end(), [&](const Frame& top) {
    return matcher().MayStop(top, pool_) || matcher().Distance(top, pool_) <= most;
  });
}

std::optional<std::vector<TokenId>> EndingSearch::Find(const std::vector<Frame>& tops,
                                                       int64_t most) {
  if (EndsWithin(tops, most)) return std::vector<TokenId>();
  const StackPool::Mark mark = pool_.mark();
  work_end_ = kMaxSearchWork;
  const int64_t work = std::exchange(pool_.work, 0);
  std::optional<std::vector<TokenId>> out;
  for (const size_t width : kWidths) {
    if (Overworked() || !Search(tops, most, width)) continue;
    out.emplace();
    for (int32_t i = found_; items_[i].parent >= 0; i = items_[i].parent) {
      out->push_back(items_[i].token);
    }
    std::reverse(out->begin(), out->end());
    break;
  }
  pool_.work += work;
  pool_.CutTo(mark);
  return out;
}

bool EndingSearch::Search(const std::vector<Frame>& tops, int64_t most, size_t width) {
  items_.clear();
  known_.clear();
  found_ = -1;
  std::vector<int32_t> level;
  for (const Frame& top : tops) {
    level.push_back(static_cast<int32_t>(items_.size()));
    items_.push_back({top, 0, -1, 0});
    known_.insert(Hash(top));
  }
  for (left_ = most - 1; left_ >= 0 && !level.empty(); --left_) {
    next_.clear();
    for (const int32_t i : level) {
      parent_ = i;
      const Frame top = items_[i].frame;
      Follow(top);
      if (Overworked()) return found_ >= 0;
    }
    std::stable_sort(next_.begin(), next_.end(),
                     [&](int32_t a, int32_t b) { return items_[a].distance < items_[b].distance; });
    next_.resize(std::min(next_.size(), width));
    level = next_;
  }
  return false;
}

void EndingSearch::Add(const Frame& frame, TokenId token) {
  if (found_ >= 0) return;
  const bool stops = matcher().MayStop(frame, pool_);
  const int64_t distance = stops ? 0 : matcher().Distance(frame, pool_);
  if (distance >= kUnreachable || !known_.insert(Hash(frame)).second) return;
  const auto index = static_cast<int32_t>(items_.size());
  items_.push_back({frame, distance, parent_, token});
  next_.push_back(index);
  if (distance <= left_) found_ = index;
}

void EndingSearch::AddAt(const std::vector<Frame>& frames, int32_t node) {
  const std::span<const TokenId> tokens = vocabulary().TokensAt(node);
  if (tokens.empty()) return;
  for (const Frame& frame : frames) Add(frame, tokens.front());
}

void EndingSearch::Follow(const Frame& top) {
  FollowSpecial(top);
  if (top.kind == FrameKind::kScalar) return FollowScalar(top);
  int64_t bound = 0;
  const int32_t keys = matcher().FreeKeyDfa(top, pool_, &bound);
  if (keys >= 0) return FollowKey(top, keys);
  if (top.kind != FrameKind::kStart && top.kind != FrameKind::kRule) return Walk({top}, 0);
  std::vector<Frame> scalars;
  ByteSet others;
  pool_.step_work = pool_.work + 4 * Matcher::kMaxStepWork;
  if (!matcher().Expand(top, &pool_, &scalars, &others)) return Walk({top}, 0);
  matcher().Reduce(pool_, &scalars, Matcher::kMaxStepFrames);
  for (const Frame& scalar : scalars) {
    FollowScalar(scalar);
    if (Overworked()) return;
  }
  const auto& nodes = vocabulary().nodes();
  for (int32_t i = 1; others.any() && i < static_cast<int32_t>(nodes.size()); i = nodes[i].end) {
    if (others[nodes[i].byte]) WalkInto({top}, i);
  }
}

// Follows the automaton alone as long as the text is in the scalar: of the tokens that lead to one
// of its states, the first one stands for all.
void EndingSearch::FollowScalar(const Frame& top) {
  const ByteDfa& dfa = matcher().DfaOf(top);
  const ScalarNode& scalar = matcher().ScalarOf(top);
  std::vector<Frame> behind;
  matcher().Pop(top, pool_, &behind);
  if (top.parent >= 0 && !dfa.ends_itself) {
    const auto after =
        compiled_.NodesAfter(scalar.dfa, top.dfa_state, matcher().NextBytes(behind[0], pool_));
    pool_.work += after->visited / kNodesPerStep;
    for (const int32_t node : after->nodes) WalkInto(behind, node);
  }
  const int64_t missing = scalar.counted ? std::max<int64_t>(scalar.min_chars - top.count, 0) : 0;
  const bool free_string = dfa.ends_itself && dfa.boundary[top.dfa_state] && missing == 0;
  if (free_string) {
    // Tokens that stay between two characters of a string bring its end no nearer.
    const int64_t room = scalar.counted ? scalar.max_chars - top.count : kNoLimit;
    const auto mask = compiled_.MaskOf(scalar.dfa, top.dfa_state, /*at_root=*/false, room);
    pool_.work += static_cast<int64_t>(mask->exits.size());
    for (const auto& [node, chars] : mask->exits) {
      if (Overworked()) return;
      AddAt(behind, node);
      Walk(behind, node);
    }
    if (scalar.dfa == matcher().grammar().any_string) return;
  }
  struct Level {
    int32_t state;
    int64_t count;
  };
  std::vector<Level> levels(static_cast<size_t>(vocabulary().max_depth()) + 1);
  levels[0] = {top.dfa_state, top.count};
  const auto& nodes = vocabulary().nodes();
  int64_t visited = 0;
  for (int32_t i = 1; i < static_cast<int32_t>(nodes.size());) {
    if (++visited % 1024 == 0) {
      pool_.work += 1024 / kNodesPerStep;
      if (Overworked()) return;
    }
    const Level& above = levels[nodes[i].depth - 1];
    const int32_t next = dfa.Next(above.state, nodes[i].byte);
    bool goes_on = next != kDead;
    if (goes_on && scalar.counted && dfa.boundary[above.state]) {
      goes_on =
          dfa.accepting[next] ? above.count >= scalar.min_chars : above.count < scalar.max_chars;
    }
    if (!goes_on) {
      i = nodes[i].end;
      continue;
    }
    if (dfa.accepting[next] && !dfa.has_next[next]) {
      if (!free_string) {
        AddAt(behind, i);
        Walk(behind, i);
      }
      i = nodes[i].end;
      continue;
    }
    Frame frame = top;
    frame.dfa_state = next;
    frame.count = above.count + (scalar.counted && dfa.boundary[next] ? 1 : 0);
    levels[nodes[i].depth] = {next, frame.count};
    AddAt({frame}, i);
    ++i;
  }
  pool_.work += visited % 1024 / kNodesPerStep;
}

// Follows a key that may be that of a property without a name in the grammar to its end.
void EndingSearch::FollowKey(const Frame& top, int32_t keys) {
  const auto& nodes = vocabulary().nodes();
  if (top.first < top.last) Walk({Matcher::NamedOnly(top)}, 0);
  std::vector<int32_t> path;
  // Adds what the tokens at `node` reach and, if `further`, those below it.
  const auto follow = [&](int32_t node, bool further) {
    path.clear();
    for (int32_t n = node; n > 0; n = nodes[n].parent) path.push_back(n);
    const StackPool::Mark mark = pool_.mark();
    const size_t items = items_.size();
    std::vector<Frame> now = {top};
    for (auto it = path.rbegin(); it != path.rend() && !now.empty(); ++it) {
      now = matcher().StepAll(now, nodes[*it].byte, &pool_);
    }
    AddAt(now, node);
    if (further && !now.empty()) Walk(now, node);
    if (items_.size() == items) pool_.CutTo(mark);
  };
  const auto mask = compiled_.MaskOf(keys, top.dfa_state, /*at_root=*/false, kNoLimit);
  for (const auto& [end, chars] : mask->exits) {
    if (Overworked()) return;
    follow(end, true);
  }
  const ByteDfa& dfa = *matcher().grammar().dfas[keys];
  if (keys == matcher().grammar().any_string && dfa.boundary[top.dfa_state]) return;
  // Within the key, the first token that leads to a state of the automaton stands for all.
  std::vector<uint8_t> reached(static_cast<size_t>(dfa.num_states()), 0);
  std::vector<int32_t> states(static_cast<size_t>(vocabulary().max_depth()) + 1);
  states[0] = top.dfa_state;
  pool_.work += mask->visited / kNodesPerStep;
  for (int32_t i = 1; i < static_cast<int32_t>(nodes.size()) && !Overworked();) {
    const int32_t next = dfa.Next(states[nodes[i].depth - 1], nodes[i].byte);
    if (next == kDead || !dfa.has_next[next]) {
      i = nodes[i].end;
      continue;
    }
    states[nodes[i].depth] = next;
    if (!vocabulary().TokensAt(i).empty() && !std::exchange(reached[next], 1)) follow(i, false);
    ++i;
  }
}

void EndingSearch::FollowSpecial(const Frame& top) {
  for (const TokenId id : compiled_.text_tokens()) {
    std::vector<Frame> now = {top};
    pool_.markers_only = true;
    for (const char c : compiled_.TextOf(id)) {
      now = matcher().StepAll(now, static_cast<uint8_t>(c), &pool_);
      matcher().Reduce(pool_, &now);
      if (now.empty()) break;
    }
    pool_.markers_only = false;
    for (const Frame& frame : now) Add(frame, id);
  }
}

void EndingSearch::WalkInto(const std::vector<Frame>& tops, int32_t node) {
  if (Overworked()) return;
  const StackPool::Mark mark = pool_.mark();
  const size_t items = items_.size();
  std::vector<Frame> now = matcher().StepAll(tops, vocabulary().nodes()[node].byte, &pool_);
  matcher().Reduce(pool_, &now);
  if (!now.empty()) {
    AddAt(now, node);
    Walk(now, node);
  }
  // Frames of items stay in the pool.
  if (items_.size() == items) pool_.CutTo(mark);
}

void EndingSearch::Walk(const std::vector<Frame>& tops, int32_t from) {
  const auto& nodes = vocabulary().nodes();
  for (int32_t i = from + 1; i < nodes[from].end && !Overworked(); i = nodes[i].end) {
    WalkInto(tops, i);
  }
}

}  // namespace moeserve::structured
