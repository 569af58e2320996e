#include "engine/text/structured/matcher.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace moeserve::structured {
namespace {

// Largest number of spaces and tabs after a line end.
constexpr uint8_t kMaxIndent = 64;

}  // namespace

bool StepSpace(Frame* frame, uint8_t byte, bool line_end_allowed) {
  if (frame->space == 0) {
    if (byte == ' ') {
      frame->space = 1;
      return true;
    }
    if (byte == '\n' && line_end_allowed) {
      frame->space = 2;
      return true;
    }
    return false;
  }
  if (frame->space == 1 || frame->space >= 2 + kMaxIndent) return false;
  if (byte != ' ' && byte != '\t') return false;
  ++frame->space;
  return true;
}

bool Frame::SameTop(const Frame& other) const {
  const auto fields = [](const Frame& f) {
    return std::tie(f.node, f.below, f.kind, f.phase, f.space, f.depth, f.tail, f.count,
                    f.dfa_state, f.seen, f.seen_hash, f.num_others, f.missing, f.missing_cost,
                    f.pending, f.decoder, f.first, f.last, f.length, f.hash);
  };
  return fields(*this) == fields(other);
}

uint64_t Frame::Hash() const {
  uint64_t out = below;
  for (const int64_t field :
       {static_cast<int64_t>(kind), static_cast<int64_t>(phase), int64_t{space}, int64_t{node},
        int64_t{depth}, count, int64_t{dfa_state}, int64_t{num_others}, int64_t{missing},
        int64_t{first}, int64_t{last}, int64_t{length}}) {
    out = HashWith(out, static_cast<uint64_t>(field));
  }
  return HashWith(HashWith(HashWith(out, seen), seen_hash), hash);
}

bool StackPool::Equal(const Frame& a, const Frame& b) const {
  const Frame* x = &a;
  const Frame* y = &b;
  while (true) {
    if (!x->SameTop(*y)) return false;
    ++work;
    int32_t s = x->seen_list;
    int32_t t = y->seen_list;
    while (s != t) {
      if (s < 0 || t < 0 || seen[s].key != seen[t].key) return false;
      s = seen[s].previous;
      t = seen[t].previous;
    }
    if (x->parent == y->parent) return true;
    if (x->parent < 0 || y->parent < 0) return false;
    x = &frames[x->parent];
    y = &frames[y->parent];
  }
}

void StackPool::Compact(std::vector<Frame>* tops) {
  std::vector<int32_t> frame_ids(frames.size(), -1);
  std::vector<int32_t> seen_ids(seen.size(), -1);
  constexpr int32_t kNeeded = 0;
  const auto need = [&](const Frame& frame) {
    for (int32_t s = frame.seen_list; s >= 0 && seen_ids[s] < 0; s = seen[s].previous) {
      seen_ids[s] = kNeeded;
    }
    if (frame.parent >= 0) frame_ids[frame.parent] = kNeeded;
  };
  for (const Frame& top : *tops) need(top);
  // An element refers only to earlier elements, so one pass from the last to the first marks all.
  for (size_t i = frames.size(); i-- > 0;) {
    if (frame_ids[i] >= 0) need(frames[i]);
  }
  int32_t kept = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen_ids[i] < 0) continue;
    Seen moved = seen[i];
    if (moved.previous >= 0) moved.previous = seen_ids[moved.previous];
    seen[kept] = moved;
    seen_ids[i] = kept++;
  }
  seen.resize(kept);
  const auto move = [&](Frame* frame) {
    if (frame->parent >= 0) frame->parent = frame_ids[frame->parent];
    if (frame->seen_list >= 0) frame->seen_list = seen_ids[frame->seen_list];
  };
  kept = 0;
  for (size_t i = 0; i < frames.size(); ++i) {
    if (frame_ids[i] < 0) continue;
    Frame moved = frames[i];
    move(&moved);
    frames[kept] = moved;
    frame_ids[i] = kept++;
  }
  frames.resize(kept);
  for (Frame& top : *tops) move(&top);
}

Frame Matcher::Start() const {
  Frame frame;
  frame.node = grammar_.root;
  return frame;
}

const ByteDfa& Matcher::DfaOf(const Frame& top) const { return *grammar_.dfas[ScalarOf(top).dfa]; }

