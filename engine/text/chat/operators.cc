#include "engine/text/chat/operators.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/text/chat/format.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

[[noreturn]] void Unsupported(std::string_view op, const Value& a, const Value& b) {
  if (a.IsUndefined()) Fail(a.undefined().what + " is undefined");
  if (b.IsUndefined()) Fail(b.undefined().what + " is undefined");
  Fail("unsupported operands of " + std::string(op) + ": " + std::string(a.TypeName()) + " and " +
       std::string(b.TypeName()));
}

[[noreturn]] void TooLarge() { Fail("the result is beyond 64 bits"); }

int64_t FloorDivide(int64_t a, int64_t b) {
  if (b == 0) Fail("division by zero");
  if (a == std::numeric_limits<int64_t>::min() && b == -1) TooLarge();
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

int64_t FloorModulo(int64_t a, int64_t b) {
  if (b == 0) Fail("division by zero");
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

double FloatModulo(double a, double b) {
  if (b == 0.0) Fail("division by zero");
  double rest = std::fmod(a, b);
  if (rest != 0.0 && (rest < 0.0) != (b < 0.0)) rest += b;
  return rest;
}

Value IntPower(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) Fail("division by zero");
    return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  }
  if (base == 0 || base == 1) return exponent == 0 ? int64_t{1} : base;
  if (base == -1) return exponent % 2 == 0 ? int64_t{1} : int64_t{-1};
  int64_t result = 1;
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(result, base, &result)) TooLarge();
  }
  return result;
}

Value IntBinary(BinaryOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case BinaryOp::kAdd:
      if (__builtin_add_overflow(a, b, &result)) TooLarge();
      return result;
    case BinaryOp::kSubtract:
      if (__builtin_sub_overflow(a, b, &result)) TooLarge();
      return result;
    case BinaryOp::kMultiply:
      if (__builtin_mul_overflow(a, b, &result)) TooLarge();
      return result;
    case BinaryOp::kDivide:
      if (b == 0) Fail("division by zero");
      return static_cast<double>(a) / static_cast<double>(b);
    case BinaryOp::kFloorDivide:
      return FloorDivide(a, b);
    case BinaryOp::kModulo:
      return FloorModulo(a, b);
    case BinaryOp::kPower:
      return IntPower(a, b);
  }
  return result;
}

Value FloatBinary(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSubtract:
      return a - b;
    case BinaryOp::kMultiply:
      return a * b;
    case BinaryOp::kDivide:
      if (b == 0.0) Fail("division by zero");
      return a / b;
    case BinaryOp::kFloorDivide:
      if (b == 0.0) Fail("division by zero");
      return std::floor(a / b);
    case BinaryOp::kModulo:
      return FloatModulo(a, b);
    case BinaryOp::kPower: {
      if (a == 0.0 && b < 0.0) Fail("division by zero");
      if (a < 0.0 && std::floor(b) != b) Fail("the result is a complex number");
      const double result = std::pow(a, b);
      if (std::isinf(result) && !std::isinf(a) && !std::isinf(b)) Fail("the result is too large");
      return result;
    }
  }
  return a;
}

constexpr std::string_view kOpNames[] = {"+", "-", "*", "/", "//", "%", "**"};

Value Repeat(const Value& sequence, int64_t count, Budget& budget) {
  const size_t times = count < 0 ? 0 : static_cast<size_t>(count);
  const size_t size = sequence.IsText() ? sequence.text().size() : sequence.list().items.size();
  // Checks an upper bound first, so that the product below cannot overflow.
  if (size > 0 && times > budget.limits().max_bytes / size) {
    Fail("the template needs too much memory");
  }
  if (sequence.IsText()) {
    const size_t spans = sequence.text().spans().size();
    if (spans > 0 && times > budget.limits().max_bytes / (spans * sizeof(TextSpan))) {
      Fail("the template needs too much memory");
    }
    budget.Bytes((size + spans * sizeof(TextSpan)) * times);
    budget.Step(size == 0 ? 0 : static_cast<int64_t>(times + (size + 16 * spans) * times / 64));
    Text out;
    if (size > 0) {
      for (size_t i = 0; i < times; ++i) out.Append(sequence.text());
    }
    return out;
  }
  budget.Elements(size * times);
  List out;
  out.is_tuple = sequence.list().is_tuple;
  out.depth = sequence.list().depth;
  for (size_t i = 0; size > 0 && i < times; ++i) {
    out.items.insert(out.items.end(), sequence.list().items.begin(), sequence.list().items.end());
  }
  return out;
}

