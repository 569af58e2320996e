#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>

#include "engine/text/chat/builtins.h"
#include "engine/text/chat/format.h"
#include "engine/text/chat/operators.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

using V = const Value&;
using A = const Arguments&;
using B = Budget&;
using Filter = Value (*)(V, A, B);

bool Flag(A args, size_t index, std::string_view name, bool absent) {
  const Value* value = args.Get(index, name);
  return value == nullptr ? absent : Truthy(*value);
}

int64_t Integer(A args, size_t index, std::string_view name, int64_t absent) {
  const Value* value = args.Get(index, name);
  if (value == nullptr || value->IsNone()) return absent;
  if (!value->IsInt() && !value->IsBool()) {
    Fail("'" + std::string(name) + "' must be an integer, not " + std::string(value->TypeName()));
  }
  return value->integer();
}

Value Iterator(std::vector<Value> items, B budget) {
  List list = MakeList(std::move(items), false, budget).list();
  list.is_iterator = true;
  return list;
}

// Returns the attribute `attribute`, for example "a.b.0", of a value, or the value itself if
// `attribute` is null or None.
Value Path(V value, const Value* attribute, B budget) {
  if (attribute == nullptr || attribute->IsNone()) return value;
  if (attribute->IsInt()) return Item(value, *attribute, budget);
  if (!attribute->IsText()) Fail("an attribute is named by a string or an integer");
  Value current = value;
  const Text dot(".", true);
  for (const Value& part : SplitText(attribute->text(), &dot, -1, false, budget)) {
    const std::string& name = part.text().bytes();
    int64_t index = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
    const bool is_index = error == std::errc() && end == name.data() + name.size();
    current = is_index ? Item(current, index, budget) : Subscript(current, part, budget);
  }
  return current;
}

// Returns the key by which sorting and similar filters compare: text in lower case unless the
// comparison is case-sensitive.
Value SortKey(V value, bool case_sensitive, B budget) {
  return !case_sensitive && value.IsText() ? Value(MapCase(value.text(), CaseMap::kLower, budget))
                                           : value;
}

std::vector<Value> Sorted(std::vector<Value> items, const Value* attribute, bool case_sensitive,
                          bool reverse, B budget) {
  budget.Elements(2 * items.size());
  std::vector<std::pair<Value, Value>> keyed;
  for (Value& item : items) {
    Value key = SortKey(Path(item, attribute, budget), case_sensitive, budget);
    keyed.emplace_back(std::move(key), std::move(item));
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? Less(b.first, a.first, budget) : Less(a.first, b.first, budget);
  });
  items.clear();
  for (auto& [key, item] : keyed) items.push_back(std::move(item));
  return items;
}

Arguments Rest(A args, size_t skipped, B budget) {
  budget.Elements(args.positional.size() + args.named.size());
  Arguments rest;
  for (size_t i = skipped; i < args.positional.size(); ++i) {
    rest.positional.push_back(args.positional[i]);
  }
  rest.named = args.named;
  return rest;
}

const std::string& NameArgument(A args, size_t index, const char* what) {
  if (index >= args.positional.size() || !args.positional[index].IsText()) {
    Fail(std::string("expected the name of ") + what);
  }
  return args.positional[index].text().bytes();
}

Value Map(V value, A args, B budget) {
  std::vector<Value> out;
  if (!Truthy(value)) return Iterator({}, budget);  // None is also treated as an empty list
  if (args.positional.empty()) {
    args.Check("map", {"attribute", "default"});
    const Value* attribute = args.Get(0, "attribute");
    if (attribute == nullptr) Fail("map: expected a filter or an attribute");
    const Value* absent = args.Get(1, "default");
    for (const Value& item : Iterate(value, budget)) {
      budget.Step();
      Value found = Path(item, attribute, budget);
      out.push_back(found.IsUndefined() && absent != nullptr ? *absent : std::move(found));
    }
    return Iterator(std::move(out), budget);
  }
  const std::string& filter = NameArgument(args, 0, "a filter");
  const Budget::Nesting nesting(budget);
  const Arguments rest = Rest(args, 1, budget);
  for (const Value& item : Iterate(value, budget)) {
    out.push_back(ApplyFilter(filter, item, rest, budget));
  }
  return Iterator(std::move(out), budget);
}