void Matcher::Step(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const {
  ++pool->work;
  switch (top.kind) {
    case FrameKind::kStart:
      return BeginValue(top.node, nullptr, byte, pool, out);
    case FrameKind::kScalar:
      return StepScalar(top, byte, pool, out);
    case FrameKind::kArray:
      return StepArray(top, byte, pool, out);
    case FrameKind::kObject:
      return StepObject(top, byte, pool, out);
    case FrameKind::kDone:
      return;
  }
}

void Matcher::Reduce(const StackPool& pool, std::vector<Frame>* tops) const {
  if (tops->size() < 2) return;
  pool.work += static_cast<int64_t>(tops->size());
  // Compares a few frames directly with each other, and many frames only if their hashes are equal.
  constexpr size_t kFew = 8;
  absl::flat_hash_map<uint64_t, size_t> first_of;
  if (tops->size() > kFew) first_of.reserve(tops->size());
  size_t kept = 0;
  for (size_t i = 0; i < tops->size(); ++i) {
    const Frame& frame = (*tops)[i];
    bool known = false;
    if (tops->size() > kFew) {
      const auto [it, added] = first_of.try_emplace(frame.Hash(), kept);
      known = !added && pool.Equal((*tops)[it->second], frame);
    } else {
      for (size_t j = 0; j < kept && !known; ++j) known = pool.Equal((*tops)[j], frame);
    }
    if (!known) (*tops)[kept++] = frame;
  }
  tops->resize(kept);
  if (kept <= kMaxAlternatives) return;
  std::vector<std::pair<int64_t, size_t>> order;
  for (size_t i = 0; i < kept; ++i) order.push_back({Distance((*tops)[i], pool), i});
  std::sort(order.begin(), order.end());
  order.resize(kMaxAlternatives);
  std::vector<Frame> shortest;
  for (const auto& [distance, i] : order) shortest.push_back((*tops)[i]);
  *tops = std::move(shortest);
}

void Matcher::BeginValue(NodeId id, const Frame* parent, uint8_t byte, StackPool* pool,
                         std::vector<Frame>* out) const {
  int32_t parent_index = -1;
  uint64_t below = 0;
  int64_t tail = 0;
  const auto begin = [&](NodeId option) {
    const Node& node = At(option);
    Frame frame;
    frame.node = option;
    if (const auto* scalar = std::get_if<ScalarNode>(&node.value)) {
      frame.kind = FrameKind::kScalar;
      frame.dfa_state = grammar_.dfas[scalar->dfa]->Next(ByteDfa::kStart, byte);
      if (frame.dfa_state == kDead) return;
    } else {
      const bool object = std::holds_alternative<ObjectNode>(node.value);
      if (byte != (object ? '{' : '[')) return;
      if (parent != nullptr && !Fits(option, *parent)) return;
      frame.kind = object ? FrameKind::kObject : FrameKind::kArray;
      if (object) {
        const ObjectNode& value = std::get<ObjectNode>(node.value);
        frame.missing = value.num_required;
        frame.missing_cost = value.required_cost;
      }
    }
    if (parent != nullptr && parent_index < 0) {
      tail = Distance(*parent, *pool);
      parent_index = static_cast<int32_t>(pool->frames.size());
      pool->frames.push_back(*parent);
      below = parent->Hash();
    }
    frame.below = below;
    frame.depth = (parent == nullptr ? 0 : parent->depth) + 1;
    frame.parent = parent_index;
    frame.tail = tail;
    Emit(frame, *pool, out);
  };
  if (const auto* choice = std::get_if<ChoiceNode>(&At(id).value)) {
    pool->work += static_cast<int64_t>(choice->options.size() / 4);
    for (const NodeId option : choice->options) begin(option);
  } else {
    begin(id);
  }
}

void Matcher::Pop(const Frame& top, const StackPool& pool, std::vector<Frame>* out) const {
  if (top.parent >= 0) {
    out->push_back(pool.frames[top.parent]);
    return;
  }
  Frame done;
  done.kind = FrameKind::kDone;
  out->push_back(done);
}

void Matcher::Emit(const Frame& top, const StackPool& pool, std::vector<Frame>* out) const {
  if (top.kind == FrameKind::kScalar) {
    const ByteDfa& dfa = DfaOf(top);
    if (dfa.accepting[top.dfa_state] && !dfa.has_next[top.dfa_state]) return Pop(top, pool, out);
  }
  out->push_back(top);
}

void Matcher::StepScalar(const Frame& top, uint8_t byte, StackPool* pool,
                         std::vector<Frame>* out) const {
  const ScalarNode& scalar = ScalarOf(top);
  const ByteDfa& dfa = *grammar_.dfas[scalar.dfa];
  const int32_t next = dfa.Next(top.dfa_state, byte);
  bool goes_on = next != kDead;
  if (goes_on && scalar.counted && dfa.boundary[top.dfa_state]) {
    goes_on = dfa.accepting[next] ? top.count >= scalar.min_chars : top.count < scalar.max_chars;
  }
  if (goes_on) {
    Frame frame = top;
    frame.dfa_state = next;
    if (scalar.counted && dfa.boundary[next]) ++frame.count;
    Emit(frame, *pool, out);
  }
  if (top.parent >= 0 && dfa.accepting[top.dfa_state]) {
    const Frame parent = pool->frames[top.parent];
    Step(parent, byte, pool, out);
  }
}

bool Matcher::CanAddItem(const Frame& top) const {
  const NodeId item = ArrayOf(top).ItemAt(top.count);
  return item != kNoNode && Fits(item, top);
}

void Matcher::StepArray(const Frame& top, uint8_t byte, StackPool* pool,
                        std::vector<Frame>* out) const {
  const ArrayNode& array = ArrayOf(top);
  const bool can_close = top.count >= array.min_items;
  Frame frame = top;
  if (byte == ']') {
    if (can_close && top.phase != Phase::kExpectValue) Pop(top, *pool, out);
    return;
  }
  switch (top.phase) {
    case Phase::kOpen:
    case Phase::kExpectValue:
      if (StepSpace(&frame, byte, /*line_end_allowed=*/true)) {
        out->push_back(frame);
      } else if (CanAddItem(top)) {
        frame.phase = Phase::kAfterValue;
        frame.space = 0;
        ++frame.count;
        BeginValue(array.ItemAt(top.count), &frame, byte, pool, out);
      }
      return;
    case Phase::kAfterValue:
      if (byte == ',' && CanAddItem(top)) {
        frame.phase = Phase::kExpectValue;
        out->push_back(frame);
      } else if (byte == '\n' && can_close) {
        frame.phase = Phase::kClosing;
        frame.space = 2;
        out->push_back(frame);
      }
      return;
    default:
      if (StepSpace(&frame, byte, false)) out->push_back(frame);
      return;
  }
}

int64_t Matcher::ScalarRest(const Frame& top) const {
  const ScalarNode& scalar = ScalarOf(top);
  const ByteDfa& dfa = *grammar_.dfas[scalar.dfa];
  int64_t rest = top.parent < 0 ? dfa.end_distance[top.dfa_state] : dfa.distance[top.dfa_state];
  if (scalar.counted) {
    const int64_t begun = dfa.boundary[top.dfa_state] ? 0 : 1;
    rest += std::max<int64_t>(scalar.min_chars - top.count - begun, 0);
  }
  return rest;
}

// Returns the cost of the mandatory items from index `from` on, each with a comma before it.
int64_t Matcher::ItemsCost(const ArrayNode& array, int64_t from) const {
  int64_t cost = 0;
  const int64_t prefix = static_cast<int64_t>(array.prefix.size());
  int64_t i = from;
  for (; i < std::min(array.min_items, prefix); ++i) cost += 1 + At(array.ItemAt(i)).distance;
  if (i < array.min_items) cost += (array.min_items - i) * (1 + At(array.items).distance);
  return cost;
}

int64_t Matcher::ArrayRest(const Frame& top) const {
  const ArrayNode& array = ArrayOf(top);
  switch (top.phase) {
    case Phase::kOpen:
      return ItemsCost(array, 0) + 1 - (array.min_items > 0 ? 1 : 0);
    case Phase::kExpectValue:
      return At(array.ItemAt(top.count)).distance + ItemsCost(array, top.count + 1) + 1;
    case Phase::kAfterValue:
      return ItemsCost(array, top.count) + 1;
    default:
      return 1;
  }
}

int64_t Matcher::Distance(const Frame& top, const StackPool& pool) const {
  int64_t rest = 0;
  switch (top.kind) {
    case FrameKind::kDone:
      return 0;
    case FrameKind::kStart: {
      // A scalar at the root may need an end-of-sequence token, which ScalarRest() includes.
      rest = kUnreachable;
      const auto measure = [&](NodeId id) {
        Frame frame = top;
        frame.node = id;
        const auto* scalar = std::get_if<ScalarNode>(&At(id).value);
        rest = std::min(rest, scalar == nullptr ? At(id).distance
                                                : std::max(At(id).distance, ScalarRest(frame)));
      };
      if (const auto* choice = std::get_if<ChoiceNode>(&At(top.node).value)) {
        for (const NodeId option : choice->options) measure(option);
      } else {
        measure(top.node);
      }
      return rest;
    }
    case FrameKind::kScalar:
      rest = ScalarRest(top);
      break;
    case FrameKind::kArray:
      rest = ArrayRest(top);
      break;
    case FrameKind::kObject:
      rest = ObjectRest(top, pool);
      break;
  }
  return std::min(rest + top.tail, kUnreachable);
}

bool Matcher::Complete(const Frame& top) const {
  if (top.kind == FrameKind::kDone) return true;
  if (top.kind == FrameKind::kScalar) return top.parent < 0 && DfaOf(top).accepting[top.dfa_state];
  if (top.kind != FrameKind::kStart) return false;
  // At the start, the text is complete only if the empty text matches.
  const auto accepts_empty = [&](NodeId id) {
    const auto* scalar = std::get_if<ScalarNode>(&At(id).value);
    return scalar != nullptr && grammar_.dfas[scalar->dfa]->accepting[ByteDfa::kStart];
  };
  const auto* choice = std::get_if<ChoiceNode>(&At(top.node).value);
  if (choice == nullptr) return accepts_empty(top.node);
  return std::any_of(choice->options.begin(), choice->options.end(), accepts_empty);
}

bool Matcher::CanContinue(const Frame& top) const {
  if (top.kind == FrameKind::kDone) return false;
  if (top.kind == FrameKind::kScalar && top.parent < 0) return DfaOf(top).has_next[top.dfa_state];
  if (top.kind != FrameKind::kStart) return true;
  const auto* scalar = std::get_if<ScalarNode>(&At(top.node).value);
  return scalar == nullptr || grammar_.dfas[scalar->dfa]->has_next[ByteDfa::kStart];
}

}  // namespace moeserve::structured
