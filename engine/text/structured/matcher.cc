#include "engine/text/structured/matcher.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "engine/text/structured/grammar_distances.h"

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
                    f.dfa_state, f.seen, f.seen_hash, f.num_others, f.placed, f.missing,
                    f.missing_cost, f.pending, f.decoder, f.first, f.last, f.length, f.hash);
  };
  return fields(*this) == fields(other);
}

uint64_t Frame::Hash() const {
  uint64_t out = below;
  for (const int64_t field :
       {static_cast<int64_t>(kind), static_cast<int64_t>(phase), int64_t{space}, int64_t{node},
        int64_t{depth}, count, int64_t{dfa_state}, int64_t{num_others}, int64_t{placed},
        int64_t{missing}, int64_t{first}, int64_t{last}, int64_t{length}}) {
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
  frame.tail = grammar_.end_cost;
  return frame;
}

const ByteDfa& Matcher::DfaOf(const Frame& top) const { return *grammar_.dfas[ScalarOf(top).dfa]; }

std::vector<Frame> Matcher::StepAll(const std::vector<Frame>& tops, uint8_t byte,
                                    StackPool* pool) const {
  std::vector<Frame> out;
  for (const Frame& top : tops) Step(top, byte, pool, &out);
  return out;
}

void Matcher::Step(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const {
  if (pool->exhausted()) return;
  pool->step_frames = out->size() + kMaxStepFrames;
  pool->step_work = pool->work + kMaxStepWork;
  StepFrame(top, byte, pool, out);
}

void Matcher::StepFrame(const Frame& top, uint8_t byte, StackPool* pool,
                        std::vector<Frame>* out) const {
  ++pool->work;
  switch (top.kind) {
    case FrameKind::kStart: {
      Site root;
      root.tail = top.tail;
      return BeginValue(top.node, &root, byte, pool, out);
    }
    case FrameKind::kScalar:
      return StepScalar(top, byte, pool, out);
    case FrameKind::kArray:
      return StepArray(top, byte, pool, out);
    case FrameKind::kObject:
      return StepObject(top, byte, pool, out);
    case FrameKind::kRule:
      return StepRule(top, byte, pool, out);
    case FrameKind::kDone:
      return;
  }
}

void Matcher::Reduce(const StackPool& pool, std::vector<Frame>* tops, size_t most) const {
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
  if (kept <= most) return;
  std::vector<std::pair<int64_t, size_t>> order;
  for (size_t i = 0; i < kept; ++i) order.push_back({Distance((*tops)[i], pool), i});
  std::sort(order.begin(), order.end());
  order.resize(most);
  std::vector<Frame> shortest;
  for (const auto& [distance, i] : order) shortest.push_back((*tops)[i]);
  *tops = std::move(shortest);
}

Matcher::Site Matcher::SiteIn(const Frame& container) {
  Site site;
  site.after = &container;
  site.depth = container.depth;
  return site;
}

void Matcher::Link(Site* site, StackPool* pool, Frame* frame) const {
  if (site->after != nullptr) {
    site->tail = Distance(*site->after, *pool);
    site->parent = static_cast<int32_t>(pool->frames.size());
    site->below = site->after->Hash();
    pool->frames.push_back(*site->after);
    ++pool->work;
    site->after = nullptr;
  }
  frame->below = site->below;
  frame->depth = site->depth + 1;
  frame->parent = site->parent;
  frame->tail = site->tail;
}

void Matcher::BeginValue(NodeId id, Site* site, uint8_t byte, StackPool* pool,
                         std::vector<Frame>* out) const {
  const auto* choice = std::get_if<ChoiceNode>(&At(id).value);
  if (choice == nullptr) return BeginOption(id, site, byte, pool, out);
  pool->work += static_cast<int64_t>(choice->options.size() / 4);
  for (const NodeId option : choice->options) BeginOption(option, site, byte, pool, out);
}

void Matcher::BeginOption(NodeId id, Site* site, uint8_t byte, StackPool* pool,
                          std::vector<Frame>* out) const {
  const Node& node = At(id);
  if (!node.first[byte]) return;
  Frame frame;
  frame.node = id;
  if (const auto* scalar = std::get_if<ScalarNode>(&node.value)) {
    if (pool->markers_only && !scalar->marker) {
      if (scalar->trigger < 0) return;
      // A special token that begins free text begins its trigger.
      return BeginOption(grammar_.triggers[scalar->trigger].literal, site, byte, pool, out);
    }
    frame.kind = FrameKind::kScalar;
    frame.dfa_state = grammar_.dfas[scalar->dfa]->Next(ByteDfa::kStart, byte);
    Link(site, pool, &frame);
    return Emit(frame, *pool, out);
  }
  if (site->depth + node.height > grammar_.max_depth) return;
  if (std::holds_alternative<RuleNode>(node.value)) {
    frame.kind = FrameKind::kRule;
    Link(site, pool, &frame);
    return StepRule(frame, byte, pool, out);
  }
  if (pool->markers_only) return;
  frame.kind = FrameKind::kArray;
  if (const auto* object = std::get_if<ObjectNode>(&node.value)) {
    frame.kind = FrameKind::kObject;
    frame.missing = object->num_required;
    frame.missing_cost = object->required_cost;
  }
  Link(site, pool, &frame);
  Emit(frame, *pool, out);
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
  if (pool->markers_only && !scalar.marker) {
    goes_on = false;
    if (scalar.trigger >= 0) StepTrigger(top, byte, pool, out);
  }
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
    StepFrame(parent, byte, pool, out);
  }
}

bool Matcher::CanAddPart(const Frame& top, bool contained) const {
  const ArrayNode& array = ArrayOf(top);
  const NodeId item = contained ? array.contained : array.items;
  if (item == kNoNode || !Fits(item, top)) return false;
  if (contained && top.num_others >= array.max_contained) return false;
  // There must be room for the items that must still be contained.
  const int64_t missing =
      std::max<int64_t>(array.min_contained - top.num_others - (contained ? 1 : 0), 0);
  return top.count + 1 + missing <= array.max_items;
}

bool Matcher::CanAddItem(const Frame& top) const {
  const ArrayNode& array = ArrayOf(top);
  if (array.contained != kNoNode) return CanAddPart(top, true) || CanAddPart(top, false);
  if (!array.distinct.empty()) {
    return top.count < std::min(array.max_items, static_cast<int64_t>(array.distinct.size()));
  }
  const NodeId item = ArrayOf(top).ItemAt(top.count);
  return item != kNoNode && Fits(item, top);
}

void Matcher::BeginItem(const Frame& top, uint8_t byte, StackPool* pool,
                        std::vector<Frame>* out) const {
  const ArrayNode& array = ArrayOf(top);
  Frame frame = top;
  frame.phase = Phase::kAfterValue;
  frame.space = 0;
  ++frame.count;
  const auto begin = [&](NodeId item, const Frame& after) {
    Site site = SiteIn(after);
    BeginValue(item, &site, byte, pool, out);
  };
  if (array.contained != kNoNode) {
    if (CanAddPart(top, false)) begin(array.items, frame);
    if (!CanAddPart(top, true)) return;
    Frame after = frame;
    // Without a largest number, numbers above the smallest one need not be told apart.
    const bool counts = array.max_contained < kNoLimit || top.num_others < array.min_contained;
    if (counts) ++after.num_others;
    begin(array.contained, after);
  } else if (!array.distinct.empty()) {
    for (size_t i = 0; i < array.distinct.size(); ++i) {
      const uint64_t bit = uint64_t{1} << i;
      if (top.seen & bit) continue;
      Frame after = frame;
      after.seen |= bit;
      begin(array.distinct[i], after);
    }
  } else {
    begin(array.ItemAt(top.count), frame);
  }
}

void Matcher::StepArray(const Frame& top, uint8_t byte, StackPool* pool,
                        std::vector<Frame>* out) const {
  const ArrayNode& array = ArrayOf(top);
  if (pool->markers_only) return;
  const bool can_close = top.count >= array.min_items && top.num_others >= array.min_contained;
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
        BeginItem(top, byte, pool, out);
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
  const bool ends_text = top.parent < 0 && grammar_.end_cost == 0;
  int64_t rest = ends_text ? dfa.end_distance[top.dfa_state] : dfa.distance[top.dfa_state];
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

// Returns the cost of the mandatory items after `count` items, of which `contained` count as
// contained or, for ArrayNode::distinct, the nodes in `seen` have appeared; each with a comma
// before it.
int64_t Matcher::SpecialItemsCost(const ArrayNode& array, int64_t count, int64_t contained,
                                  uint64_t seen) const {
  int64_t left = std::max<int64_t>(array.min_items - count, 0);
  if (!array.distinct.empty()) {
    std::vector<int64_t> costs;
    for (size_t i = 0; i < array.distinct.size(); ++i) {
      if (!((seen >> i) & 1)) costs.push_back(At(array.distinct[i]).distance);
    }
    std::sort(costs.begin(), costs.end());
    int64_t cost = 0;
    for (int64_t i = 0; i < left && i < std::ssize(costs); ++i) cost += 1 + costs[i];
    return left > std::ssize(costs) ? kUnreachable : cost;
  }
  const int64_t missing = std::max<int64_t>(array.min_contained - contained, 0);
  left = std::max<int64_t>(left - missing, 0);
  const int64_t other = array.items == kNoNode ? kUnreachable : At(array.items).distance;
  const int64_t found = array.contained == kNoNode ? kUnreachable : At(array.contained).distance;
  int64_t cost = MultiplyDistance(missing, AddDistances(found, 1));
  if (found < other) {
    const int64_t further = std::clamp<int64_t>(
        array.max_contained - std::max(contained, array.min_contained), 0, left);
    cost = AddDistances(cost, MultiplyDistance(further, AddDistances(found, 1)));
    left -= further;
  }
  return AddDistances(cost, MultiplyDistance(left, AddDistances(other, 1)));
}

int64_t Matcher::SpecialArrayRest(const Frame& top) const {
  const ArrayNode& array = ArrayOf(top);
  const int64_t rest = SpecialItemsCost(array, top.count, top.num_others, top.seen) + 1;
  if (top.phase == Phase::kOpen) {
    const bool any = top.count < array.min_items || top.num_others < array.min_contained;
    return rest - (any ? 1 : 0);
  }
  if (top.phase == Phase::kAfterValue) return rest;
  if (top.phase != Phase::kExpectValue) return 1;
  int64_t best = kUnreachable;
  const auto add = [&](NodeId item, int64_t contained, uint64_t seen) {
    best = std::min(
        best, At(item).distance + 1 + SpecialItemsCost(array, top.count + 1, contained, seen));
  };
  if (array.contained != kNoNode) {
    if (CanAddPart(top, true)) add(array.contained, top.num_others + 1, 0);
    if (CanAddPart(top, false)) add(array.items, top.num_others, 0);
  } else {
    for (size_t i = 0; i < array.distinct.size(); ++i) {
      const uint64_t bit = uint64_t{1} << i;
      if (!(top.seen & bit)) add(array.distinct[i], 0, top.seen | bit);
    }
  }
  return best;
}

int64_t Matcher::ArrayRest(const Frame& top) const {
  const ArrayNode& array = ArrayOf(top);
  if (array.contained != kNoNode || !array.distinct.empty()) return SpecialArrayRest(top);
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

bool Matcher::InFreeText(const Frame& top, const StackPool& pool) const {
  if (top.kind == FrameKind::kScalar) return ScalarOf(top).free;
  if (top.kind == FrameKind::kStart) return At(top.node).begins_free;
  if (top.kind != FrameKind::kRule) return false;
  const RuleNode::State& state = RuleOf(top).states[top.dfa_state];
  const bool begins = std::any_of(state.edges.begin(), state.edges.end(),
                                  [&](const auto& edge) { return At(edge.node).begins_free; });
  return begins ||
         (state.accepting && top.parent >= 0 && InFreeText(pool.frames[top.parent], pool));
}

int64_t Matcher::Distance(const Frame& top, const StackPool& pool) const {
  if (InFreeText(top, pool)) return 0;
  int64_t rest = 0;
  switch (top.kind) {
    case FrameKind::kDone:
      return grammar_.end_cost;
    case FrameKind::kRule:
      rest = RuleOf(top).states[top.dfa_state].distance;
      break;
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
      break;
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

bool Matcher::Complete(const Frame& top, const StackPool& pool) const {
  switch (top.kind) {
    case FrameKind::kDone:
      return true;
    case FrameKind::kStart:
      // The text is empty.
      return At(top.node).distance == 0;
    case FrameKind::kScalar:
      if (!DfaOf(top).accepting[top.dfa_state]) return false;
      break;
    case FrameKind::kRule:
      if (!RuleOf(top).states[top.dfa_state].accepting) return false;
      break;
    default:
      return false;
  }
  return top.parent < 0 || Complete(pool.frames[top.parent], pool);
}

bool Matcher::CanContinue(const Frame& top, const StackPool& pool) const {
  switch (top.kind) {
    case FrameKind::kDone:
      return false;
    case FrameKind::kStart:
      return At(top.node).first.any();
    case FrameKind::kScalar:
      if (DfaOf(top).has_next[top.dfa_state]) return true;
      break;
    case FrameKind::kRule:
      if (!RuleOf(top).states[top.dfa_state].edges.empty()) return true;
      break;
    default:
      return true;
  }
  return top.parent >= 0 && CanContinue(pool.frames[top.parent], pool);
}

ByteSet Matcher::NextBytes(const Frame& top, const StackPool& pool) const {
  ByteSet out;
  if (top.kind == FrameKind::kDone) return out;
  if (top.kind != FrameKind::kRule) {
    // What may follow a value in an array or object.
    for (const char c : {',', ']', '}', '\n'}) out.set(static_cast<uint8_t>(c));
    return out;
  }
  const RuleNode::State& state = RuleOf(top).states[top.dfa_state];
  for (const RuleNode::Edge& edge : state.edges) out |= At(edge.node).first;
  if (state.accepting && top.parent >= 0) out |= NextBytes(pool.frames[top.parent], pool);
  return out;
}

}  // namespace moeserve::structured
