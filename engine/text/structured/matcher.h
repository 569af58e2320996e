// The pushdown matcher: advances a stack of frames by one byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/text/structured/grammar.h"
#include "engine/text/structured/string_decoder.h"

namespace moeserve::structured {

inline constexpr uint64_t kHashBasis = 0xcbf29ce484222325;

// Extends the hash of a sequence, which starts as kHashBasis, by one value.
inline uint64_t HashWith(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

enum class FrameKind : uint8_t { kStart, kScalar, kArray, kObject, kDone };
enum class Phase : uint8_t {
  kOpen,         // after the opening bracket
  kExpectKey,    // after a comma in an object
  kKey,          // inside a key
  kColon,        // after a key
  kExpectValue,  // after a colon, or after a comma in an array
  kAfterValue,
  kClosing,  // white space before the closing bracket has begun
};

// One value that has begun. Plain data.
struct Frame {
  FrameKind kind = FrameKind::kStart;
  Phase phase = Phase::kOpen;
  uint8_t space = 0;  // preceding white space: 0 none, 1 a space, 2 + n a line end and n characters
  NodeId node = kNoNode;
  int32_t parent = -1;    // into StackPool::frames: the container's frame after this value
  int32_t depth = 0;      // containers around and including this value
  int64_t tail = 0;       // distance from the end of this value to the end of the text
  int64_t count = 0;      // characters, items or properties so far
  uint64_t below = 0;     // hash of the frames below
  int32_t dfa_state = 0;  // kScalar; in a key, of any_string

  // kObject
  uint64_t seen = 0;       // the first 64 properties
  int32_t seen_list = -1;  // into StackPool::seen: the other properties
  uint64_t seen_hash = 0;  // of that list
  int32_t num_others = 0;  // properties that the node does not name
  int32_t missing = 0;     // required properties not seen
  int64_t missing_cost = 0;
  NodeId pending = kNoNode;  // the value that follows the key

  // In a key: properties [first, last) begin with the `length` characters read.
  StringDecoder decoder;
  int32_t first = 0;
  int32_t last = 0;
  int32_t length = 0;
  uint64_t hash = 0;

  // Compares everything except the indices into the pool.
  bool SameTop(const Frame& other) const;
  // A hash of what SameTop() compares.
  uint64_t Hash() const;
};

// The frames below the tops of the stacks. An element refers only to earlier ones and never
// changes, so several stacks share elements, and CutTo() undoes the additions of a walk.
struct StackPool {
  struct Seen {
    // The marked index of a named property, or the hash of another key. Keys of equal hash count as
    // the same key, so the second is refused; other keys remain possible.
    uint64_t key;
    int32_t previous;
  };
  struct Mark {
    size_t frames;
    size_t seen;
  };

  std::vector<Frame> frames;
  std::vector<Seen> seen;
  // Work of the matcher, in units of one step, for callers that limit it.
  mutable int64_t work = 0;

  Mark mark() const { return {frames.size(), seen.size()}; }
  void CutTo(Mark mark) {
    frames.resize(mark.frames);
    seen.resize(mark.seen);
  }
  // Whether the stacks are equal, in the same elements or in others.
  bool Equal(const Frame& a, const Frame& b) const;
  // Removes the elements that no frame of `tops` refers to.
  void Compact(std::vector<Frame>* tops);
};

// Immutable: any number of threads may use one object. The grammar must outlive it.
class Matcher {
 public:
  // Most ways to read the same text that are kept; those that take longest to complete are dropped.
  // The remaining ones are correct, so dropping can only refuse a text.
  static constexpr size_t kMaxAlternatives = 256;

  explicit Matcher(const Grammar* grammar) : grammar_(*grammar) {}

  Frame Start() const;
  // Appends to `out` every way in which `top` can continue with `byte`.
  void Step(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  // Removes equal ways and applies kMaxAlternatives.
  void Reduce(const StackPool& pool, std::vector<Frame>* tops) const;

  // An upper bound, always attainable, of the bytes (and end-of-sequence token) that complete the
  // text. kUnreachable if the vocabulary cannot spell the rest.
  int64_t Distance(const Frame& top, const StackPool& pool) const;
  bool Complete(const Frame& top) const;
  bool CanContinue(const Frame& top) const;

  const ByteDfa& DfaOf(const Frame& top) const;
  const ScalarNode& ScalarOf(const Frame& top) const {
    return std::get<ScalarNode>(grammar_.nodes[top.node].value);
  }
  // Whether `top` is in a key that any characters may continue. If so, sets `*bound` to an upper
  // bound of the distance from the end of the key, whatever the key becomes.
  bool InFreeKey(const Frame& top, const StackPool& pool, int64_t* bound) const;
  // Appends the frames that can follow the finished value `top`.
  void Pop(const Frame& top, const StackPool& pool, std::vector<Frame>* out) const;

  const Grammar& grammar() const { return grammar_; }

 private:
  const Node& At(NodeId id) const { return grammar_.nodes[id]; }
  const ArrayNode& ArrayOf(const Frame& f) const { return std::get<ArrayNode>(At(f.node).value); }
  const ObjectNode& ObjectOf(const Frame& f) const {
    return std::get<ObjectNode>(At(f.node).value);
  }
  bool Fits(NodeId id, const Frame& container) const {
    return container.depth + At(id).height <= kMaxDepth;
  }

  // Begins a value of node `id` with `byte`. `parent` (null at the root) continues after it.
  void BeginValue(NodeId id, const Frame* parent, uint8_t byte, StackPool* pool,
                  std::vector<Frame>* out) const;
  void Emit(const Frame& top, const StackPool& pool, std::vector<Frame>* out) const;
  void StepScalar(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  void StepArray(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  bool CanAddItem(const Frame& top) const;
  int64_t ScalarRest(const Frame& top) const;
  int64_t ArrayRest(const Frame& top) const;
  int64_t ItemsCost(const ArrayNode& array, int64_t from) const;

  // matcher_object.cc
  void StepObject(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  void StepKey(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  bool CloseKey(Frame* top, StackPool* pool) const;
  // The named properties that an object has already; built once for several queries of a frame.
  class SeenNames;
  struct Fillers;
  bool HasSeenOther(const Frame& top, const StackPool& pool, uint64_t key) const;
  bool HasRoom(const Frame& top) const;
  bool PropertyAllowed(const Frame& top, const SeenNames& seen, int32_t property) const;
  bool OtherAllowed(const Frame& top) const;
  bool AnyKeyAllowed(const Frame& top, const StackPool& pool) const;
  bool KeyCanEnd(const Frame& top, const StackPool& pool) const;
  bool CanCloseObject(const Frame& top) const;
  int64_t Needed(const Frame& top) const;
  int64_t OtherCost(const Frame& top) const;
  Fillers FillersOf(const Frame& top, const SeenNames& seen, int64_t count) const;
  int64_t ObjectRest(const Frame& top, const StackPool& pool) const;
  int64_t KeyRest(const Frame& top, const StackPool& pool) const;

  const Grammar& grammar_;
};

// Advances over white space between the parts of a container. False if `byte` is no white space, or
// more than is allowed there.
bool StepSpace(Frame* frame, uint8_t byte, bool line_end_allowed);

}  // namespace moeserve::structured