// The bounds of a slice, with the values that Python's slice.indices() returns.
struct Indices {
  int64_t begin, end, step;
};

Indices SliceIndices(const Value& begin, const Value& end, const Value& step, int64_t size) {
  const auto get = [](const Value& v) {
    if (!v.IsInt() && !v.IsBool()) Fail("slice indices must be integers or None");
    return v.integer();
  };
  Indices out;
  out.step = step.IsNone() ? 1 : get(step);
  if (out.step == 0) Fail("slice step cannot be zero");
  out.step = std::clamp<int64_t>(out.step, -(int64_t{1} << 40), int64_t{1} << 40);
  const bool down = out.step < 0;
  const int64_t low = down ? -1 : 0;
  const int64_t high = down ? size - 1 : size;
  const auto bound = [&](const Value& v, int64_t absent) {
    if (v.IsNone()) return absent;
    int64_t i = get(v);
    if (i < 0) i = i < -size ? low : std::max(i + size, low);
    return std::min(i, high);
  };
  out.begin = bound(begin, down ? high : low);
  out.end = bound(end, down ? low : high);
  return out;
}

}  // namespace

bool IsSequence(const Value& value) {
  return value.IsText() || (value.IsList() && !value.list().is_iterator);
}

bool Truthy(const Value& value) {
  if (value.IsUndefined() || value.IsNone()) return false;
  if (value.IsFloat()) return value.number() != 0.0;
  if (value.IsNumber()) return value.integer() != 0;
  if (value.IsText()) return !value.text().empty();
  if (value.IsList()) return value.list().is_iterator || !value.list().items.empty();
  if (value.IsDict()) return !value.dict().items.empty();
  return true;
}

bool SimpleEqual(const Value& a, const Value& b) {
  if (a.IsText()) return b.IsText() && a.text().bytes() == b.text().bytes();
  if (a.IsNumber()) {
    if (!b.IsNumber()) return false;
    if (a.IsFloat() || b.IsFloat()) return a.number() == b.number();
    return a.integer() == b.integer();
  }
  if (a.IsNone()) return b.IsNone();
  if (a.IsUndefined()) return b.IsUndefined();
  return a.SameObject(b);
}

bool Equal(const Value& a, const Value& b, Budget& budget) {
  budget.Step();
  if (a.IsList()) {
    if (!b.IsList() || a.list().is_tuple != b.list().is_tuple) return false;
    if (a.list().items.size() != b.list().items.size()) return false;
    for (size_t i = 0; i < a.list().items.size(); ++i) {
      if (!Equal(a.list().items[i], b.list().items[i], budget)) return false;
    }
    return true;
  }
  if (a.IsDict()) {
    if (!b.IsDict() || a.dict().items.size() != b.dict().items.size()) return false;
    for (const auto& [key, value] : a.dict().items) {
      const Value* other = b.dict().Find(key, budget);
      if (other == nullptr || !Equal(value, *other, budget)) return false;
    }
    return true;
  }
  if (a.IsText() && b.IsText() && a.text().size() == b.text().size()) budget.Read(a.text().size());
  return SimpleEqual(a, b);
}

bool Less(const Value& a, const Value& b, Budget& budget) {
  budget.Step();
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsFloat() || b.IsFloat()) return a.number() < b.number();
    return a.integer() < b.integer();
  }
  if (a.IsText() && b.IsText()) {
    budget.Read(std::min(a.text().size(), b.text().size()));
    return a.text().bytes() < b.text().bytes();  // UTF-8 bytes sort in the order of code points
  }
  if (a.IsList() && b.IsList() && a.list().is_tuple == b.list().is_tuple) {
    const auto& x = a.list().items;
    const auto& y = b.list().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!Equal(x[i], y[i], budget)) return Less(x[i], y[i], budget);
    }
    return x.size() < y.size();
  }
  Unsupported("<", a, b);
}

