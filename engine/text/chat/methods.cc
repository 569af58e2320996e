#include <algorithm>
#include <map>

#include "engine/text/chat/builtins.h"
#include "engine/text/chat/format.h"
#include "engine/text/chat/operators.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

const Text& TextArgument(const Arguments& args, size_t index, std::string_view name) {
  const Value* value = args.Get(index, name);
  if (value == nullptr) Fail("the argument '" + std::string(name) + "' is missing");
  if (!value->IsText()) {
    Fail("expected a string, found " + std::string(value->TypeName()) +
         (value->IsUndefined() ? " (" + value->undefined().what + " is undefined)" : ""));
  }
  return value->text();
}

int64_t IntArgument(const Arguments& args, size_t index, std::string_view name, int64_t absent) {
  const Value* value = args.Get(index, name);
  if (value == nullptr) return absent;
  if (!value->IsInt() && !value->IsBool()) {
    Fail("expected an integer, found " + std::string(value->TypeName()));
  }
  return value->integer();
}

Value Strip(const Text& text, const Arguments& args, bool left, bool right, Budget& budget) {
  args.Check("strip", {"chars"});
  const Value* chars = args.Get(0, "chars");
  std::u32string set;
  const bool has_set = chars != nullptr && !chars->IsNone();
  if (has_set) {
    const Text& characters = TextArgument(args, 0, "chars");
    if (characters.size() <= 4096) set = CodePoints(characters.bytes());
    if (characters.size() > 4096 || set.size() > 1024) Fail("strip(): too many characters");
  }
  const TextSpan span = StripBounds(text.bytes(), has_set ? &set : nullptr, left, right, &budget);
  return text.Slice(span.begin, span.end);
}

// Implements str.startswith() and str.endswith(), whose argument is a string or a tuple of strings.
bool MatchesEnd(const Text& text, const Arguments& args, bool at_start, Budget& budget) {
  args.Check("startswith", {"prefix"}, 1);
  const Value& affix = *args.Get(0, "prefix");
  const auto matches = [&](const Value& value) {
    budget.Step();
    if (value.IsText()) budget.Read(std::min(text.size(), value.text().size()));
    if (!value.IsText()) Fail("startswith and endswith need a string or a tuple of strings");
    return at_start ? text.bytes().starts_with(value.text().bytes())
                    : text.bytes().ends_with(value.text().bytes());
  };
  if (affix.IsList() && affix.list().is_tuple) {
    return std::any_of(affix.list().items.begin(), affix.list().items.end(), matches);
  }
  return matches(affix);
}

int64_t Find(const Text& text, const Arguments& args, bool last, Budget& budget) {
  args.Check("find", {"sub"}, 1);
  const std::string& sub = TextArgument(args, 0, "sub").bytes();
  const size_t at =
      last ? FindLastBytes(text.bytes(), sub, budget) : FindBytes(text.bytes(), sub, 0, budget);
  if (at == std::string::npos) return -1;
  return static_cast<int64_t>(CodePointCount(std::string_view(text.bytes()).substr(0, at)));
}

int64_t Count(const Text& text, const Arguments& args, Budget& budget) {
  args.Check("count", {"sub"}, 1);
  const std::string& sub = TextArgument(args, 0, "sub").bytes();
  if (sub.empty()) return static_cast<int64_t>(CodePointCount(text.bytes())) + 1;
  int64_t count = 0;
  for (size_t at = FindBytes(text.bytes(), sub, 0, budget); at != std::string::npos;
       at = FindBytes(text.bytes(), sub, at + sub.size(), budget)) {
    ++count;
  }
  return count;
}

