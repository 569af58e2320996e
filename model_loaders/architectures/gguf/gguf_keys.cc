#include "model_loaders/architectures/gguf/gguf_keys.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "model_loaders/architectures/architecture.h"

namespace moeserve {
namespace {

std::optional<int> AsInt(const GgufValue& value) {
  std::optional<int64_t> number = value.Integer();
  if (value.type == GgufValueType::kArray) {
    const std::optional<std::vector<int64_t>> items = value.Integers();
    if (items.has_value() && !items->empty() &&
        std::all_of(items->begin(), items->end(), [&](int64_t i) { return i == (*items)[0]; })) {
      number = (*items)[0];
    }
  }
  if (!number.has_value() || *number < std::numeric_limits<int>::min() ||
      *number > std::numeric_limits<int>::max()) {
    return std::nullopt;
  }
  return static_cast<int>(*number);
}

// Returns the decimal number with the fewest digits that rounds to `number`. Converters round the
// numbers of a config.json, such as 2.446, to f32; this is almost always the number before that.
double Unrounded(float number) {
  char text[64];
  const std::to_chars_result written = std::to_chars(text, text + sizeof(text), number);
  double result = number;
  std::from_chars(text, written.ptr, result);
  return result;
}

}  // namespace

std::string GgufKeys::NameOf(std::string_view key) const {
  return key.starts_with('.') ? Concat(architecture_, key) : std::string(key);
}

bool GgufKeys::IsIgnored(std::string_view name) const {
  return ignored_ != nullptr &&
         std::find(ignored_->begin(), ignored_->end(), name) != ignored_->end();
}

const GgufValue* GgufKeys::Find(std::string_view key) {
  const std::string name = NameOf(key);
  if (IsIgnored(name)) return nullptr;
  const GgufValue* const value = file_.Find(name);
  if (value != nullptr) read_.insert(name);
  return value;
}

void GgufKeys::Fault(std::string_view key, std::string_view expected, std::string_view found) {
  problems_.Add(Concat(Printable(NameOf(key)), ": expected ", expected, ", found ", found));
}

const GgufValue* GgufKeys::FindNumber(std::string_view key, std::string_view expected,
                                      bool required) {
  const GgufValue* const value = Find(key);
  if (value == nullptr && required) Fault(key, expected, "no such key");
  return value;
}

int GgufKeys::Int(std::string_view key, std::optional<int> fallback) {
  constexpr std::string_view kExpected = "an integer";
  const GgufValue* const value = FindNumber(key, kExpected, !fallback.has_value());
  if (value == nullptr) return fallback.value_or(0);
  const std::optional<int> number = AsInt(*value);
  if (!number.has_value()) Fault(key, kExpected, ShowGguf(*value));
  return number.value_or(fallback.value_or(0));
}

std::optional<int> GgufKeys::OptionalInt(std::string_view key) {
  if (Find(key) == nullptr) return std::nullopt;
  return Int(key);
}

std::vector<int> GgufKeys::Ints(std::string_view key, int layers, std::optional<int> fallback) {
  const auto count = static_cast<size_t>(std::max(layers, 0));
  const GgufValue* const value = Find(key);
  if (value == nullptr || value->type != GgufValueType::kArray) {
    return std::vector<int>(count, Int(key, fallback));
  }
  const std::optional<std::vector<int64_t>> items = value->Integers();
  const auto fits = [](int64_t i) { return std::in_range<int>(i); };
  if (items.has_value() && items->size() == count && std::ranges::all_of(*items, fits)) {
    return std::vector<int>(items->begin(), items->end());
  }
  Fault(key, Concat("an integer or an array of ", count, " integers (the number of layers)"),
        ShowGguf(*value));
  return std::vector<int>(count, fallback.value_or(0));
}

std::vector<bool> GgufKeys::Flags(std::string_view key, int layers) {
  const auto count = static_cast<size_t>(std::max(layers, 0));
  const GgufValue* const value = Find(key);
  std::vector<bool> flags;
  if (value != nullptr && value->type == GgufValueType::kArray && value->count == count) {
    const std::optional<std::vector<int64_t>> items = value->Integers();
    if (value->item_type == GgufValueType::kBool) {
      for (const char item : value->bytes) flags.push_back(item != 0);
    } else if (items.has_value()) {
      for (const int64_t item : *items) {
        if (item == 0 || item == 1) flags.push_back(item == 1);
      }
    }
  }
  if (flags.size() == count) return flags;
  Fault(key, Concat("an array of ", count, " bools (the number of layers)"),
        value == nullptr ? "no such key" : ShowGguf(*value));
  return std::vector<bool>(count, false);
}

std::vector<float> GgufKeys::Floats(std::string_view key, int layers) {
  const auto count = static_cast<size_t>(std::max(layers, 0));
  const GgufValue* const value = Find(key);
  if (value == nullptr) return std::vector<float>(count, 0.0f);
  std::vector<double> numbers;
  if (value->type == GgufValueType::kArray) {
    if (value->count == count) numbers = value->Reals().value_or(numbers);
  } else if (const std::optional<double> number = value->Real()) {
    numbers.assign(count, *number);
  }
  const auto fits = [](double x) { return x >= 0.0 && std::isfinite(static_cast<float>(x)); };
  if (numbers.size() == count && std::ranges::all_of(numbers, fits)) {
    return std::vector<float>(numbers.begin(), numbers.end());
  }
  Fault(key,
        Concat("a number of at least 0 or an array of ", count, " of them (the number of layers)"),
        ShowGguf(*value));
  return std::vector<float>(count, 0.0f);
}

double GgufKeys::Real(std::string_view key, std::optional<double> fallback) {
  constexpr std::string_view kExpected = "a finite number";
  const GgufValue* const value = FindNumber(key, kExpected, !fallback.has_value());
  if (value == nullptr) return fallback.value_or(0.0);
  const std::optional<double> number = value->Real();
  if (number.has_value() && std::isfinite(*number)) {
    const bool rounded = value->type == GgufValueType::kF32;
    return rounded ? Unrounded(static_cast<float>(*number)) : *number;
  }
  Fault(key, kExpected, ShowGguf(*value));
  return fallback.value_or(0.0);
}

bool GgufKeys::Bool(std::string_view key, bool fallback) {
  const GgufValue* const value = Find(key);
  if (value == nullptr) return fallback;
  const std::optional<bool> truth = value->Bool();
  if (!truth.has_value()) Fault(key, "a bool", ShowGguf(*value));
  return truth.value_or(fallback);
}

std::optional<std::string_view> GgufKeys::Text(std::string_view key) {
  const GgufValue* const value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->String().has_value()) Fault(key, "a string", ShowGguf(*value));
  return value->String();
}

void GgufKeys::Require(std::string_view key, double value) {
  const GgufValue* const found = Find(key);
  if (found == nullptr) return;
  const std::optional<bool> truth = found->Bool();
  const std::optional<double> number =
      truth.has_value() ? std::optional<double>(*truth ? 1.0 : 0.0) : found->Real();
  if (number == value) return;
  const std::string integer = std::to_string(static_cast<int64_t>(value));
  Fault(key, truth.has_value() ? std::string_view(value != 0.0 ? "true" : "false") : integer,
        Concat(ShowGguf(*found), ", which this server does not support"));
}

void GgufKeys::RefuseOthers() {
  const std::string prefix = Concat(architecture_, '.');
  for (const auto& [key, value] : file_.metadata()) {
    if (!key.starts_with(prefix) || read_.contains(key) || IsIgnored(key)) continue;
    problems_.Add(UnknownKey(key, ShowGguf(value)));
  }
}

}  // namespace moeserve