// Implements the filters select, reject, selectattr and rejectattr.
Value Select(V value, A args, bool by_attribute, bool wanted, B budget) {
  if (!Truthy(value)) return Iterator({}, budget);  // None is also treated as an empty list
  const size_t skipped = by_attribute ? 1 : 0;
  if (by_attribute && args.positional.empty()) Fail("selectattr: expected an attribute");
  const bool has_test = args.positional.size() > skipped;
  const Arguments rest = Rest(args, skipped + 1, budget);
  std::vector<Value> out;
  for (const Value& item : Iterate(value, budget)) {
    budget.Step();
    const Value tested = by_attribute ? Path(item, &args.positional[0], budget) : item;
    const bool passes = has_test
                            ? ApplyTest(NameArgument(args, skipped, "a test"), tested, rest, budget)
                            : Truthy(tested);
    if (passes == wanted) out.push_back(item);
  }
  return Iterator(std::move(out), budget);
}

Value First(V value, A args, B budget) {
  args.Check("first", {});
  const std::vector<Value> items = Iterate(value, budget);
  return items.empty() ? Value(Undefined{"the first element of an empty sequence"}) : items.front();
}

Value Last(V value, A args, B budget) {
  args.Check("last", {});
  if (value.IsList() && value.list().is_iterator) Fail("'generator' object is not reversible");
  const std::vector<Value> items = Iterate(value, budget);
  return items.empty() ? Value(Undefined{"the last element of an empty sequence"}) : items.back();
}

Value Join(V value, A args, B budget) {
  args.Check("join", {"d", "attribute"});
  std::vector<Value> items = Iterate(value, budget);
  if (const Value* attribute = args.Get(1, "attribute")) {
    for (Value& item : items) item = Path(item, attribute, budget);
  }
  const Value* separator = args.Get(0, "d");
  return JoinTexts(separator == nullptr ? Text() : ToText(*separator, budget), items, false,
                   budget);
}

// Implements the filter title. Unlike in str.title(), words start after white space and opening
// brackets only.
Value Title(V value, A args, B budget) {
  args.Check("title", {});
  const Text text = ToText(value, budget);
  budget.Copy(text);
  budget.Step(static_cast<int64_t>(text.size()));
  Text out;
  bool at_start = true;
  Text word;
  const auto flush = [&] {
    if (word.empty()) return;
    size_t first = 0;
    NextCodePoint(word.bytes(), &first);
    out.Append(MapCase(word.Slice(0, first), CaseMap::kUpper, budget));
    out.Append(MapCase(word.Slice(first), CaseMap::kLower, budget));
    word = Text();
  };
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = pos;
    const char32_t c = NextCodePoint(text.bytes(), &pos);
    const bool separates =
        c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || IsPythonSpace(c);
    if (separates != at_start) flush();
    at_start = separates;
    word.Append(text, begin, pos);
  }
  flush();
  return out;
}

std::optional<int64_t> ParseInt(std::string_view text, int base, B budget) {
  budget.Scan(text.size());
  const TextSpan span = StripBounds(text, nullptr, true, true, &budget);
  std::string digits(text.substr(span.begin, span.end - span.begin));
  bool negative = false;
  if (!digits.empty() && (digits[0] == '-' || digits[0] == '+')) {
    negative = digits[0] == '-';
    digits.erase(0, 1);
  }
  if (digits.size() > 2 && digits[0] == '0') {
    const char mark = static_cast<char>(digits[1] | 0x20);
    if ((base == 16 && mark == 'x') || (base == 8 && mark == 'o') || (base == 2 && mark == 'b')) {
      digits.erase(0, 2);
    }
  }
  std::erase(digits, '_');
  uint64_t value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() ||
      value > static_cast<uint64_t>(INT64_MAX)) {
    return std::nullopt;
  }
  return negative ? -static_cast<int64_t>(value) : static_cast<int64_t>(value);
}

std::optional<double> ParseFloat(std::string_view text, B budget) {
  budget.Scan(text.size());
  const TextSpan span = StripBounds(text, nullptr, true, true, &budget);
  std::string trimmed(text.substr(span.begin, span.end - span.begin));
  if (trimmed.empty() || trimmed.find_first_of("xX") != std::string::npos) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(trimmed.c_str(), &end);
  if (*end != '\0' || end == trimmed.c_str()) return std::nullopt;
  return value;
}