Value Partition(const Text& text, const Arguments& args, bool last, Budget& budget) {
  args.Check("partition", {"sep"}, 1);
  const Text& separator = TextArgument(args, 0, "sep");
  if (separator.empty()) Fail("empty separator");
  budget.Copy(text);
  budget.Copy(separator);
  const size_t at = last ? FindLastBytes(text.bytes(), separator.bytes(), budget)
                         : FindBytes(text.bytes(), separator.bytes(), 0, budget);
  if (at == std::string::npos) {
    return last ? MakeList({Text(), Text(), text}, true, budget)
                : MakeList({text, Text(), Text()}, true, budget);
  }
  return MakeList({text.Slice(0, at), separator, text.Slice(at + separator.size())}, true, budget);
}

Value Split(const Text& text, const Arguments& args, bool from_right, Budget& budget) {
  args.Check("split", {"sep", "maxsplit"});
  const Value* separator = args.Get(0, "sep");
  const bool has = separator != nullptr && !separator->IsNone();
  return MakeList(SplitText(text, has ? &TextArgument(args, 0, "sep") : nullptr,
                            IntArgument(args, 1, "maxsplit", -1), from_right, budget),
                  false, budget);
}

// Returns whether the text is not empty and all its characters pass the test.
template <typename Test>
bool AllCharacters(const Text& text, Test test, Budget& budget) {
  budget.Scan(text.size());
  if (text.empty()) return false;
  for (size_t pos = 0; pos < text.size();) {
    if (!test(NextCodePoint(text.bytes(), &pos))) return false;
  }
  return true;
}

// Implements str.isupper() and str.islower(): at least one character has case, and every character
// that has case has this one.
bool HasOnlyCase(const Text& text, CaseMap map, Budget& budget) {
  budget.Step(static_cast<int64_t>(text.size()));
  bool cased = false;
  std::string mapped;
  std::string own;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = NextCodePoint(text.bytes(), &pos);
    if (!IsCased(c)) continue;
    cased = true;
    mapped.clear();
    own.clear();
    AppendMapped(c, map, mapped);
    AppendUtf8(c, &own);
    if (mapped != own) return false;
  }
  return cased;
}

Value Pad(const Text& text, const Arguments& args, bool left, Budget& budget) {
  args.Check("ljust", {"width", "fillchar"}, 1);
  const Value* fill_value = args.Get(1, "fillchar");
  if (fill_value != nullptr && TextArgument(args, 1, "fillchar").size() > 4) {
    Fail("the fill character must be exactly one");
  }
  const Text fill = fill_value == nullptr ? Text(" ", true) : TextArgument(args, 1, "fillchar");
  if (CodePointCount(fill.bytes()) != 1) Fail("the fill character must be exactly one");
  const int64_t missing =
      IntArgument(args, 0, "width", 0) - static_cast<int64_t>(CodePointCount(text.bytes()));
  if (missing <= 0) return text;
  Value padding = Binary(BinaryOp::kMultiply, fill, missing, budget);
  return left ? Binary(BinaryOp::kAdd, padding, text, budget)
              : Binary(BinaryOp::kAdd, text, padding, budget);
}

