// Reads Python's pickle format as data. A pickle is a program for a stack machine that may name any
// function and call it. This reader runs only the part that builds values: a call becomes a record
// of its callee and arguments, and nothing that a pickle names is ever looked up or executed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moeserve {

enum class PickleKind : uint8_t {
  kNone,
  kBool,
  kInt,
  kBigInt,  // an integer that does not fit int64_t; its value is not available
  kFloat,
  kString,
  kBytes,
  kTuple,
  kList,
  kDict,  // also a collections.OrderedDict, whose attributes are dropped
  kSet,   // also a frozenset
  kGlobal,
  kCall,
  kPersistentId,
};

// Returns a description with an article, such as "a list".
std::string_view Name(PickleKind kind);

// One value. Values are shared: the same value can be in several containers, or under two names.
struct PickleValue {
  PickleKind kind = PickleKind::kNone;
  uint16_t height = 0;  // levels of nesting below and including this value, without states
  int64_t integer = 0;  // kInt; kBool: 0 or 1
  double real = 0;      // kFloat
  // kString, kBytes: the bytes, as the pickle has them. A string is not checked to be UTF-8.
  std::string_view text;
  // kTuple, kList, kSet: the elements. kDict: key 0, value 0, key 1, ... in the pickle's order.
  // kGlobal: module and name. kCall: see below. kPersistentId: the id.
  std::vector<const PickleValue*> items;

  bool Is(PickleKind other) const { return kind == other; }
  // Returns whether this is the global module.name.
  bool IsGlobal(std::string_view module, std::string_view name) const;
  // Returns whether this is a call of the global module.name.
  bool IsCallOf(std::string_view module, std::string_view name) const;
  // Returns the value of a string key, or null if there is none or this is no kDict. Searches
  // linearly.
  const PickleValue* Get(std::string_view key) const;

  // kGlobal.
  std::string_view module() const { return items[0]->text; }
  std::string_view name() const { return items[1]->text; }
  std::string FullName() const;  // "module.name", printable

  // kCall: callee(*arguments, **keywords). Afterwards the object received `contents` (elements of a
  // kList or a kSet, or pairs of a kDict) and `state`. For an object without a constructor call,
  // such as argparse.Namespace, `state` is a kDict of its attributes. All but the first two may be
  // null.
  enum CallItem { kCallee, kArguments, kKeywords, kContents, kState, kCallItems };
  const PickleValue& callee() const { return *items[kCallee]; }        // kGlobal
  const PickleValue& arguments() const { return *items[kArguments]; }  // kTuple
  const PickleValue* keywords() const { return items[kKeywords]; }     // kDict
  const PickleValue* contents() const { return items[kContents]; }
  const PickleValue* state() const { return items[kState]; }
};

struct PickleLimits {
  size_t max_bytes = size_t{256} << 20;
  size_t max_values = size_t{8} << 20;
  size_t max_references = size_t{32} << 20;  // places in containers; values can be in several
  size_t max_stack = size_t{1} << 20;
  size_t max_string = size_t{64} << 20;  // bytes
  uint16_t max_depth = 200;              // of nested containers
};

// The values of one pickle.
class PickleTree {
 public:
  // Reads exactly one pickle of protocol 0 to 5. `bytes` must outlive the tree, which refers to
  // its strings.
  //
  // InvalidArgument, with the offset of the instruction, for a damaged pickle, one beyond a limit,
  // a string key that occurs twice in a dict, a container that contains itself, and a call that
  // MayCall() (pickle_calls.h) refuses. A walk over items may recurse, because containers are at
  // most max_depth levels deep and form no cycle. Only an object's state may lead back to the
  // object: a walk that follows states must limit its depth itself.
  //
  // Takes memory in proportion to `bytes`, at most 2 GiB.
  static Result<PickleTree> Parse(std::string_view bytes, const PickleLimits& limits = {});

  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleMachine;
  PickleTree() = default;

  // Checks the finished values and sets their heights.
  absl::Status Check(uint16_t max_depth);
  // Sets `height` of `root` and of all values below it. A state is not below its object.
  static absl::Status Measure(PickleValue* root, uint16_t max_depth);

  // A deque does not move its elements.
  std::deque<PickleValue> values_;
  std::deque<std::string> texts_;  // strings that differ from the pickle's bytes
  const PickleValue* root_ = nullptr;
};

// Describes a value for error messages, with its text or number if it has one.
std::string ShowPickle(const PickleValue& value);

}  // namespace moeserve