std::optional<double> AsFloat(V value, B budget) {
  if (value.IsNumber()) return value.number();
  if (value.IsText()) return ParseFloat(value.text().bytes(), budget);
  return std::nullopt;
}

Value ToInt(V value, A args, B budget) {
  args.Check("int", {"default", "base"});
  if (value.IsUndefined()) Fail(value.undefined().what + " is undefined");
  const int64_t base = Integer(args, 1, "base", 10);
  if (base < 2 || base > 36) Fail("int: the base must be from 2 to 36");
  if (value.IsInt() || value.IsBool()) return value.integer();
  if (value.IsBigInt()) return value;
  if (value.IsText()) {
    if (const auto parsed = ParseInt(value.text().bytes(), static_cast<int>(base), budget))
      return *parsed;
  }
  const std::optional<double> number = AsFloat(value, budget);
  if (number && std::abs(*number) < 0x1p63) return static_cast<int64_t>(*number);
  const Value* absent = args.Get(0, "default");
  return absent == nullptr ? Value(int64_t{0}) : *absent;
}

Value ToFloat(V value, A args, B budget) {
  args.Check("float", {"default"});
  if (value.IsUndefined()) Fail(value.undefined().what + " is undefined");
  if (const auto number = AsFloat(value, budget)) return *number;
  const Value* absent = args.Get(0, "default");
  return absent == nullptr ? Value(0.0) : *absent;
}

Value Round(V value, A args, B) {
  args.Check("round", {"precision", "method"});
  if (!value.IsNumber()) Fail("round: expected a number, found " + std::string(value.TypeName()));
  const int64_t precision = Integer(args, 0, "precision", 0);
  if (precision < 0 || precision > 100) Fail("round: the precision must be from 0 to 100");
  const Value* method = args.Get(1, "method");
  const std::string_view name = method == nullptr  ? "common"
                                : method->IsText() ? std::string_view(method->text().bytes())
                                                   : "";
  if (name == "common") {
    if (value.IsBigInt()) return value;
    if (!value.IsFloat()) return value.integer();
    char buffer[512];
    std::snprintf(buffer, sizeof(buffer), "%.*f", static_cast<int>(precision), value.number());
    return std::strtod(buffer, nullptr);
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (name == "ceil") return std::ceil(value.number() * scale) / scale;
  if (name == "floor") return std::floor(value.number() * scale) / scale;
  Fail("round: the method must be common, ceil or floor");
}

Value Indent(V value, A args, B budget) {
  args.Check("indent", {"width", "first", "blank"});
  if (!value.IsText()) Fail("indent: expected a string, found " + std::string(value.TypeName()));
  const Value* width = args.Get(0, "width");
  Text indention(width != nullptr && !width->IsText() ? "" : "    ", true);
  if (width != nullptr && width->IsText()) {
    budget.Copy(width->text());
    indention = width->text();
  } else if (width != nullptr) {
    indention = Binary(BinaryOp::kMultiply, Text(" ", true), *width, budget).text();
  }
  budget.Copy(value.text());
  Text text = value.text();
  text.Append("\n", true);
  Text out;
  const std::vector<Text> lines = SplitLines(text, false, budget);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.Append("\n", true);
    const bool indents =
        i == 0 ? Flag(args, 1, "first", false) : !lines[i].empty() || Flag(args, 2, "blank", false);
    budget.Step();
    budget.Copy(lines[i]);
    if (indents) budget.Copy(indention);
    if (indents) out.Append(indention);
    out.Append(lines[i]);
  }
  return out;
}