// Implements str.format() with {}, {0} and {name}.
Value Format(const Text& text, const Arguments& args, Budget& budget) {
  const std::string& bytes = text.bytes();
  Text out;
  size_t next = 0;
  for (size_t at = 0; at < bytes.size();) {
    const size_t brace = std::min(bytes.find_first_of("{}", at), bytes.size());
    budget.Bytes(brace - at);
    budget.Step(1 + static_cast<int64_t>((brace - at) / 64 + args.named.size() / 8));
    out.Append(text, at, brace);
    if (brace == bytes.size()) break;
    if (brace + 1 < bytes.size() && bytes[brace + 1] == bytes[brace]) {
      out.Append(text, brace, brace + 1);
      at = brace + 2;
      continue;
    }
    const size_t end = bytes.find('}', brace);
    if (bytes[brace] == '}' || end == std::string::npos) Fail("format(): a single brace");
    const std::string field = bytes.substr(brace + 1, std::min<size_t>(end - brace - 1, 65));
    const bool is_index =
        std::all_of(field.begin(), field.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (field.find_first_of(".[:!{") != std::string::npos || field.size() > 64) {
      Fail("format(): only {}, {0} and {name} are supported");
    }
    const size_t index = field.empty() ? next++
                         : is_index    ? std::stoul(field.substr(0, 9))
                                       : std::string::npos;
    const Value* value = is_index
                             ? (index < args.positional.size() ? &args.positional[index] : nullptr)
                             : args.Get(std::string::npos, field);
    if (value == nullptr) Fail("format(): there is no argument '" + field + "'");
    const Text shown = ToText(*value, budget);
    budget.Copy(shown);
    out.Append(shown);
    at = end + 1;
  }
  return out;
}

bool IsDigitChar(char32_t c) { return c >= '0' && c <= '9'; }

using TextMethod = Value (*)(const Text&, const Arguments&, Budget&);

const std::map<std::string, TextMethod, std::less<>>& TextMethods() {
  using A = const Arguments&;
  using B = Budget&;
  using T = const Text&;
  static const auto* methods = new std::map<std::string, TextMethod, std::less<>>{
      {"strip", [](T t, A a, B b) { return Strip(t, a, true, true, b); }},
      {"lstrip", [](T t, A a, B b) { return Strip(t, a, true, false, b); }},
      {"rstrip", [](T t, A a, B b) { return Strip(t, a, false, true, b); }},
      {"split", [](T t, A a, B b) { return Split(t, a, false, b); }},
      {"rsplit", [](T t, A a, B b) { return Split(t, a, true, b); }},
      {"splitlines",
       [](T t, A a, B b) -> Value {
         a.Check("splitlines", {"keepends"});
         const Value* keep = a.Get(0, "keepends");
         std::vector<Value> lines;
         for (Text& line : SplitLines(t, keep != nullptr && Truthy(*keep), b)) {
           lines.push_back(std::move(line));
         }
         return MakeList(std::move(lines), false, b);
       }},
      {"partition", [](T t, A a, B b) { return Partition(t, a, false, b); }},
      {"rpartition", [](T t, A a, B b) { return Partition(t, a, true, b); }},
      {"startswith", [](T t, A a, B b) -> Value { return MatchesEnd(t, a, true, b); }},
      {"endswith", [](T t, A a, B b) -> Value { return MatchesEnd(t, a, false, b); }},
      {"replace",
       [](T t, A a, B b) -> Value {
         a.Check("replace", {"old", "new", "count"}, 2);
         return ReplaceText(t, TextArgument(a, 0, "old"), TextArgument(a, 1, "new"),
                            IntArgument(a, 2, "count", -1), b);
       }},
      {"removeprefix",
       [](T t, A a, B b) -> Value {
         a.Check("removeprefix", {"prefix"}, 1);
         const std::string& prefix = TextArgument(a, 0, "prefix").bytes();
         b.Copy(t);
         return t.Slice(t.bytes().starts_with(prefix) ? prefix.size() : 0);
       }},
      {"removesuffix",
       [](T t, A a, B b) -> Value {
         a.Check("removesuffix", {"suffix"}, 1);
         const std::string& suffix = TextArgument(a, 0, "suffix").bytes();
         b.Copy(t);
         return t.Slice(0, t.size() - (t.bytes().ends_with(suffix) ? suffix.size() : 0));
       }},
      {"upper",
       [](T t, A a, B b) -> Value {
         return (a.Check("upper", {}), MapCase(t, CaseMap::kUpper, b));
       }},
      {"lower",
       [](T t, A a, B b) -> Value {
         return (a.Check("lower", {}), MapCase(t, CaseMap::kLower, b));
       }},
      {"title",
       [](T t, A a, B b) -> Value {
         return (a.Check("title", {}), MapCase(t, CaseMap::kTitle, b));
       }},
      {"capitalize",
       [](T t, A a, B b) -> Value { return (a.Check("capitalize", {}), Capitalize(t, b)); }},
      {"find", [](T t, A a, B b) -> Value { return Find(t, a, false, b); }},
      {"rfind", [](T t, A a, B b) -> Value { return Find(t, a, true, b); }},
      {"index",
       [](T t, A a, B b) -> Value {
         const int64_t at = Find(t, a, false, b);
         if (at < 0) Fail("substring not found");
         return at;
       }},
      {"count", [](T t, A a, B b) -> Value { return Count(t, a, b); }},
      {"join",
       [](T t, A a, B b) -> Value {
         a.Check("join", {"iterable"}, 1);
         return JoinTexts(t, Iterate(*a.Get(0, "iterable"), b), true, b);
       }},
      {"ljust", [](T t, A a, B b) { return Pad(t, a, false, b); }},
      {"rjust", [](T t, A a, B b) { return Pad(t, a, true, b); }},
      {"format", [](T t, A a, B b) { return Format(t, a, b); }},
      {"isdigit", [](T t, A, B b) -> Value { return AllCharacters(t, IsDigitChar, b); }},
      {"isdecimal", [](T t, A, B b) -> Value { return AllCharacters(t, IsDigitChar, b); }},
      {"isnumeric", [](T t, A, B b) -> Value { return AllCharacters(t, IsDigitChar, b); }},
      {"isspace", [](T t, A, B b) -> Value { return AllCharacters(t, IsPythonSpace, b); }},
      {"isupper", [](T t, A, B b) -> Value { return HasOnlyCase(t, CaseMap::kUpper, b); }},
      {"islower", [](T t, A, B b) -> Value { return HasOnlyCase(t, CaseMap::kLower, b); }},
  };
  return *methods;
}

Value DictMethod(const Dict& dict, const std::string& name, const Arguments& args, Budget& budget) {
  if (name == "get") {
    args.Check("get", {"key", "default"}, 1);
    if (const Value* found = dict.Find(*args.Get(0, "key"), budget)) return *found;
    const Value* absent = args.Get(1, "default");
    return absent == nullptr ? Value(None{}) : *absent;
  }
  args.Check(name, {});
  budget.Elements(dict.items.size());
  std::vector<Value> out;
  for (const auto& [key, value] : dict.items) {
    if (name == "keys") {
      out.push_back(key);
    } else if (name == "values") {
      out.push_back(value);
    } else {
      out.push_back(MakeList({key, value}, true, budget));
    }
  }
  return MakeList(std::move(out), false, budget);
}

Value ListMethod(const List& list, const std::string& name, const Arguments& args, Budget& budget) {
  args.Check(name, {"value"}, 1);
  int64_t count = 0;
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (!Equal(list.items[i], *args.Get(0, "value"), budget)) continue;
    if (name == "index") return static_cast<int64_t>(i);
    ++count;
  }
  if (name == "index") Fail("the value is not in the list");
  return count;
}

