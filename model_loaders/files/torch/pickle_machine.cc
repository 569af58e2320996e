#include "model_loaders/files/torch/pickle_machine.h"

#include <bit>
#include <charconv>
#include <cstring>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/files/torch/pickle_text.h"

namespace moeserve {

static_assert(std::endian::native == std::endian::little, "a pickle's integers are little-endian");

bool PickleMachine::Take(uint64_t count, std::string_view* out) {
  if (count > bytes_.size() - at_) {
    return Fail(Concat("expected ", count, " more bytes, found ", bytes_.size() - at_,
                       " to the end of the pickle"));
  }
  *out = bytes_.substr(at_, count);
  at_ += count;
  return true;
}

bool PickleMachine::TakeLine(std::string_view* out) {
  const size_t end = bytes_.find('\n', at_);
  if (end == std::string_view::npos) return Fail("expected a line, found no end of line");
  *out = bytes_.substr(at_, end - at_);
  at_ = end + 1;
  if (out->size() <= limits_.max_string) return true;
  return Fail(
      Concat("expected a line of at most ", limits_.max_string, " bytes, found ", out->size()));
}

template <int kBytes>
bool PickleMachine::TakeNumber(uint64_t* out) {
  std::string_view raw;
  if (!Take(kBytes, &raw)) return false;
  *out = 0;
  std::memcpy(out, raw.data(), kBytes);
  return true;
}

bool PickleMachine::Push(PickleValue* value) {
  if (stack_.size() >= limits_.max_stack) {
    return Fail(Concat("expected a stack of at most ", limits_.max_stack, " values, found more"));
  }
  stack_.push_back(value);
  return true;
}

bool PickleMachine::Top(PickleValue** out) {
  if (stack_.size() <= Bottom()) return Fail("expected a value on the stack, found none");
  *out = stack_.back();
  return true;
}

bool PickleMachine::Pop(PickleValue** out) {
  if (!Top(out)) return false;
  stack_.pop_back();
  return true;
}

bool PickleMachine::PopMark(size_t* first) {
  if (marks_.empty()) return Fail("expected a mark on the stack, found none");
  *first = marks_.back();
  marks_.pop_back();
  return true;
}

PickleValue* PickleMachine::New(PickleKind kind) {
  if (tree_.values_.size() >= limits_.max_values) {
    Fail(Concat("expected at most ", limits_.max_values, " values, found more"));
    return nullptr;
  }
  PickleValue& value = tree_.values_.emplace_back();
  value.kind = kind;
  return &value;
}

bool PickleMachine::PushNew(PickleKind kind, std::string_view text) {
  PickleValue* value = New(kind);
  if (value == nullptr) return false;
  value->text = text;
  return Push(value);
}

bool PickleMachine::PushInt(int64_t number) {
  if (number >= 0 && number < static_cast<int64_t>(small_ints_.size())) {
    return PushShared(&small_ints_[static_cast<size_t>(number)], PickleKind::kInt, number);
  }
  PickleValue* value = New(PickleKind::kInt);
  if (value == nullptr) return false;
  value->integer = number;
  return Push(value);
}

bool PickleMachine::Remember(uint64_t index) {
  PickleValue* value = nullptr;
  if (!Top(&value)) return false;
  if (index >= limits_.max_values) {
    return Fail(Concat("memo: expected an index below ", limits_.max_values, ", found ", index));
  }
  if (index >= memo_.size()) memo_.resize(index + 1);
  memo_[index] = value;
  return true;
}

bool PickleMachine::Recall(uint64_t index) {
  if (index >= memo_.size() || memo_[index] == nullptr) {
    return Fail(Concat("memo: expected an index that was stored before, found ", index));
  }
  return Push(memo_[index]);
}

bool PickleMachine::Proto() {
  constexpr uint64_t kHighest = 5;
  uint64_t version = 0;
  if (!TakeNumber<1>(&version)) return false;
  if (version <= kHighest) return true;
  return Fail(Concat("expected a protocol of at most ", kHighest, ", found ", version));
}

bool PickleMachine::Frame() {
  uint64_t size = 0;
  if (!TakeNumber<8>(&size)) return false;
  if (size <= bytes_.size() - at_) return true;
  return Fail(Concat("expected a frame of at most ", bytes_.size() - at_,
                     " bytes (the rest of the pickle), found ", size));
}

bool PickleMachine::Stop() {
  if (!marks_.empty() || stack_.size() != 1) {
    return Fail(Concat("expected one value on the stack, found ", stack_.size(), " and ",
                       marks_.size(), " marks"));
  }
  if (at_ != bytes_.size()) {
    return Fail(
        Concat("expected the end of the pickle, found ", bytes_.size() - at_, " more bytes"));
  }
  stopped_ = true;
  return true;
}

bool PickleMachine::Mark() {
  if (marks_.size() >= limits_.max_stack) {
    return Fail(Concat("expected at most ", limits_.max_stack, " marks, found more"));
  }
  marks_.push_back(stack_.size());
  return true;
}

bool PickleMachine::PopOne() {
  // As in Python, POP also removes a mark.
  if (!marks_.empty() && stack_.size() == marks_.back()) {
    marks_.pop_back();
    return true;
  }
  PickleValue* unused = nullptr;
  return Pop(&unused);
}

bool PickleMachine::PopToMark() {
  size_t first = 0;
  if (!PopMark(&first)) return false;
  stack_.resize(first);
  return true;
}

bool PickleMachine::Duplicate() {
  PickleValue* value = nullptr;
  return Top(&value) && Push(value);
}

bool PickleMachine::PushShared(PickleValue** shared, PickleKind kind, int64_t number) {
  if (*shared == nullptr) {
    *shared = New(kind);
    if (*shared == nullptr) return false;
    (*shared)->integer = number;
  }
  return Push(*shared);
}

bool PickleMachine::PushDecimal(std::string_view line) {
  int64_t number = 0;
  const char* const line_end = line.data() + line.size();
  const auto [end, error] = std::from_chars(line.data(), line_end, number);
  if (end == line_end && error == std::errc()) return PushInt(number);
  if (end == line_end && error == std::errc::result_out_of_range) {
    return PushNew(PickleKind::kBigInt, {});
  }
  return Fail(Concat("expected a decimal integer, found ", Quoted(line)));
}

bool PickleMachine::DecimalInt() {
  std::string_view line;
  if (!TakeLine(&line)) return false;
  if (line == "00") return False();
  if (line == "01") return True();
  return PushDecimal(line);
}

bool PickleMachine::DecimalLong() {
  std::string_view line;
  if (!TakeLine(&line)) return false;
  if (line.ends_with('L')) line.remove_suffix(1);
  return PushDecimal(line);
}

template <int kBytes>
bool PickleMachine::Unsigned() {
  uint64_t number = 0;
  return TakeNumber<kBytes>(&number) && PushInt(static_cast<int64_t>(number));
}

bool PickleMachine::SignedInt() {
  uint64_t number = 0;
  return TakeNumber<4>(&number) && PushInt(static_cast<int32_t>(number));
}

template <int kCountBytes>
bool PickleMachine::BinaryLong() {
  uint64_t count = 0;
  std::string_view raw;
  if (!TakeNumber<kCountBytes>(&count) || !Take(count, &raw)) return false;
  if (raw.size() > sizeof(int64_t)) return PushNew(PickleKind::kBigInt, {});
  // two's complement of any length
  int64_t number = !raw.empty() && static_cast<signed char>(raw.back()) < 0 ? -1 : 0;
  std::memcpy(&number, raw.data(), raw.size());
  return PushInt(number);
}

bool PickleMachine::DecimalFloat() {
  std::string_view line;
  if (!TakeLine(&line)) return false;
  double number = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
  if (end != line.data() + line.size() || error != std::errc()) {
    return Fail(Concat("expected a number, found ", Quoted(line)));
  }
  if (!PushNew(PickleKind::kFloat, {})) return false;
  stack_.back()->real = number;
  return true;
}

bool PickleMachine::BinaryFloat() {
  uint64_t bits = 0;
  if (!TakeNumber<8>(&bits) || !PushNew(PickleKind::kFloat, {})) return false;
  stack_.back()->real = std::bit_cast<double>(__builtin_bswap64(bits));  // big-endian
  return true;
}

template <Result<std::string> (*kDecode)(std::string_view)>
bool PickleMachine::TextLine() {
  std::string_view line;
  if (!TakeLine(&line)) return false;
  Result<std::string> text = kDecode(line);
  if (!text.ok()) return Fail(std::string(text.status().message()));
  return PushNew(PickleKind::kString, tree_.texts_.emplace_back(*std::move(text)));
}

template <PickleKind kKind, int kCountBytes>
bool PickleMachine::Counted() {
  uint64_t count = 0;
  std::string_view text;
  if (!TakeNumber<kCountBytes>(&count)) return false;
  if (count > limits_.max_string) {
    return Fail(Concat("expected ", Name(kKind), " of at most ", limits_.max_string,
                       " bytes, found ", count));
  }
  return Take(count, &text) && PushNew(kKind, text);
}

// Adds stack_[first, ...) to the container below them.
template <int kBytes>
bool PickleMachine::Put() {
  uint64_t index = 0;
  return TakeNumber<kBytes>(&index) && Remember(index);
}

template <int kBytes>
bool PickleMachine::Get() {
  uint64_t index = 0;
  return TakeNumber<kBytes>(&index) && Recall(index);
}

bool PickleMachine::TakeIndexLine(uint32_t* index) {
  std::string_view line;
  if (!TakeLine(&line)) return false;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), *index);
  if (end == line.data() + line.size() && error == std::errc()) return true;
  return Fail(Concat("memo: expected an index, found ", Quoted(line)));
}

