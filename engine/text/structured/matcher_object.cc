// Matches objects: the keys of named properties come in the order of their places
// (Property::order), each once.
#include <algorithm>
#include <string>
#include <vector>

#include "engine/text/structured/matcher.h"

namespace moeserve::structured {
namespace {

// Largest number of properties of one object that its node does not name; limits the memory of a
// state.
constexpr int32_t kMaxOthers = 4096;

constexpr uint64_t kNamed = uint64_t{1} << 63;

void AddSeen(uint64_t key, Frame* top, StackPool* pool) {
  pool->seen.push_back({key, top->seen_list});
  top->seen_list = static_cast<int32_t>(pool->seen.size() - 1);
  top->seen_hash = HashWith(top->seen_hash, key);
}

}  // namespace

class Matcher::SeenNames {
 public:
  SeenNames(const Frame& top, const StackPool& pool, size_t num_properties) : first_(top.seen) {
    if (num_properties <= 64) return;
    more_.resize((num_properties - 1) / 64);
    for (int32_t s = top.seen_list; s >= 0; s = pool.seen[s].previous) {
      const uint64_t key = pool.seen[s].key;
      if (key & kNamed) more_[(key & ~kNamed) / 64 - 1] |= uint64_t{1} << (key % 64);
    }
    pool.work += 2 + (top.count + static_cast<int64_t>(more_.size())) / 16;
  }
  bool Has(int32_t property) const {
    const uint64_t word = property < 64 ? first_ : more_[property / 64 - 1];
    return (word >> (property % 64)) & 1;
  }

 private:
  uint64_t first_;
  std::vector<uint64_t> more_;
};

// The fillers of an object: the cheapest optional properties that it still needs to reach
// min_properties.
struct Matcher::Fillers {
  int64_t cost = 0;              // cost of all fillers
  int64_t cost_of_one_less = 0;  // cost of all fillers but the most expensive one
  // The fillers that the node names are the unseen properties with a rank below `end`.
  int32_t end = 0;