Value LoopAttribute(LoopState& loop, const std::string& name) {
  const auto length = [&loop]() -> int64_t {
    while (loop.Has(loop.items.size())) {
    }
    return static_cast<int64_t>(loop.items.size());
  };
  const auto index0 = static_cast<int64_t>(loop.index0);
  if (name == "index") return index0 + 1;
  if (name == "index0") return index0;
  if (name == "first") return index0 == 0;
  if (name == "last") return !loop.Has(loop.index0 + 1);
  if (name == "length") return length();
  if (name == "revindex") return length() - index0;
  if (name == "revindex0") return length() - index0 - 1;
  // Recursive loops are not supported, so the depth is always 1.
  if (name == "depth") return int64_t{1};
  if (name == "depth0") return int64_t{0};
  if (name == "previtem") {
    if (index0 == 0) return Undefined{"there is no previous item"};
    return loop.items[loop.index0 - 1];
  }
  if (name == "nextitem") {
    if (!loop.Has(loop.index0 + 1)) return Undefined{"there is no next item"};
    return loop.items[loop.index0 + 1];
  }
  return Undefined{"'LoopContext' object's attribute '" + name.substr(0, 64) + "'"};
}

}  // namespace

std::vector<Value> SplitText(const Text& text, const Text* separator, int64_t max_splits,
                             bool from_right, Budget& budget) {
  budget.Copy(text);
  budget.Copy(text);
  std::vector<Value> out;
  const std::string& bytes = text.bytes();
  const auto may_split = [&] {
    return max_splits < 0 || static_cast<int64_t>(out.size()) < max_splits;
  };
  const auto add = [&](size_t begin, size_t end) {
    budget.Elements(1);
    out.push_back(text.Slice(begin, end));
  };
  if (separator != nullptr) {
    const std::string& cut = separator->bytes();
    if (cut.empty()) Fail("empty separator");
    budget.Copy(*separator);
    // To split from the right, splits the reversed text from the left.
    const std::string searched = from_right ? std::string(bytes.rbegin(), bytes.rend()) : bytes;
    const std::string sought = from_right ? std::string(cut.rbegin(), cut.rend()) : cut;
    std::vector<size_t> cuts;
    for (size_t at = FindBytes(searched, sought, 0, budget);
         at != std::string::npos &&
         (max_splits < 0 || static_cast<int64_t>(cuts.size()) < max_splits);
         at = FindBytes(searched, sought, at + sought.size(), budget)) {
      budget.Bytes(sizeof(size_t));
      cuts.push_back(from_right ? bytes.size() - at - cut.size() : at);
    }
    if (from_right) std::reverse(cuts.begin(), cuts.end());
    size_t begin = 0;
    for (const size_t at : cuts) {
      add(begin, at);
      begin = at + cut.size();
    }
    add(begin, bytes.size());
    return out;
  } else {
    if (!from_right) budget.Scan(bytes.size());
    TextSpan rest = StripBounds(bytes, nullptr, true, true, &budget);
    while (rest.begin < rest.end) {
      if (!may_split()) {
        // The remaining text keeps the white space at its far end.
        add(from_right ? 0 : rest.begin, from_right ? rest.end : bytes.size());
        break;
      }
      const std::string_view piece(bytes.data() + rest.begin, rest.end - rest.begin);
      // From the right, the whole rest is read for every word.
      if (from_right) budget.Scan(piece.size());
      size_t word = 0;
      size_t word_end = piece.size();
      for (size_t pos = 0; pos < piece.size();) {
        const size_t begin = pos;
        if (!IsPythonSpace(NextCodePoint(piece, &pos))) continue;
        if (from_right) {
          word = pos;
        } else {
          word_end = begin;
          break;
        }
      }
      add(rest.begin + word, rest.begin + word_end);
      if (from_right) {
        rest.end =
            rest.begin + StripBounds(piece.substr(0, word), nullptr, false, true, &budget).end;
      } else {
        rest.begin += word_end;
        rest.begin += StripBounds(piece.substr(word_end), nullptr, true, false, &budget).begin;
      }
    }
  }
  if (from_right) std::reverse(out.begin(), out.end());
  return out;
}