size_t FindBytes(std::string_view text, std::string_view needle, size_t from, Budget& budget) {
  // Searches in windows, each of which is charged before it is searched. Windows overlap, so that
  // no occurrence is missed between two of them.
  const size_t stride = std::max<size_t>(4096, needle.size());
  for (; from <= text.size(); from += stride) {
    const size_t size = std::min(text.size() - from, stride + needle.size());
    budget.Step(static_cast<int64_t>((std::min(size, stride) + needle.size()) / 16));
    const void* const found = memmem(text.data() + from, size, needle.data(), needle.size());
    if (found != nullptr) {
      return static_cast<size_t>(static_cast<const char*>(found) - text.data());
    }
  }
  return std::string::npos;
}

size_t FindLastBytes(std::string_view text, std::string_view needle, Budget& budget) {
  budget.Bytes(text.size() + needle.size());
  budget.Step(static_cast<int64_t>((text.size() + needle.size()) / 16));
  const std::string reversed_text(text.rbegin(), text.rend());
  const std::string reversed_needle(needle.rbegin(), needle.rend());
  const size_t at = FindBytes(reversed_text, reversed_needle, 0, budget);
  return at == std::string::npos ? at : text.size() - at - needle.size();
}

bool Contains(const Value& container, const Value& item, Budget& budget) {
  if (container.IsText()) {
    if (!item.IsText()) Unsupported("in", item, container);
    return FindBytes(container.text().bytes(), item.text().bytes(), 0, budget) != std::string::npos;
  }
  if (container.IsDict()) {
    if (item.IsList() && !item.list().is_tuple) Fail("unhashable type: 'list'");
    if (item.IsDict()) Fail("unhashable type: 'dict'");
    return container.dict().Find(item, budget) != nullptr;
  }
  if (container.IsList()) {
    for (const Value& element : container.list().items) {
      if (Equal(element, item, budget)) return true;
    }
    return false;
  }
  if (container.IsUndefined()) return false;
  Fail("argument of type '" + std::string(container.TypeName()) + "' is not iterable");
}

Value Binary(BinaryOp op, const Value& a, const Value& b, Budget& budget) {
  if (a.IsNumber() && b.IsNumber()) {
    return a.IsFloat() || b.IsFloat() ? FloatBinary(op, a.number(), b.number())
                                      : IntBinary(op, a.integer(), b.integer());
  }
  if (op == BinaryOp::kAdd && a.IsText() && b.IsText()) {
    budget.Copy(a.text());
    budget.Copy(b.text());
    Text out = a.text();
    out.Append(b.text());
    return out;
  }
  if (op == BinaryOp::kAdd && a.IsList() && b.IsList() && a.list().is_tuple == b.list().is_tuple) {
    budget.Elements(a.list().items.size() + b.list().items.size());
    std::vector<Value> items = a.list().items;
    items.insert(items.end(), b.list().items.begin(), b.list().items.end());
    return MakeList(std::move(items), a.list().is_tuple, budget);
  }
  const auto is_count = [](const Value& v) { return v.IsInt() || v.IsBool(); };
  if (op == BinaryOp::kMultiply && IsSequence(a) && is_count(b)) {
    return Repeat(a, b.integer(), budget);
  }
  if (op == BinaryOp::kMultiply && is_count(a) && IsSequence(b)) {
    return Repeat(b, a.integer(), budget);
  }
  if (op == BinaryOp::kModulo && a.IsText()) return PercentFormat(a.text(), b, budget);
  Unsupported(kOpNames[static_cast<int>(op)], a, b);
}

Value Negate(const Value& value) {
  if (value.IsFloat()) return -value.number();
  if (value.IsNumber()) return IntBinary(BinaryOp::kSubtract, 0, value.integer());
  if (value.IsUndefined()) Fail(value.undefined().what + " is undefined");
  Fail("bad operand of -: " + std::string(value.TypeName()));
}

std::vector<Value> Iterate(const Value& value, Budget& budget) {
  std::vector<Value> out;
  if (value.IsUndefined()) return out;
  if (value.IsList()) {
    budget.Elements(value.list().items.size());
    return value.list().items;
  }
  if (value.IsDict()) {
    budget.Elements(value.dict().items.size());
    for (const auto& [key, unused] : value.dict().items) out.push_back(key);
    return out;
  }
  if (value.IsText()) {
    const Text& text = value.text();
    // Each character becomes a separate string.
    budget.Elements(4 * text.size());
    for (size_t pos = 0; pos < text.size();) {
      const size_t begin = pos;
      NextCodePoint(text.bytes(), &pos);
      out.push_back(text.Slice(begin, pos));
    }
    return out;
  }
  Fail("'" + std::string(value.TypeName()) + "' object is not iterable");
}