Value JsonFilter(V value, A args, B budget) {
  args.Check("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonFormat format;
  format.ensure_ascii = Flag(args, 0, "ensure_ascii", false);
  format.sort_keys = Flag(args, 3, "sort_keys", false);
  const Value* indent = args.Get(1, "indent");
  if (indent != nullptr && !indent->IsNone()) {
    if (indent->IsText()) {
      if (indent->text().size() > 1000) Fail("tojson: 'indent' is too large");
      format.indent = indent->text().bytes();
    } else if (indent->IsInt() || indent->IsBool()) {
      format.indent =
          std::string(static_cast<size_t>(std::clamp<int64_t>(indent->integer(), 0, 1001)), ' ');
    } else {
      Fail("tojson: 'indent' must be an integer or a string");
    }
    if (format.indent->size() > 1000) Fail("tojson: 'indent' is too large");
    format.item_separator = ",";
  }
  const Value* separators = args.Get(2, "separators");
  if (separators != nullptr && !separators->IsNone()) {
    const std::vector<Value> pair = Iterate(*separators, budget);
    if (pair.size() != 2 || !pair[0].IsText() || !pair[1].IsText()) {
      Fail("tojson: 'separators' must be two strings");
    }
    budget.Copy(pair[0].text());
    budget.Copy(pair[1].text());
    format.item_separator = pair[0].text().bytes();
    format.key_separator = pair[1].text().bytes();
  }
  return ToJson(value, format, budget);
}

Value Items(V value, A args, B budget) {
  args.Check("items", {});
  if (value.IsUndefined()) return Iterator({}, budget);
  if (!value.IsDict()) Fail("items: can only get item pairs from a mapping");
  return Iterator(CallMethod(value, "items", {}, budget).list().items, budget);
}

Value DictSort(V value, A args, B budget) {
  args.Check("dictsort", {"case_sensitive", "by", "reverse"});
  const Value* by = args.Get(1, "by");
  const bool by_value = by != nullptr && by->IsText() && by->text().bytes() == "value";
  if (by != nullptr && !by_value && !(by->IsText() && by->text().bytes() == "key")) {
    Fail("dictsort: sorts by \"key\" or \"value\"");
  }
  if (!value.IsDict()) Fail("dictsort: expected a mapping");
  const Value position = int64_t{by_value ? 1 : 0};
  return MakeList(
      Sorted(CallMethod(value, "items", {}, budget).list().items, &position,
             Flag(args, 0, "case_sensitive", false), Flag(args, 2, "reverse", false), budget),
      false, budget);
}

Value Unique(V value, A args, B budget) {
  args.Check("unique", {"case_sensitive", "attribute"});
  std::vector<Value> out;
  std::vector<Value> seen;
  for (const Value& item : Iterate(value, budget)) {
    Value key = SortKey(Path(item, args.Get(1, "attribute"), budget),
                        Flag(args, 0, "case_sensitive", false), budget);
    if (key.IsDict() || (key.IsList() && !key.list().is_tuple)) {
      Fail("unhashable type: '" + std::string(key.TypeName()) + "'");
    }
    const bool is_new =
        std::none_of(seen.begin(), seen.end(), [&](V other) { return Equal(other, key, budget); });
    if (!is_new) continue;
    seen.push_back(std::move(key));
    out.push_back(item);
  }
  return Iterator(std::move(out), budget);
}

Value Extreme(V value, A args, bool largest, B budget) {
  args.Check("min", {"case_sensitive", "attribute"});
  const std::vector<Value> sorted = Sorted(Iterate(value, budget), args.Get(1, "attribute"),
                                           Flag(args, 0, "case_sensitive", false), largest, budget);
  return sorted.empty() ? Value(Undefined{"the extreme of an empty sequence"}) : sorted.front();
}

Value Sum(V value, A args, B budget) {
  args.Check("sum", {"attribute", "start"});
  const Value* start = args.Get(1, "start");
  Value sum = start == nullptr ? Value(int64_t{0}) : *start;
  for (const Value& item : Iterate(value, budget)) {
    sum = Binary(BinaryOp::kAdd, sum, Path(item, args.Get(0, "attribute"), budget), budget);
  }
  return sum;
}

Value Reverse(V value, A args, B budget) {
  args.Check("reverse", {});
  if (value.IsText()) {
    return Slice(value, None{}, None{}, int64_t{-1}, budget);
  }
  std::vector<Value> items = Iterate(value, budget);
  std::reverse(items.begin(), items.end());
  return Iterator(std::move(items), budget);
}

Value Escape(V value, A args, B budget) {
  args.Check("escape", {});
  Text text = ToText(value, budget);
  for (const auto& [from, to] :
       {std::pair("&", "&amp;"), {">", "&gt;"}, {"<", "&lt;"}, {"'", "&#39;"}, {"\"", "&#34;"}}) {
    // The replacement is marked untrusted, because the character that it replaces may be untrusted.
    text = ReplaceText(text, Text(from, true), Text(to, false), -1, budget);
  }
  return text;
}

Value Default(V value, A args, B) {
  args.Check("default", {"default_value", "boolean"});
  if (!value.IsUndefined() && !(Flag(args, 1, "boolean", false) && !Truthy(value))) return value;
  const Value* absent = args.Get(0, "default_value");
  return absent == nullptr ? Value(Text()) : *absent;
}

Value Replace(V value, A args, B budget) {
  args.Check("replace", {"old", "new", "count"}, 2);
  return ReplaceText(ToText(value, budget), ToText(*args.Get(0, "old"), budget),
                     ToText(*args.Get(1, "new"), budget), Integer(args, 2, "count", -1), budget);
}

Value Absolute(V value, A args, B) {
  args.Check("abs", {});
  if (!value.IsNumber()) Fail("abs: expected a number, found " + std::string(value.TypeName()));
  if (value.IsBigInt()) {
    const std::string& digits = value.digits();
    return BigInt{digits.substr(digits.starts_with('-') ? 1 : 0), std::abs(value.number())};
  }
  if (value.IsFloat()) return std::abs(value.number());
  return value.integer() < 0 ? Negate(value) : Value(value.integer());
}

Value FormatFilter(V value, A args, B budget) {
  if (!args.named.empty()) Fail("format: named arguments are not supported");
  return PercentFormat(ToText(value, budget), MakeList(args.positional, true, budget), budget);
}

template <CaseMap map>
Value Case(V value, A args, B budget) {
  args.Check("case", {});
  return MapCase(ToText(value, budget), map, budget);
}

const std::map<std::string, Filter, std::less<>>& Filters() {
  static const auto* filters = new std::map<std::string, Filter, std::less<>>{
      {"abs", Absolute},
      {"capitalize",
       [](V v, A a, B b) -> Value {
         return (a.Check("capitalize", {}), Capitalize(ToText(v, b), b));
       }},
      {"count", [](V v, A a, B b) -> Value { return (a.Check("count", {}), Length(v, b)); }},
      {"d", Default},
      {"default", Default},
      {"dictsort", DictSort},
      {"e", Escape},
      {"escape", Escape},
      {"first", First},
      {"float", ToFloat},
      {"format", FormatFilter},
      {"indent", Indent},
      {"int", ToInt},
      {"items", Items},
      {"join", Join},
      {"last", Last},
      {"length", [](V v, A a, B b) -> Value { return (a.Check("length", {}), Length(v, b)); }},
      {"list",
       [](V v, A a, B b) -> Value {
         return (a.Check("list", {}), MakeList(Iterate(v, b), false, b));
       }},
      {"lower", Case<CaseMap::kLower>},
      {"map", Map},
      {"max", [](V v, A a, B b) { return Extreme(v, a, true, b); }},
      {"min", [](V v, A a, B b) { return Extreme(v, a, false, b); }},
      {"reject", [](V v, A a, B b) { return Select(v, a, false, false, b); }},
      {"rejectattr", [](V v, A a, B b) { return Select(v, a, true, false, b); }},
      {"replace", Replace},
      {"reverse", Reverse},
      {"round", Round},
      {"safe", [](V v, A a, B b) -> Value { return (a.Check("safe", {}), ToText(v, b)); }},
      {"select", [](V v, A a, B b) { return Select(v, a, false, true, b); }},
      {"selectattr", [](V v, A a, B b) { return Select(v, a, true, true, b); }},
      {"sort",
       [](V v, A a, B b) -> Value {
         a.Check("sort", {"reverse", "case_sensitive", "attribute"});
         return MakeList(
             Sorted(Iterate(v, b), a.Get(2, "attribute"), Flag(a, 1, "case_sensitive", false),
                    Flag(a, 0, "reverse", false), b),
             false, b);
       }},
      {"string", [](V v, A a, B b) -> Value { return (a.Check("string", {}), ToText(v, b)); }},
      {"sum", Sum},
      {"title", Title},
      {"tojson", JsonFilter},
      {"trim", [](V v, A a, B b) { return CallMethod(ToText(v, b), "strip", a, b); }},
      {"unique", Unique},
      {"upper", Case<CaseMap::kUpper>},
  };
  return *filters;
}

}  // namespace

Value ApplyFilter(const std::string& name, const Value& value, const Arguments& args,
                  Budget& budget) {
  budget.Step();
  const auto it = Filters().find(name);
  if (it == Filters().end()) Fail("no filter named '" + name.substr(0, 64) + "'");
  if (value.IsText()) {
    budget.Bytes(value.text().size());
    budget.Read(value.text().size());
  }
  return it->second(value, args, budget);
}

}  // namespace moeserve::chat
