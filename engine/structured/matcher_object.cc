// Objects: keys in any order, each once.
#include <algorithm>

#include "engine/structured/matcher.h"

namespace moeserve::structured {
namespace {

// Of one object, named properties aside; bounds the memory of a state.
constexpr int32_t kMaxOthers = 4096;

constexpr uint64_t kHashBasis = 0xcbf29ce484222325;
constexpr uint64_t kHashPrime = 0x100000001b3;
constexpr uint64_t kNamed = uint64_t{1} << 63;

uint64_t HashWith(uint64_t hash, char32_t c) {
  hash = (hash ^ c) * kHashPrime;
  return hash ^ (hash >> 29);
}

}  // namespace

bool Matcher::HasSeen(const Frame& top, const StackPool& pool, int32_t property) const {
  if (property < 64) return (top.seen >> property) & 1;
  return HasSeenOther(top, pool, kNamed | static_cast<uint64_t>(property));
}

bool Matcher::HasSeenOther(const Frame& top, const StackPool& pool, uint64_t key) const {
  for (int32_t s = top.seen_list; s >= 0; s = pool.seen[s].previous) {
    if (pool.seen[s].key == key) return true;
  }
  return false;
}

bool Matcher::HasRoom(const Frame& top) const {
  return top.count + top.missing < ObjectOf(top).max_properties;
}

bool Matcher::PropertyAllowed(const Frame& top, const StackPool& pool, int32_t property) const {
  const Property& p = ObjectOf(top).properties[property];
  return p.value != kNoNode && (p.required || HasRoom(top)) && Fits(p.value, top) &&
         !HasSeen(top, pool, property);
}

bool Matcher::OtherAllowed(const Frame& top) const {
  const NodeId additional = ObjectOf(top).additional;
  return additional != kNoNode && HasRoom(top) && top.num_others < kMaxOthers &&
         Fits(additional, top);
}

bool Matcher::AnyKeyAllowed(const Frame& top, const StackPool& pool) const {
  if (OtherAllowed(top)) return true;
  const int32_t n = static_cast<int32_t>(ObjectOf(top).properties.size());
  for (int32_t i = 0; i < n; ++i) {
    if (PropertyAllowed(top, pool, i)) return true;
  }
  return false;
}

// Some allowed property's name begins with what has been read of the key.
bool Matcher::KeyCanEnd(const Frame& top, const StackPool& pool) const {
  if (OtherAllowed(top)) return true;
  const ObjectNode& object = ObjectOf(top);
  for (int32_t i = top.first; i < top.last; ++i) {
    if (!PropertyAllowed(top, pool, i)) continue;
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
  Frame frame = top;
  switch (top.phase) {
    case Phase::kOpen:
    case Phase::kExpectKey:
      if (byte == '}') {
        if (top.phase == Phase::kOpen && CanCloseObject(top)) Pop(top, *pool, out);
      } else if (StepSpace(&frame, byte, /*line_end_allowed=*/true)) {
        out->push_back(frame);
      } else if (byte == '"' && AnyKeyAllowed(top, *pool)) {
        frame.phase = Phase::kKey;
        frame.space = 0;
        frame.decoder = StringDecoder();
        frame.dfa_state = grammar_.dfas[grammar_.any_string]->Next(ByteDfa::kStart, '"');
        frame.first = 0;
        frame.last = static_cast<int32_t>(ObjectOf(top).properties.size());
        frame.length = 0;
        frame.hash = kHashBasis;
        out->push_back(frame);
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
    case Phase::kExpectValue:
      if (StepSpace(&frame, byte, /*line_end_allowed=*/false)) {
        out->push_back(frame);
        return;
      }
      frame.phase = Phase::kAfterValue;
      frame.space = 0;
      frame.pending = kNoNode;
      return BeginValue(top.pending, &frame, byte, pool, out);
    case Phase::kAfterValue:
      if (byte == ',' && AnyKeyAllowed(top, *pool)) {
        frame.phase = Phase::kExpectKey;
        out->push_back(frame);
      } else if (byte == '}' && CanCloseObject(top)) {
        Pop(top, *pool, out);
      } else if (byte == '\n' && CanCloseObject(top)) {
        frame.phase = Phase::kClosing;
        frame.space = 2;
        out->push_back(frame);
      }
      return;
    case Phase::kClosing:
      if (byte == '}') {
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
  frame.dfa_state = grammar_.dfas[grammar_.any_string]->Next(top.dfa_state, byte);
  if (result == StringDecoder::Result::kError || frame.dfa_state == kDead) return;
  if (result == StringDecoder::Result::kCharacter) {
    const char32_t c = frame.decoder.character();
    const auto& properties = ObjectOf(top).properties;
    const size_t at = static_cast<size_t>(top.length);
    // A name that ends here sorts before those that go on.
    const auto character = [&](const Property& p) {
      return p.name.size() > at ? static_cast<int64_t>(p.name[at]) : -1;
    };
    const auto begin = properties.begin() + top.first;
    const auto end = properties.begin() + top.last;
    const auto first = std::partition_point(
        begin, end, [&](const Property& p) { return character(p) < static_cast<int64_t>(c); });
    const auto last = std::partition_point(
        first, end, [&](const Property& p) { return character(p) == static_cast<int64_t>(c); });
    frame.first = static_cast<int32_t>(first - properties.begin());
    frame.last = static_cast<int32_t>(last - properties.begin());
    ++frame.length;
    frame.hash = HashWith(top.hash, c);
  }
  if (KeyCanEnd(frame, *pool)) out->push_back(frame);
}

bool Matcher::CloseKey(Frame* top, StackPool* pool) const {
  const ObjectNode& object = ObjectOf(*top);
  const bool named = top->first < top->last &&
                     static_cast<int32_t>(object.properties[top->first].name.size()) == top->length;
  if (named) {
    const int32_t i = top->first;
    if (!PropertyAllowed(*top, *pool, i)) return false;
    const Property& property = object.properties[i];
    if (i < 64) {
      top->seen |= uint64_t{1} << i;
    } else {
      pool->seen.push_back({kNamed | static_cast<uint64_t>(i), top->seen_list});
      top->seen_list = static_cast<int32_t>(pool->seen.size() - 1);
    }
    if (property.required) {
      --top->missing;
      top->missing_cost -= property.cost;
    }
    top->pending = property.value;
  } else {
    const uint64_t key = top->hash & ~kNamed;
    if (!OtherAllowed(*top) || HasSeenOther(*top, *pool, key)) return false;
    pool->seen.push_back({key, top->seen_list});
    top->seen_list = static_cast<int32_t>(pool->seen.size() - 1);
    ++top->num_others;
    top->pending = object.additional;
  }
  ++top->count;
  top->phase = Phase::kColon;
  // What is left of the key makes no difference from here on.
  top->decoder = StringDecoder();
  top->dfa_state = 0;
  top->first = top->last = top->length = 0;
  top->hash = 0;
  return true;
}

// Properties still needed for the smallest number, required ones aside.
int64_t Matcher::Needed(const Frame& top) const {
  return std::max<int64_t>(ObjectOf(top).min_properties - top.count - top.missing, 0);
}

// Of a property without a name of its own: a free name, the shortest value and a comma.
int64_t Matcher::OtherCost(const Frame& top) const {
  const ObjectNode& object = ObjectOf(top);
  const int64_t taken =
      static_cast<int64_t>(object.properties.size()) + top.num_others + Needed(top);
  return 4 + FreeNameLength(taken) + At(object.additional).distance;
}

int64_t Matcher::FillerCost(const Frame& top, const StackPool& pool, int64_t count,
                            int32_t except) const {
  if (count <= 0) return 0;
  const ObjectNode& object = ObjectOf(top);
  const bool others = object.additional != kNoNode && Fits(object.additional, top);
  const int64_t other_cost = others ? OtherCost(top) : kUnreachable;
  int64_t cost = 0;
  for (const int32_t i : object.optional_by_cost) {
    if (count == 0 || other_cost <= object.properties[i].cost) break;
    if (i == except || HasSeen(top, pool, i)) continue;
    cost += object.properties[i].cost;
    --count;
  }
  return count == 0 ? cost : std::min(cost + count * other_cost, kUnreachable);
}

int64_t Matcher::ObjectRest(const Frame& top, const StackPool& pool) const {
  const ObjectNode& object = ObjectOf(top);
  if (top.phase == Phase::kClosing) return 1;
  if (top.phase == Phase::kKey) return KeyRest(top, pool);
  const int64_t needed = Needed(top);
  const int64_t rest = top.missing_cost + FillerCost(top, pool, needed) + 1;
  switch (top.phase) {
    case Phase::kOpen:
      return rest - (top.missing + needed > 0 ? 1 : 0);
    case Phase::kExpectKey: {
      if (top.missing + needed > 0) return rest - 1;
      int64_t cheapest = kUnreachable;
      if (OtherAllowed(top)) cheapest = OtherCost(top) - 1;
      for (const int32_t i : object.optional_by_cost) {
        if (!PropertyAllowed(top, pool, i)) continue;
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
  // The bytes that end a character are known to be there only where all bytes are.
  if (!boundary && !grammar_.all_bytes_spellable) return kUnreachable;
  const int64_t needed = Needed(top);
  int64_t best = kUnreachable;
  for (int32_t i = top.first; i < top.last; ++i) {
    if (!PropertyAllowed(top, pool, i)) continue;
    const Property& property = object.properties[i];
    const size_t read = static_cast<size_t>(top.length);
    int64_t key = 0;
    if (boundary) {
      key = property.suffix_bytes[read];
    } else {
      if (property.name.size() <= read || !top.decoder.CanBecome(property.name[read])) continue;
      key = top.decoder.BytesLeft(property.name[read]) + property.suffix_bytes[read + 1];
    }
    int64_t rest = top.missing_cost + 1;
    if (property.required) {
      rest += FillerCost(top, pool, needed) - property.cost;
    } else {
      rest += FillerCost(top, pool, needed - 1, i);
    }
    best = std::min(best, rest + key + 2 + At(property.value).distance);
  }
  if (OtherAllowed(top)) {
    const int64_t taken = static_cast<int64_t>(object.properties.size()) + top.num_others + needed;
    const int64_t more = FreeNameLength(taken);
    int64_t key = 0;
    if (boundary) {
      const bool named =
          top.first < top.last &&
          static_cast<int32_t>(object.properties[top.first].name.size()) == top.length;
      if (named || HasSeenOther(top, pool, top.hash & ~kNamed)) key = more;
    } else {
      // As if the character that has been begun led to a name that is taken.
      key = grammar_.dfas[grammar_.any_string]->distance[top.dfa_state] - 1 + more;
    }
    best = std::min(best, top.missing_cost + 1 + FillerCost(top, pool, needed - 1) + key + 2 +
                              At(object.additional).distance);
  }
  return best;
}

bool Matcher::InFreeKey(const Frame& top, const StackPool& pool, int64_t* bound) const {
  if (top.kind != FrameKind::kObject || top.phase != Phase::kKey || !OtherAllowed(top))
    return false;
  constexpr int64_t kLongestKeyEnd =
      24;  // the rest of an escaped character, more characters, quote
  *bound = top.tail + top.missing_cost + FillerCost(top, pool, Needed(top)) + kLongestKeyEnd +
           At(ObjectOf(top).additional).distance;
  return true;
}

}  // namespace moeserve::structured
