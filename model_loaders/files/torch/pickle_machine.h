// The stack machine that reads a pickle (pickle.h). Private to the reader of pickles.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/torch/pickle.h"

namespace moeserve {

// Runs the instructions of one pickle. Each instruction is one member function, which returns false
// after Fail().
class PickleMachine {
 public:
  PickleMachine(std::string_view bytes, const PickleLimits& limits, PickleTree* tree)
      : bytes_(bytes), limits_(limits), tree_(*tree) {}

  // Runs all instructions. Leaves the last value as the root of the tree.
  absl::Status Run();

 private:
  struct Instruction {
    std::string_view name;
    bool (PickleMachine::*run)() = nullptr;
  };
  static std::array<Instruction, 256> MakeTable();

  bool Fail(std::string message) {
    error_ = std::move(message);
    return false;
  }

  // Input. A size is checked against the rest of the pickle before its bytes are used.
  bool Take(uint64_t count, std::string_view* out);
  bool TakeLine(std::string_view* out);
  template <int kBytes>
  bool TakeNumber(uint64_t* out);

  // The stack. The values above the last mark are accessible.
  size_t Bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  bool Push(PickleValue* value);
  bool Pop(PickleValue** out);
  bool Top(PickleValue** out);
  // Removes the last mark. The values that were above it are stack_[*first, ...).
  bool PopMark(size_t* first);

  // Values of the tree. New() returns null after Fail().
  PickleValue* New(PickleKind kind);
  bool PushNew(PickleKind kind, std::string_view text);
  // Pushes *shared, which is made at the first call.
  bool PushShared(PickleValue** shared, PickleKind kind, int64_t number);
  bool PushInt(int64_t number);
  bool AddItem(PickleValue* container, const PickleValue* item);
  bool AddPair(PickleValue* dict, const PickleValue* key, const PickleValue* value);
  bool Remember(uint64_t index);
  bool Recall(uint64_t index);

  // Containers. Items come from the top of the stack, for ...Marked and ...ToMark those above the
  // last mark, for Extend...(first) those from stack_[first] on.
  bool MakeTuple(size_t count);
  bool MakeMarked(PickleKind kind);
  // Returns the container that receives what a pickle adds to `target`: `target` itself if it has
  // `kind`, the contents of a call, or null after Fail().
  PickleValue* ContainerOf(PickleValue* target, PickleKind kind);
  bool Extend(PickleKind kind, size_t first);
  bool ExtendDict(size_t first);
  bool ExtendToMark(PickleKind kind);

  // Calls, which push a record or, for the containers of Python's library, the container.
  bool CheckCallable(const PickleValue& global);
  bool Call(const PickleValue* callee, const PickleValue* arguments, const PickleValue* keywords);
  bool CallOrderedDict(const PickleValue& arguments);
  bool CallSet(const PickleValue& arguments);

  // Instructions.
  bool Proto();
  bool Frame();
  bool Stop();
  bool Mark();
  bool PopOne();
  bool PopToMark();
  bool Duplicate();
  bool None() { return PushShared(&none_, PickleKind::kNone, 0); }
  bool True() { return PushShared(&true_, PickleKind::kBool, 1); }
  bool False() { return PushShared(&false_, PickleKind::kBool, 0); }
  bool PushDecimal(std::string_view line);
  bool DecimalInt();
  bool DecimalLong();
  template <int kBytes>
  bool Unsigned();
  bool SignedInt();
  template <int kCountBytes>
  bool BinaryLong();
  bool DecimalFloat();
  bool BinaryFloat();
  template <Result<std::string> (*kDecode)(std::string_view)>
  bool TextLine();
  template <PickleKind kKind, int kCountBytes>
  bool Counted();
  template <PickleKind kKind>
  bool Empty() {
    return PushNew(kKind, {});
  }
  template <int kCount>
  bool ShortTuple() {
    return MakeTuple(kCount);
  }
  template <PickleKind kKind>
  bool Marked() {
    return MakeMarked(kKind);
  }
  bool MarkedDict();
  bool Append();
  template <PickleKind kKind>
  bool Appends() {
    return ExtendToMark(kKind);
  }
  bool SetItem();
  bool SetItems();
  bool TakeIndexLine(uint32_t* index);
  bool PutLine();
  bool GetLine();
  template <int kBytes>
  bool Put();
  template <int kBytes>
  bool Get();
  bool Memoize() { return Remember(memo_.size()); }
  bool Global();
  bool StackGlobal();
  bool Reduce();
  bool NewObject();
  bool NewObjectWithKeywords();
  bool Instance();
  bool Object();
  bool Build();
  bool PersistentLine();
  bool Persistent();
  bool Extension();
  bool Buffer();

  const std::string_view bytes_;
  const PickleLimits limits_;
  PickleTree& tree_;
  size_t at_ = 0;  // offset of the next byte
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;
  std::vector<PickleValue*> memo_;
  // Immutable values that repeat often are shared.
  PickleValue* none_ = nullptr;
  PickleValue* true_ = nullptr;
  PickleValue* false_ = nullptr;
  std::array<PickleValue*, 256> small_ints_{};
  size_t references_ = 0;
  bool stopped_ = false;
  std::string error_;
};

}  // namespace moeserve