int64_t Length(const Value& value, Budget& budget) {
  if (value.IsUndefined()) return 0;
  if (value.IsText()) {
    budget.Read(value.text().size());
    return static_cast<int64_t>(CodePointCount(value.text().bytes()));
  }
  if (value.IsList() && !value.list().is_iterator) {
    return static_cast<int64_t>(value.list().items.size());
  }
  if (value.IsDict()) return static_cast<int64_t>(value.dict().items.size());
  Fail("object of type '" + std::string(value.TypeName()) + "' has no len()");
}

Value Item(const Value& value, const Value& index, Budget& budget) {
  if (value.IsUndefined()) Fail(value.undefined().what + " is undefined");
  if (value.IsDict()) {
    if (const Value* found = value.dict().Find(index, budget)) return *found;
  } else if (IsSequence(value) && (index.IsInt() || index.IsBool())) {
    const int64_t size = Length(value, budget);
    int64_t i = index.integer();
    if (i < 0) i += size;
    if (i >= 0 && i < size) {
      if (value.IsList()) return value.list().items[i];
      const Text& text = value.text();
      budget.Step(std::min(static_cast<int64_t>(text.size()), 4 * i) / 16);
      const size_t begin = ByteOffset(text.bytes(), static_cast<size_t>(i));
      size_t end = begin;
      NextCodePoint(text.bytes(), &end);
      return text.Slice(begin, end);
    }
  }
  if (index.IsText()) {
    return Undefined{"'" + std::string(value.TypeName()) + "' object's attribute '" +
                     index.text().bytes().substr(0, 64) + "'"};
  }
  return Undefined{"the element of '" + std::string(value.TypeName()) + "' object"};
}

Value Slice(const Value& value, const Value& begin, const Value& end, const Value& step,
            Budget& budget) {
  if (value.IsUndefined()) Fail(value.undefined().what + " is undefined");
  if (!IsSequence(value)) {
    Fail("'" + std::string(value.TypeName()) + "' object cannot be sliced");
  }
  const Indices at = SliceIndices(begin, end, step, Length(value, budget));
  const auto count = static_cast<size_t>(
      at.step > 0 ? std::max<int64_t>(0, (at.end - at.begin + at.step - 1) / at.step)
                  : std::max<int64_t>(0, (at.begin - at.end - at.step - 1) / -at.step));
  if (value.IsList()) {
    const List& list = value.list();
    budget.Elements(count);
    std::vector<Value> items;
    items.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      items.push_back(list.items[at.begin + static_cast<int64_t>(i) * at.step]);
    }
    return MakeList(std::move(items), list.is_tuple, budget);
  }
  const Text& text = value.text();
  budget.Copy(text);
  budget.Step(static_cast<int64_t>(text.size() / 16));
  if (count == 0) return Text();
  if (at.step == 1) {
    return text.Slice(ByteOffset(text.bytes(), static_cast<size_t>(at.begin)),
                      ByteOffset(text.bytes(), static_cast<size_t>(at.end)));
  }
  budget.Bytes(text.size() * sizeof(size_t));
  budget.Step(static_cast<int64_t>(text.size() / 2));
  std::vector<size_t> offsets;
  for (size_t pos = 0; pos < text.size(); NextCodePoint(text.bytes(), &pos)) offsets.push_back(pos);
  offsets.push_back(text.size());
  Text out;
  for (size_t i = 0; i < count; ++i) {
    const auto c = static_cast<size_t>(at.begin + static_cast<int64_t>(i) * at.step);
    out.Append(text, offsets[c], offsets[c + 1]);
  }
  return out;
}

Value MakeList(std::vector<Value> items, bool is_tuple, Budget& budget) {
  budget.Elements(items.size());
  List list;
  list.is_tuple = is_tuple;
  for (const Value& item : items) list.depth = std::max(list.depth, item.depth() + 1);
  if (list.depth > kMaxContainerDepth) Fail("lists are nested too deeply");
  list.items = std::move(items);
  return list;
}

}  // namespace moeserve::chat
