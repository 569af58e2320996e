// A pushdown matcher: it advances a stack of frames by one byte of text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/text/structured/grammar.h"
#include "engine/text/structured/string_decoder.h"

namespace moeserve::structured {

inline constexpr uint64_t kHashBasis = 0xcbf29ce484222325;

// Extends the hash of a sequence by one value. The hash of the empty sequence is kHashBasis.
inline uint64_t HashWith(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

enum class FrameKind : uint8_t { kStart, kScalar, kArray, kObject, kRule, kDone };
enum class Phase : uint8_t {
  kOpen,         // after the opening bracket
  kExpectKey,    // after a comma in an object
  kKey,          // inside a key
  kColon,        // after a key
  kExpectValue,  // after a colon, or after a comma in an array
  kAfterValue,
  kClosing,  // inside white space before the closing bracket
};

// A value that has begun and its containers: `parent` links a value to its container, so that a
// frame is the top of a stack of frames. Plain data.
struct Frame {
  FrameKind kind = FrameKind::kStart;
  Phase phase = Phase::kOpen;
  uint8_t space = 0;  // preceding white space: 0 none, 1 a space, 2 + n a line end and n characters
  NodeId node = kNoNode;
  // Index into StackPool::frames of the container's frame, in the state in which it goes on after
  // this value; -1: no container.
  int32_t parent = -1;
  // Number of containers and rules around this value, itself included if it is one.
  int32_t depth = 0;
  int64_t tail = 0;    // Distance() from the end of this value to the end of the text
  int64_t count = 0;   // number of characters, items or properties so far
  uint64_t below = 0;  // hash of the frames below this one
  // kScalar: state of its automaton; kRule: index into RuleNode::states; in a key: state of
  // any_string.
  int32_t dfa_state = 0;

  // The following fields are used if `kind` is kObject; some are used by arrays, too.
  // Bit i is set if property i < 64, or node i of ArrayNode::distinct, has appeared.
  uint64_t seen = 0;
  int32_t seen_list = -1;  // index into StackPool::seen: all other keys that have appeared
  uint64_t seen_hash = 0;  // hash of that list
  // Number of properties so far that the node does not name; of an array: number of items so far
  // that count as contained.
  int32_t num_others = 0;
  int32_t placed = 0;   // properties with a smaller Property::order must not follow
  int32_t missing = 0;  // number of required properties that have not appeared
  // Sum of Property::cost of the missing required properties.
  int64_t missing_cost = 0;
  NodeId pending = kNoNode;  // node of the value that belongs to the last key read

  // The following fields are used inside a key. The names of properties [first, last) begin with
  // the `length` characters read.
  StringDecoder decoder;
  int32_t first = 0;
  int32_t last = 0;
  int32_t length = 0;
  uint64_t hash = 0;

  // Returns whether two frames are equal in everything except the indices into the pool.
  bool SameTop(const Frame& other) const;
  // Returns a hash of the fields that SameTop() compares.
  uint64_t Hash() const;
};

// The frames below the tops of the stacks. An element refers only to earlier elements and never
// changes. So several stacks can share elements, and CutTo() can undo what a walk has added.
struct StackPool {
  struct Seen {
    // The index of a named property, marked with the highest bit, or the hash of any other key.
    // Keys with equal hashes count as one key, so the second is rejected; every key with another
    // hash remains possible.
    uint64_t key;
    int32_t previous;
  };
  struct Mark {
    size_t frames;
    size_t seen;
  };

  std::vector<Frame> frames;
  std::vector<Seen> seen;
  // Work done so far by the matcher, in units of one step. Callers use it to limit the work.
  mutable int64_t work = 0;
  // Above this work no step yields a frame, so that every walk ends soon.
  int64_t work_limit = kNoLimit;
  bool exhausted() const { return work > work_limit; }
  // While a special token is matched, only nodes that allow special tokens as text may read bytes.
  bool markers_only = false;
  // In one step, rules add no frame beyond this number, and begin nothing after this work.
  size_t step_frames = 0;
  int64_t step_work = 0;

  Mark mark() const { return {frames.size(), seen.size()}; }
  void CutTo(Mark mark) {
    frames.resize(mark.frames);
    seen.resize(mark.seen);
  }
  // Returns whether the stacks below `a` and `b` are equal frame by frame, even if they do not
  // share storage.
  bool Equal(const Frame& a, const Frame& b) const;
  // Removes the elements that no frame in `tops` refers to.
  void Compact(std::vector<Frame>* tops);
};

// Immutable; any number of threads may use one object. The grammar must outlive it.
class Matcher {
 public:
  // Largest number of alternatives (ways to read the same text) that are kept. If there are more,
  // those with the largest Distance() are dropped. Dropping can only reject texts that match; it
  // never accepts a text that does not match.
  static constexpr size_t kMaxAlternatives = 256;
  // Largest number of frames that rules may add in one step. They are tried in order of the
  // distance of the way through them, so the shortest completion is always among them.
  static constexpr size_t kMaxStepFrames = 256;
  // Largest work of rules in one step, in the unit of StackPool::work.
  static constexpr int64_t kMaxStepWork = 1024;

  explicit Matcher(const Grammar* grammar) : grammar_(*grammar) {}

  Frame Start() const;
  // Appends to `out` every frame that can follow `top` after `byte`.
  void Step(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  // Returns every frame that can follow one of `tops` after `byte`.
  std::vector<Frame> StepAll(const std::vector<Frame>& tops, uint8_t byte, StackPool* pool) const;
  // Removes duplicates from `tops` and limits their number to `most`.
  void Reduce(const StackPool& pool, std::vector<Frame>* tops,
              size_t most = kMaxAlternatives) const;

  // Returns a number of bytes within which the text can be completed or cut off in free text; the
  // shortest completion may be shorter. An end-of-sequence token, if one is needed, counts as one
  // byte. kUnreachable if the vocabulary cannot spell any completion.
  int64_t Distance(const Frame& top, const StackPool& pool) const;
  bool Complete(const Frame& top, const StackPool& pool) const;
  // Whether no further token is needed: the text has ended, or it is in free text, where it may be
  // cut off.
  bool MayStop(const Frame& top, const StackPool& pool) const {
    return InFreeText(top, pool) || (Complete(top, pool) && !CanContinue(top, pool));
  }
  bool CanContinue(const Frame& top, const StackPool& pool) const;
  // Returns a set of bytes that contains all bytes which may follow `top`; `top` is a frame that
  // Pop() returned.
  ByteSet NextBytes(const Frame& top, const StackPool& pool) const;

  const ByteDfa& DfaOf(const Frame& top) const;
  const ScalarNode& ScalarOf(const Frame& top) const {
    return std::get<ScalarNode>(grammar_.nodes[top.node].value);
  }
  // Returns the index of the automaton that decides how the key of `top` may go on, as far as it is
  // no named property; -1 if `top` is not in a key, or other conditions decide. If it is not -1,
  // sets `*bound` to an upper bound on the distance from the end of the key to the end of the text,
  // whatever the key is.
  int32_t FreeKeyDfa(const Frame& top, const StackPool& pool, int64_t* bound) const;
  // Returns `top`, which is in a key, with no other than named properties allowed.
  static Frame NamedOnly(const Frame& top);
  // Appends to `scalars` a frame, in the start state of its automaton, for each scalar with which
  // the text can go on after `top`, whose kind is kStart or kRule. Adds to `others` the bytes with
  // which all other values can begin. Returns false if there are too many, or after
  // StackPool::step_work.
  bool Expand(const Frame& top, StackPool* pool, std::vector<Frame>* scalars,
              ByteSet* others) const;
  // Appends the frames that can follow the finished value `top`.
  void Pop(const Frame& top, const StackPool& pool, std::vector<Frame>* out) const;

  const Grammar& grammar() const { return grammar_; }

 private:
  const Node& At(NodeId id) const { return grammar_.nodes[id]; }
  const ArrayNode& ArrayOf(const Frame& f) const { return std::get<ArrayNode>(At(f.node).value); }
  const ObjectNode& ObjectOf(const Frame& f) const {
    return std::get<ObjectNode>(At(f.node).value);
  }
  const RuleNode& RuleOf(const Frame& f) const { return std::get<RuleNode>(At(f.node).value); }
  // Whether the text is in free text, or free text may begin now.
  bool InFreeText(const Frame& top, const StackPool& pool) const;
  bool Fits(NodeId id, const Frame& container) const {
    return container.depth + At(id).height <= grammar_.max_depth;
  }

  // The place at which a value begins.
  struct Site {
    // The container's frame, in the state in which it goes on after the value. It is added to the
    // pool, and `after` set to null, when the first value begins. Null: `parent` is valid.
    const Frame* after = nullptr;
    int32_t parent = -1;
    int64_t tail = 0;
    uint64_t below = 0;
    int32_t depth = 0;  // Frame::depth of the container
  };
  static Site SiteIn(const Frame& container);
  // Sets the fields of `frame`, with which a value begins at `site`, that link it to the stack.
  void Link(Site* site, StackPool* pool, Frame* frame) const;
  // Begins a value of node `id` with `byte`.
  void BeginValue(NodeId id, Site* site, uint8_t byte, StackPool* pool,
                  std::vector<Frame>* out) const;
  // Does what Step() does, as a part of a step.
  void StepFrame(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  void BeginOption(NodeId id, Site* site, uint8_t byte, StackPool* pool,
                   std::vector<Frame>* out) const;
  void Emit(const Frame& top, const StackPool& pool, std::vector<Frame>* out) const;
  void StepScalar(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  void StepArray(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  bool CanAddItem(const Frame& top) const;
  // Whether an item may be added that counts, or does not count, as contained.
  bool CanAddPart(const Frame& top, bool contained) const;
  void BeginItem(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  // Defined in matcher_rule.cc.
  void StepRule(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  bool ExpandNode(NodeId id, Site* site, StackPool* pool, std::vector<Frame>* scalars,
                  ByteSet* others) const;
  void StepTrigger(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  int64_t ScalarRest(const Frame& top) const;
  int64_t ArrayRest(const Frame& top) const;
  int64_t ItemsCost(const ArrayNode& array, int64_t from) const;
  int64_t SpecialItemsCost(const ArrayNode& array, int64_t count, int64_t contained,
                           uint64_t seen) const;
  int64_t SpecialArrayRest(const Frame& top) const;

  // The following functions are defined in matcher_object.cc.
  void StepObject(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  void StepKey(const Frame& top, uint8_t byte, StackPool* pool, std::vector<Frame>* out) const;
  bool CloseKey(Frame* top, StackPool* pool) const;
  // The named properties that an object has already; built once for several queries about one
  // frame.
  class SeenNames;
  struct Fillers;
  bool HasSeenOther(const Frame& top, const StackPool& pool, uint64_t key) const;
  bool HasRoom(const Frame& top) const;
  bool PropertyAllowed(const Frame& top, const SeenNames& seen, int32_t property) const;
  // Whether another property that the node does not name may be added, if `top` is before a key, or
  // whether the key read so far can be continued to the key of one.
  bool OtherAllowed(const Frame& top, const StackPool& pool) const;
  // The rest of a key that is not in use and that KeySet allows.
  struct FreeKey {
    int64_t bytes = kUnreachable;  // number of bytes, with the closing quote
    NodeId value = kNoNode;
  };
  FreeKey FindFreeKey(const Frame& key, const StackPool& pool) const;
  bool ExploreKey(const Frame& key, const StackPool& pool, int64_t bytes, int64_t* visits_left,
                  FreeKey* found) const;
  Frame BeginKey(const Frame& top) const;
  void ReadKeyCharacter(char32_t c, const Frame& top, Frame* frame) const;
  const KeySet* KeysOf(const Frame& top) const {
    const int32_t keys = ObjectOf(top).keys;
    return keys < 0 ? nullptr : &grammar_.key_sets[keys];
  }
  bool AnyKeyAllowed(const Frame& top, const StackPool& pool) const;
  bool KeyCanEnd(const Frame& top, const StackPool& pool) const;
  bool CanCloseObject(const Frame& top) const;
  int64_t Needed(const Frame& top) const;
  int64_t OtherCost(const Frame& top) const;
  // Whether no property with a place is missing that must come before one with place `order`.
  bool InOrder(const Frame& top, int32_t order) const;
  // Returns the frame after a property with place `order`, as far as it decides what may follow.
  static Frame Placed(const Frame& top, int32_t order);
  Fillers FillersOf(const Frame& top, const SeenNames& seen, int64_t count) const;
  int64_t ObjectRest(const Frame& top, const StackPool& pool) const;
  int64_t KeyRest(const Frame& top, const StackPool& pool) const;

  const Grammar& grammar_;
};

// Advances over white space between the parts of a container. Returns false if `byte` is not white
// space or exceeds the white space that is allowed at this point.
bool StepSpace(Frame* frame, uint8_t byte, bool line_end_allowed);

}  // namespace moeserve::structured