bool PickleMachine::PutLine() {
  uint32_t index = 0;
  return TakeIndexLine(&index) && Remember(index);
}

bool PickleMachine::GetLine() {
  uint32_t index = 0;
  return TakeIndexLine(&index) && Recall(index);
}

std::array<PickleMachine::Instruction, 256> PickleMachine::MakeTable() {
  using M = PickleMachine;
  using K = PickleKind;
  std::array<Instruction, 256> table{};
  const auto set = [&](int code, std::string_view name, bool (M::*run)()) {
    table[static_cast<size_t>(code)] = {name, run};
  };
  set(0x80, "PROTO", &M::Proto);
  set(0x95, "FRAME", &M::Frame);
  set('.', "STOP", &M::Stop);
  set('(', "MARK", &M::Mark);
  set('0', "POP", &M::PopOne);
  set('1', "POP_MARK", &M::PopToMark);
  set('2', "DUP", &M::Duplicate);
  set('N', "NONE", &M::None);
  set(0x88, "NEWTRUE", &M::True);
  set(0x89, "NEWFALSE", &M::False);
  set('I', "INT", &M::DecimalInt);
  set('L', "LONG", &M::DecimalLong);
  set('J', "BININT", &M::SignedInt);
  set('K', "BININT1", &M::Unsigned<1>);
  set('M', "BININT2", &M::Unsigned<2>);
  set(0x8a, "LONG1", &M::BinaryLong<1>);
  set(0x8b, "LONG4", &M::BinaryLong<4>);
  set('F', "FLOAT", &M::DecimalFloat);
  set('G', "BINFLOAT", &M::BinaryFloat);
  set('S', "STRING", &M::TextLine<UnquotePickleString>);
  set('V', "UNICODE", &M::TextLine<UnescapePickleUnicode>);
  set('T', "BINSTRING", &M::Counted<K::kString, 4>);
  set('U', "SHORT_BINSTRING", &M::Counted<K::kString, 1>);
  set('X', "BINUNICODE", &M::Counted<K::kString, 4>);
  set(0x8c, "SHORT_BINUNICODE", &M::Counted<K::kString, 1>);
  set(0x8d, "BINUNICODE8", &M::Counted<K::kString, 8>);
  set('B', "BINBYTES", &M::Counted<K::kBytes, 4>);
  set('C', "SHORT_BINBYTES", &M::Counted<K::kBytes, 1>);
  set(0x8e, "BINBYTES8", &M::Counted<K::kBytes, 8>);
  set(0x96, "BYTEARRAY8", &M::Counted<K::kBytes, 8>);
  set(')', "EMPTY_TUPLE", &M::Empty<K::kTuple>);
  set(0x85, "TUPLE1", &M::ShortTuple<1>);
  set(0x86, "TUPLE2", &M::ShortTuple<2>);
  set(0x87, "TUPLE3", &M::ShortTuple<3>);
  set('t', "TUPLE", &M::Marked<K::kTuple>);
  set(']', "EMPTY_LIST", &M::Empty<K::kList>);
  set('l', "LIST", &M::Marked<K::kList>);
  set('a', "APPEND", &M::Append);
  set('e', "APPENDS", &M::Appends<K::kList>);
  set('}', "EMPTY_DICT", &M::Empty<K::kDict>);
  set('d', "DICT", &M::MarkedDict);
  set('s', "SETITEM", &M::SetItem);
  set('u', "SETITEMS", &M::SetItems);
  set(0x8f, "EMPTY_SET", &M::Empty<K::kSet>);
  set(0x90, "ADDITEMS", &M::Appends<K::kSet>);
  set(0x91, "FROZENSET", &M::Marked<K::kSet>);
  set('p', "PUT", &M::PutLine);
  set('q', "BINPUT", &M::Put<1>);
  set('r', "LONG_BINPUT", &M::Put<4>);
  set(0x94, "MEMOIZE", &M::Memoize);
  set('g', "GET", &M::GetLine);
  set('h', "BINGET", &M::Get<1>);
  set('j', "LONG_BINGET", &M::Get<4>);
  set('c', "GLOBAL", &M::Global);
  set(0x93, "STACK_GLOBAL", &M::StackGlobal);
  set('R', "REDUCE", &M::Reduce);
  set(0x81, "NEWOBJ", &M::NewObject);
  set(0x92, "NEWOBJ_EX", &M::NewObjectWithKeywords);
  set('i', "INST", &M::Instance);
  set('o', "OBJ", &M::Object);
  set('b', "BUILD", &M::Build);
  set('P', "PERSID", &M::PersistentLine);
  set('Q', "BINPERSID", &M::Persistent);
  set(0x82, "EXT1", &M::Extension);
  set(0x83, "EXT2", &M::Extension);
  set(0x84, "EXT4", &M::Extension);
  set(0x97, "NEXT_BUFFER", &M::Buffer);
  set(0x98, "READONLY_BUFFER", &M::Buffer);
  return table;
}

absl::Status PickleMachine::Run() {
  static const std::array<Instruction, 256> table = MakeTable();
  if (bytes_.size() > limits_.max_bytes) {
    return absl::InvalidArgumentError(Concat("expected a pickle of at most ", limits_.max_bytes,
                                             " bytes, found ", bytes_.size()));
  }
  while (!stopped_) {
    if (at_ == bytes_.size()) {
      return absl::InvalidArgumentError(
          Concat("byte ", at_, ": expected an instruction, found the end of the pickle"));
    }
    const size_t offset = at_;
    const auto code = static_cast<unsigned char>(bytes_[at_++]);
    const Instruction& instruction = table[code];
    if (instruction.run == nullptr) {
      return absl::InvalidArgumentError(
          Concat("byte ", offset, ": expected an instruction of the pickle format, found byte ",
                 int{code}));
    }
    if (!(this->*instruction.run)()) {
      return absl::InvalidArgumentError(
          Concat("byte ", offset, ": ", instruction.name, ": ", error_));
    }
  }
  tree_.root_ = stack_[0];
  return absl::OkStatus();
}

// Sets `height` of `root` and of all values below it. Visits states as values of their own.

}  // namespace moeserve
