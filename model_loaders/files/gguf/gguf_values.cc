// The values of GGUF metadata.

#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/check.h"
#include "base/error_text.h"
#include "model_loaders/files/gguf/gguf_file.h"

namespace moeserve {
namespace {

using Type = GgufValueType;

constexpr std::array<std::string_view, 13> kNames = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};

template <typename T>
T Load(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

template <typename T, typename Use>
bool UseAs(const char* bytes, const Use& use) {
  use(Load<T>(bytes));
  return true;
}

// Calls `use` with the number at `bytes`. Returns false if the type is no number.
template <typename Use>
bool WithNumber(Type type, const char* bytes, const Use& use) {
  switch (type) {
    case Type::kU8:
      return UseAs<uint8_t>(bytes, use);
    case Type::kI8:
      return UseAs<int8_t>(bytes, use);
    case Type::kU16:
      return UseAs<uint16_t>(bytes, use);
    case Type::kI16:
      return UseAs<int16_t>(bytes, use);
    case Type::kU32:
      return UseAs<uint32_t>(bytes, use);
    case Type::kI32:
      return UseAs<int32_t>(bytes, use);
    case Type::kU64:
      return UseAs<uint64_t>(bytes, use);
    case Type::kI64:
      return UseAs<int64_t>(bytes, use);
    case Type::kF32:
      return UseAs<float>(bytes, use);
    case Type::kF64:
      return UseAs<double>(bytes, use);
    case Type::kBool:
    case Type::kString:
    case Type::kArray:
      return false;
  }
  return false;
}

std::optional<int64_t> IntegerAt(Type type, const char* bytes) {
  std::optional<int64_t> result;
  WithNumber(type, bytes, [&](auto number) {
    if constexpr (std::is_integral_v<decltype(number)>) {
      if (number <= 0 || static_cast<uint64_t>(number) <=
                             static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        result = static_cast<int64_t>(number);
      }
    }
  });
  return result;
}

std::optional<double> RealAt(Type type, const char* bytes) {
  std::optional<double> result;
  WithNumber(type, bytes, [&](auto number) { result = static_cast<double>(number); });
  return result;
}

size_t NumberBytes(Type type) {
  size_t size = 0;
  // Only the type counts; the largest number has 8 bytes.
  constexpr char kZeros[8] = {};
  WithNumber(type, kZeros, [&](auto number) { size = sizeof(number); });
  return size;
}

// Returns the items of an array of numbers, each of which `read` converts.
template <typename T, typename Read>
std::optional<std::vector<T>> Items(const GgufValue& value, const Read& read) {
  const size_t size = NumberBytes(value.item_type);
  if (value.type != Type::kArray || size == 0) return std::nullopt;
  std::vector<T> items;
  items.reserve(value.count);
  for (uint64_t i = 0; i < value.count; ++i) {
    const std::optional<T> item = read(value.item_type, value.bytes.data() + i * size);
    if (!item.has_value()) return std::nullopt;
    items.push_back(*item);
  }
  return items;
}

}  // namespace

std::optional<int64_t> GgufValue::Integer() const { return IntegerAt(type, bytes.data()); }

std::optional<double> GgufValue::Real() const { return RealAt(type, bytes.data()); }

std::optional<bool> GgufValue::Bool() const {
  return type == Type::kBool ? std::optional(bytes[0] != 0) : std::nullopt;
}

std::optional<std::string_view> GgufValue::String() const {
  return type == Type::kString ? std::optional(bytes) : std::nullopt;
}

std::optional<std::vector<int64_t>> GgufValue::Integers() const {
  return Items<int64_t>(*this, IntegerAt);
}

std::optional<std::vector<double>> GgufValue::Reals() const { return Items<double>(*this, RealAt); }

std::optional<std::vector<std::string_view>> GgufValue::Strings() const {
  if (type != Type::kArray || item_type != Type::kString) return std::nullopt;
  std::vector<std::string_view> items;
  items.reserve(count);
  std::string_view rest = bytes;
  for (uint64_t i = 0; i < count; ++i) {
    // The file was checked, but may have been overwritten since.
    if (rest.size() < sizeof(uint64_t)) return std::nullopt;
    const auto size = Load<uint64_t>(rest.data());
    if (size > rest.size() - sizeof(size)) return std::nullopt;
    items.push_back(rest.substr(sizeof(size), size));
    rest.remove_prefix(sizeof(size) + size);
  }
  return items;
}

std::string ShowGguf(const GgufValue& value) {
  const std::string_view name = kNames[static_cast<size_t>(value.type)];
  if (value.type == Type::kString) return Quoted(value.bytes);
  if (value.type == Type::kBool) return *value.Bool() ? "true" : "false";
  if (value.type == Type::kArray) {
    return Concat("an array of ", value.count, ' ', kNames[static_cast<size_t>(value.item_type)],
                  " values");
  }
  std::string text;
  WithNumber(value.type, value.bytes.data(), [&](auto number) { text = std::to_string(number); });
  return Concat(text, " (", name, ')');
}

}  // namespace moeserve