std::vector<Text> SplitLines(const Text& text, bool keep_ends, Budget& budget) {
  std::vector<Text> out;
  budget.Copy(text);
  budget.Scan(text.size());
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const char32_t c = NextCodePoint(text.bytes(), &pos);
    const bool ends = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                      c == 0x2028 || c == 0x2029;
    if (!ends) continue;
    if (c == '\r' && pos < text.size() && text.bytes()[pos] == '\n') ++pos;
    budget.Elements(1);
    out.push_back(text.Slice(begin, keep_ends ? pos : at));
    begin = pos;
  }
  if (begin < text.size()) out.push_back(text.Slice(begin));
  return out;
}

Text ReplaceText(const Text& text, const Text& from, const Text& to, int64_t count,
                 Budget& budget) {
  const std::string& bytes = text.bytes();
  Text out;
  size_t copied = 0;
  budget.Copy(text);
  const auto replace_at = [&](size_t at) {
    budget.Bytes(at - copied);
    budget.Copy(to);
    budget.Step();
    out.Append(text, copied, at);
    out.Append(to);
    copied = at + from.size();
    --count;
  };
  if (from.empty()) {
    // As in Python, an empty search string inserts the replacement before every character and at
    // the end.
    for (size_t at = 0; at <= bytes.size() && count != 0; ++at) {
      if (at < bytes.size() && (bytes[at] & 0xC0) == 0x80) continue;
      replace_at(at);
    }
  } else {
    for (size_t at = FindBytes(bytes, from.bytes(), 0, budget);
         at != std::string::npos && count != 0;
         at = FindBytes(bytes, from.bytes(), copied, budget)) {
      replace_at(at);
    }
  }
  budget.Bytes(bytes.size() - copied);
  out.Append(text, copied, bytes.size());
  return out;
}