  // Returns the cost of the fillers that are still needed after `property` was added. If `property`
  // is not a filler, it takes the place of the most expensive one.
  int64_t CostWith(const Property& property) const {
    const bool among = property.rank >= 0 && property.rank < end;
    if (!among) return cost_of_one_less;
    return cost < kUnreachable ? cost - property.cost : kUnreachable;
  }
};

bool Matcher::HasSeenOther(const Frame& top, const StackPool& pool, uint64_t key) const {
  for (int32_t s = top.seen_list; s >= 0; s = pool.seen[s].previous) {
    if (pool.seen[s].key == key) return true;
  }
  pool.work += top.count / 16;
  return false;
}

bool Matcher::HasRoom(const Frame& top) const {
  return top.count + top.missing < ObjectOf(top).max_properties;
}

bool Matcher::InOrder(const Frame& top, int32_t order) const {
  const std::vector<int32_t>& next = ObjectOf(top).next_required;
  const size_t place = std::min(static_cast<size_t>(top.placed), next.size() - 1);
  return order >= top.placed && order <= next[place];
}

Frame Matcher::Placed(const Frame& top, int32_t order) {
  Frame out = top;
  out.placed = order == kUnordered ? order : order + 1;
  return out;
}

bool Matcher::PropertyAllowed(const Frame& top, const SeenNames& seen, int32_t property) const {
  const Property& p = ObjectOf(top).properties[property];
  return p.value != kNoNode && InOrder(top, p.order) && (p.required || HasRoom(top)) &&
         Fits(p.value, top) && !seen.Has(property);
}

bool Matcher::OtherAllowed(const Frame& top, const StackPool& pool) const {
  if (!HasRoom(top) || top.num_others >= kMaxOthers || !InOrder(top, kUnordered)) return false;
  const KeySet* keys = KeysOf(top);
  if (keys == nullptr) {
    const NodeId additional = ObjectOf(top).additional;
    return additional != kNoNode && Fits(additional, top);
  }
  if (keys->min_value >= kUnreachable) return false;
  if (top.phase != Phase::kKey) {
    return FindFreeKey(BeginKey(top), pool).bytes < kUnreachable;
  }
  if (top.dfa_state == kDead) return false;
  if (keys->endless && top.depth + keys->height <= grammar_.max_depth) {
    return grammar_.dfas[keys->dfa]->distance[top.dfa_state] < kUnreachable;
  }
  return FindFreeKey(top, pool).bytes < kUnreachable;
}

Frame Matcher::NamedOnly(const Frame& top) {
  Frame out = top;
  out.num_others = kMaxOthers;
  return out;
}

// Returns the frame after the opening quote of a key.
Frame Matcher::BeginKey(const Frame& top) const {
  Frame frame = top;
  frame.phase = Phase::kKey;
  frame.space = 0;
  frame.decoder = StringDecoder();
  const KeySet* keys = KeysOf(top);
  const int32_t dfa = keys == nullptr ? grammar_.any_string : keys->dfa;
  frame.dfa_state = grammar_.dfas[dfa]->Next(ByteDfa::kStart, '"');
  frame.first = 0;
  frame.last = static_cast<int32_t>(ObjectOf(top).properties.size());
  frame.length = 0;
  frame.hash = kHashBasis;
  return frame;
}

Matcher::FreeKey Matcher::FindFreeKey(const Frame& key, const StackPool& pool) const {
  FreeKey found;
  // Each taken key may be met twice, because a character has two spellings.
  int64_t visits_left = 1000 + 64 * key.count;
  if (key.dfa_state != kDead) ExploreKey(key, pool, 0, &visits_left, &found);
  return found;
}

// Continues a key by the bytes that lead to its end soonest; if the key at that end is taken, goes
// on from there, or from where another byte is possible. The order depends only on the key so far,
// so that every step on the way to the key that is found leads to the same key.
bool Matcher::ExploreKey(const Frame& key, const StackPool& pool, int64_t bytes,
                         int64_t* visits_left, FreeKey* found) const {
  constexpr int64_t kLongestKey = 1024;
  if (pool.exhausted()) *visits_left = 0;
  if (--*visits_left < 0 || bytes > kLongestKey) return false;
  pool.work += 4;
  const KeySet& keys = *KeysOf(key);
  const ByteDfa& dfa = *grammar_.dfas[keys.dfa];
  if (key.decoder.at_boundary()) {
    const int32_t closed = dfa.Next(key.dfa_state, '"');
    const NodeId value = closed == kDead ? kNoNode : keys.value[closed];
    const auto& properties = ObjectOf(key).properties;
    const bool named = key.first < key.last &&
                       static_cast<int32_t>(properties[key.first].name.size()) == key.length;
    if (value != kNoNode && !named && Fits(value, key) && grammar_.spellable['"'] &&
        !HasSeenOther(key, pool, key.hash & ~kNamed)) {
      found->bytes = bytes + 1;
      found->value = value;
      return true;
    }
  }
  std::vector<std::pair<int64_t, uint8_t>> order;
  for (int b = 0; b < 256; ++b) {
    const uint8_t byte = static_cast<uint8_t>(b);
    if (byte == '"' && key.decoder.at_boundary()) continue;
    const int32_t next = dfa.Next(key.dfa_state, byte);
    if (next == kDead || !grammar_.spellable[byte] || dfa.distance[next] >= kUnreachable) continue;
    order.push_back({dfa.distance[next], byte});
  }
  std::sort(order.begin(), order.end());
  for (const auto& [distance, byte] : order) {
    Frame next = key;
    const StringDecoder::Result result = next.decoder.Push(byte);
    if (result == StringDecoder::Result::kError) continue;
    next.dfa_state = dfa.Next(key.dfa_state, byte);
    if (result == StringDecoder::Result::kCharacter) {
      ReadKeyCharacter(next.decoder.character(), key, &next);
    }
    if (ExploreKey(next, pool, bytes + 1, visits_left, found)) return true;
    if (*visits_left < 0) return false;
  }
  return false;
}

bool Matcher::AnyKeyAllowed(const Frame& top, const StackPool& pool) const {
  if (OtherAllowed(top, pool)) return true;
  const size_t n = ObjectOf(top).properties.size();
  const SeenNames seen(top, pool, n);
  int32_t i = 0;
  while (i < static_cast<int32_t>(n) && !PropertyAllowed(top, seen, i)) ++i;
  pool.work += i / 8;
  return i < static_cast<int32_t>(n);
}

// Returns whether the key read so far can be continued to the name of an allowed property. An
// incomplete character at its end must be able to become the name's next character.
bool Matcher::KeyCanEnd(const Frame& top, const StackPool& pool) const {
  if (OtherAllowed(top, pool)) return true;
  const ObjectNode& object = ObjectOf(top);
  const SeenNames seen(top, pool, object.properties.size());
  for (int32_t i = top.first; i < top.last; ++i) {
    if ((i - top.first) % 8 == 7) ++pool.work;
    if (!PropertyAllowed(top, seen, i)) continue;
    if (top.decoder.at_boundary()) return true;
    const std::u32string& name = object.properties[i].name;
    if (static_cast<int32_t>(name.size()) > top.length && top.decoder.CanBecome(name[top.length])) {
      return true;
    }
  }
  return false;
}

bool Matcher::CanCloseObject(const Frame& top) const {
  return top.missing == 0 && top.count >= ObjectOf(top).min_properties;
}

void Matcher::StepObject(const Frame& top, uint8_t byte, StackPool* pool,
                         std::vector<Frame>* out) const {
  if (pool->markers_only) return;
  const uint8_t close = ObjectOf(top).is_set ? ']' : '}';
  Frame frame = top;
  switch (top.phase) {
    case Phase::kOpen:
    case Phase::kExpectKey:
      if (byte == close) {
        if (top.phase == Phase::kOpen && CanCloseObject(top)) Pop(top, *pool, out);
      } else if (StepSpace(&frame, byte, /*line_end_allowed=*/true)) {
        out->push_back(frame);
      } else if (byte == '"' && AnyKeyAllowed(top, *pool)) {
        out->push_back(BeginKey(top));
      }
      return;
    case Phase::kKey:
      return StepKey(top, byte, pool, out);
    case Phase::kColon:
      if (byte == ':') {
        frame.phase = Phase::kExpectValue;
        out->push_back(frame);
      }
      return;
    case Phase::kExpectValue: {
      if (StepSpace(&frame, byte, /*line_end_allowed=*/false)) {
        out->push_back(frame);
        return;
      }
      frame.phase = Phase::kAfterValue;
      frame.space = 0;
      frame.pending = kNoNode;
      Site site = SiteIn(frame);
      return BeginValue(top.pending, &site, byte, pool, out);
    }
    case Phase::kAfterValue:
      if (byte == ',' && AnyKeyAllowed(top, *pool)) {
        frame.phase = Phase::kExpectKey;
        out->push_back(frame);
      } else if (byte == close && CanCloseObject(top)) {
        Pop(top, *pool, out);
      } else if (byte == '\n' && CanCloseObject(top)) {
        frame.phase = Phase::kClosing;
        frame.space = 2;
        out->push_back(frame);
      }
      return;
    case Phase::kClosing:
      if (byte == close) {
        Pop(top, *pool, out);
      } else if (StepSpace(&frame, byte, false)) {
        out->push_back(frame);
      }
      return;
  }
}

void Matcher::StepKey(const Frame& top, uint8_t byte, StackPool* pool,
                      std::vector<Frame>* out) const {
  Frame frame = top;
  if (byte == '"' && top.decoder.at_boundary()) {
    if (CloseKey(&frame, pool)) out->push_back(frame);
    return;
  }
  const StringDecoder::Result result = frame.decoder.Push(byte);
  if (result == StringDecoder::Result::kError) return;
  const KeySet* keys = KeysOf(top);
  const ByteDfa& dfa = *grammar_.dfas[keys == nullptr ? grammar_.any_string : keys->dfa];
  frame.dfa_state = top.dfa_state == kDead ? kDead : dfa.Next(top.dfa_state, byte);
  // A key that the automaton does not accept may be that of a named property.
  if (frame.dfa_state == kDead && keys == nullptr) return;
  if (result == StringDecoder::Result::kCharacter) {
    ReadKeyCharacter(frame.decoder.character(), top, &frame);
  }
  if (KeyCanEnd(frame, *pool)) out->push_back(frame);
}

// Narrows the range of names in `frame`, a copy of `top`, to those that go on with `c`.
void Matcher::ReadKeyCharacter(char32_t c, const Frame& top, Frame* frame) const {
  const auto& properties = ObjectOf(top).properties;
  const size_t at = static_cast<size_t>(top.length);
  // In the sorted names, a name that ends at `at` comes before longer names.
  const auto character = [&](const Property& p) {
    return p.name.size() > at ? static_cast<int64_t>(p.name[at]) : -1;
  };
  const auto begin = properties.begin() + top.first;
  const auto end = properties.begin() + top.last;
  const auto first = std::partition_point(
      begin, end, [&](const Property& p) { return character(p) < static_cast<int64_t>(c); });
  const auto last = std::partition_point(
      first, end, [&](const Property& p) { return character(p) == static_cast<int64_t>(c); });
  frame->first = static_cast<int32_t>(first - properties.begin());
  frame->last = static_cast<int32_t>(last - properties.begin());
  ++frame->length;
  frame->hash = HashWith(top.hash, c);
}

bool Matcher::CloseKey(Frame* top, StackPool* pool) const {
  const ObjectNode& object = ObjectOf(*top);
  const bool named = top->first < top->last &&
                     static_cast<int32_t>(object.properties[top->first].name.size()) == top->length;
  if (named) {
    const int32_t i = top->first;
    if (!PropertyAllowed(*top, SeenNames(*top, *pool, object.properties.size()), i)) return false;
    const Property& property = object.properties[i];
    if (i < 64) {
      top->seen |= uint64_t{1} << i;
    } else {
      AddSeen(kNamed | static_cast<uint64_t>(i), top, pool);
    }
    top->placed = Placed(*top, property.order).placed;
    if (property.required) {
      --top->missing;
      top->missing_cost -= property.cost;
    }
    top->pending = property.value;
  } else {
    const uint64_t key = top->hash & ~kNamed;
    if (!HasRoom(*top) || top->num_others >= kMaxOthers || !InOrder(*top, kUnordered)) return false;
    NodeId value = object.additional;
    if (const KeySet* keys = KeysOf(*top)) {
      const int32_t state = top->dfa_state;
      const int32_t closed = state == kDead ? kDead : grammar_.dfas[keys->dfa]->Next(state, '"');
      value = closed == kDead ? kNoNode : keys->value[closed];
    }
    if (value == kNoNode || !Fits(value, *top) || HasSeenOther(*top, *pool, key)) return false;
    AddSeen(key, top, pool);
    top->placed = kUnordered;
    ++top->num_others;
    top->pending = value;
  }
  ++top->count;
  top->phase = Phase::kColon;
  if (object.is_set) {
    top->phase = Phase::kAfterValue;
    top->pending = kNoNode;
  }
  // Resets the fields used inside a key, so that equal states compare equal.
  top->decoder = StringDecoder();
  top->dfa_state = 0;
  top->first = top->last = top->length = 0;
  top->hash = 0;
  return true;
}

// Returns how many properties min_properties demands in addition to the required ones.
int64_t Matcher::Needed(const Frame& top) const {
  return std::max<int64_t>(ObjectOf(top).min_properties - top.count - top.missing, 0);
}

// Returns the number of bytes of a property that the node does not name: an unused name in quotes,
// a colon, the shortest value and a comma.
int64_t Matcher::OtherCost(const Frame& top) const {
  const ObjectNode& object = ObjectOf(top);
  const int64_t taken =
      static_cast<int64_t>(object.properties.size()) + top.num_others + Needed(top);
  if (const KeySet* keys = KeysOf(top)) {
    return std::min(4 + keys->FreeKeyLength(*grammar_.dfas[keys->dfa], taken + 1) + keys->max_value,
                    kUnreachable);
  }
  return 4 + FreeNameLength(taken) + At(object.additional).distance;
}

Matcher::Fillers Matcher::FillersOf(const Frame& top, const SeenNames& seen, int64_t count) const {
  Fillers out;
  if (count <= 0) return out;
  const ObjectNode& object = ObjectOf(top);
  const KeySet* keys = KeysOf(top);
  const bool others = keys != nullptr
                          ? keys->min_value < kUnreachable
                          : object.additional != kNoNode && Fits(object.additional, top);
  const int64_t other_cost = others ? OtherCost(top) : kUnreachable;
  const int32_t n = static_cast<int32_t>(object.optional_by_cost.size());
  for (; out.end < n && count > 0; ++out.end) {
    const int32_t i = object.optional_by_cost[out.end];
    if (other_cost <= object.properties[i].cost) break;
    if (seen.Has(i) || object.properties[i].order < top.placed) continue;
    out.cost_of_one_less = out.cost;
    out.cost += object.properties[i].cost;
    --count;
  }
  if (count > 0) {
    out.cost_of_one_less = std::min(out.cost + (count - 1) * other_cost, kUnreachable);
    out.cost = std::min(out.cost + count * other_cost, kUnreachable);
  }
  return out;
}

int64_t Matcher::ObjectRest(const Frame& top, const StackPool& pool) const {
  const ObjectNode& object = ObjectOf(top);
  if (top.phase == Phase::kClosing) return 1;
  if (top.phase == Phase::kKey) return KeyRest(top, pool);
  const int64_t needed = Needed(top);
  const SeenNames seen(top, pool, object.properties.size());
  const Fillers fillers = FillersOf(top, seen, needed);
  pool.work += fillers.end / 8;
  const int64_t rest = top.missing_cost + fillers.cost + 1;
  switch (top.phase) {
    case Phase::kOpen:
      return rest - (top.missing + needed > 0 ? 1 : 0);
    case Phase::kExpectKey: {
      if (top.missing + needed > 0) return rest - 1;
      int64_t cheapest = kUnreachable;
      if (KeysOf(top) != nullptr && OtherAllowed(top, pool)) {
        const FreeKey key = FindFreeKey(BeginKey(top), pool);
        cheapest = key.bytes + 2 + At(key.value).distance;
      } else if (OtherAllowed(top, pool)) {
        cheapest = OtherCost(top) - 1;
      }
      for (const int32_t i : object.optional_by_cost) {
        if (!PropertyAllowed(top, seen, i)) continue;
        cheapest = std::min(cheapest, object.properties[i].cost - 1);
        break;
      }
      return rest + cheapest;
    }
    case Phase::kColon:
      return rest + 1 + At(top.pending).distance;
    case Phase::kExpectValue:
      return rest + At(top.pending).distance;
    default:
      return rest;
  }
}

int64_t Matcher::KeyRest(const Frame& top, const StackPool& pool) const {
  const ObjectNode& object = ObjectOf(top);
  const bool boundary = top.decoder.at_boundary();
  const int64_t needed = Needed(top);
  const SeenNames seen(top, pool, object.properties.size());
  pool.work += (top.last - top.first) / 8;
  // After properties without a place and other ones, the same fillers are left.
  const Fillers fillers = FillersOf(Placed(top, kUnordered), seen, needed);
  pool.work += fillers.end / 8;
  // Returns the cost of the fillers after the property.
  const auto fillers_after = [&](const Property& property) {
    if (needed == 0) return int64_t{0};
    if (property.order == kUnordered) {
      return property.required ? fillers.cost : fillers.CostWith(property);
    }
    const Frame after = Placed(top, property.order);
    const Fillers rest = FillersOf(after, seen, needed - (property.required ? 0 : 1));
    pool.work += 1 + rest.end / 8;
    return rest.cost;
  };
  int64_t best = kUnreachable;
  for (int32_t i = top.first; i < top.last; ++i) {
    if (!PropertyAllowed(top, seen, i)) continue;
    const Property& property = object.properties[i];
    const size_t read = static_cast<size_t>(top.length);
    int64_t key = 0;
    if (boundary) {
      key = property.suffix_bytes[read];
    } else {
      if (property.name.size() <= read || !top.decoder.CanBecome(property.name[read])) continue;
      const std::string ending = top.decoder.Ending(property.name[read]);
      const bool spellable = std::all_of(ending.begin(), ending.end(), [&](char c) {
        return grammar_.spellable[static_cast<uint8_t>(c)];
      });
      if (!spellable) continue;
      key = static_cast<int64_t>(ending.size()) + property.suffix_bytes[read + 1];
    }
    int64_t rest = top.missing_cost + 1;
    rest += fillers_after(property) - (property.required ? property.cost : 0);
    best = std::min(best, rest + key + 2 + At(property.value).distance);
  }
  if (KeysOf(top) != nullptr) {
    const bool room = HasRoom(top) && top.num_others < kMaxOthers && InOrder(top, kUnordered);
    const FreeKey key = room ? FindFreeKey(top, pool) : FreeKey();
    if (key.bytes < kUnreachable) {
      best = std::min(best, top.missing_cost + 1 + fillers.cost_of_one_less + key.bytes + 1 +
                                At(key.value).distance);
    }
  } else if (OtherAllowed(top, pool)) {
    const int64_t taken = static_cast<int64_t>(object.properties.size()) + top.num_others + needed;
    const int64_t more = FreeNameLength(taken);
    int64_t key = 0;
    if (boundary) {
      const bool named =
          top.first < top.last &&
          static_cast<int32_t>(object.properties[top.first].name.size()) == top.length;
      if (named || HasSeenOther(top, pool, top.hash & ~kNamed)) key = more;
    } else {
      // Assumes the worst case, in which completing the unfinished character yields a name in use.
      key = grammar_.dfas[grammar_.any_string]->distance[top.dfa_state] - 1 + more;
    }
    best = std::min(best, top.missing_cost + 1 + fillers.cost_of_one_less + key + 2 +
                              At(object.additional).distance);
  }
  return std::min(best, kUnreachable);
}

int32_t Matcher::FreeKeyDfa(const Frame& top, const StackPool& pool, int64_t* bound) const {
  if (top.kind != FrameKind::kObject || top.phase != Phase::kKey || !OtherAllowed(top, pool)) {
    return -1;
  }
  const KeySet* keys = KeysOf(top);
  if (keys != nullptr && (!keys->endless || top.depth + keys->height > grammar_.max_depth)) {
    return -1;
  }
  const ObjectNode& object = ObjectOf(top);
  const int64_t needed = Needed(top);
  const SeenNames seen(top, pool, object.properties.size());
  const Fillers fillers = FillersOf(Placed(top, kUnordered), seen, needed);
  pool.work += fillers.end / 8;
  const int64_t taken = static_cast<int64_t>(object.properties.size()) + top.num_others + needed;
  // The constant 2 stands for a colon and a bracket.
  *bound = top.tail + top.missing_cost + fillers.cost + 2;
  if (keys == nullptr) {
    *bound += FreeNameLength(taken) + At(object.additional).distance;
    return grammar_.any_string;
  }
  *bound += keys->FreeKeyLength(*grammar_.dfas[keys->dfa], taken) + keys->max_value;
  return keys->dfa;
}

}  // namespace moeserve::structured