Text JoinTexts(const Text& separator, const std::vector<Value>& items, bool only_strings,
               Budget& budget) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (only_strings && !items[i].IsText()) {
      Fail("join(): expected strings, found " + std::string(items[i].TypeName()));
    }
    const Text piece = ToText(items[i], budget);
    budget.Copy(piece);
    budget.Copy(separator);
    budget.Step();
    if (i > 0) out.Append(separator);
    out.Append(piece);
  }
  return out;
}

bool HasMethod(const Value& self, std::string_view name) {
  if (self.IsText()) return TextMethods().find(name) != TextMethods().end();
  if (self.IsDict()) {
    return name == "get" || name == "items" || name == "keys" || name == "values";
  }
  if (self.IsList()) return !self.list().is_iterator && (name == "index" || name == "count");
  return self.loop() != nullptr && name == "cycle";
}

Value CallMethod(const Value& self, const std::string& name, const Arguments& args,
                 Budget& budget) {
  if (self.IsText()) {
    // Charges the budget for reading and copying the text once.
    budget.Bytes(self.text().size());
    budget.Read(self.text().size());
    return TextMethods().find(name)->second(self.text(), args, budget);
  }
  if (self.IsDict()) return DictMethod(self.dict(), name, args, budget);
  if (self.IsList()) return ListMethod(self.list(), name, args, budget);
  if (args.positional.empty()) Fail("loop.cycle(): no items");
  return args.positional[self.loop()->index0 % args.positional.size()];
}

Value Attribute(const Value& value, const std::string& name, Budget& budget) {
  if (value.IsUndefined()) Fail(value.undefined().what + " is undefined");
  if (HasMethod(value, name)) {
    if (value.depth() >= kMaxContainerDepth) Fail("methods and containers are nested too deeply");
    auto callable = std::make_shared<Callable>();
    callable->name = name;
    callable->self = value;
    callable->is_method = true;
    budget.Bytes(sizeof(Callable));
    return std::shared_ptr<const Callable>(std::move(callable));
  }
  if (value.loop() != nullptr) return LoopAttribute(*value.loop(), name);
  if (Namespace* space = value.space()) {
    budget.Step(static_cast<int64_t>(space->items.size() / 16));
    const Value* found = space->Find(name);
    if (found != nullptr) return *found;
  }
  budget.Bytes(name.size());
  budget.Read(name.size());
  return Item(value, Value::Trusted(name), budget);
}

Value Subscript(const Value& value, const Value& index, Budget& budget) {
  Value item = Item(value, index, budget);
  if (!item.IsUndefined() || !index.IsText()) return item;
  if (value.IsDict() && value.dict().Find(index, budget) != nullptr) return item;
  return Attribute(value, index.text().bytes(), budget);
}

}  // namespace moeserve::chat
