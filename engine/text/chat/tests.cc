#include <cmath>
#include <map>

#include "engine/text/chat/builtins.h"
#include "engine/text/chat/format.h"
#include "engine/text/chat/operators.h"

namespace moeserve::chat {
namespace {

using Test = bool (*)(const Value&, const Arguments&, Budget&);

const Value& Other(const Arguments& args) {
  args.Check("test", {"other"}, 1);
  return *args.Get(0, "other");
}

int64_t Remainder(const Value& value, const Value& divisor, Budget& budget) {
  const Value rest = Binary(BinaryOp::kModulo, value, divisor, budget);
  if (!rest.IsInt()) return rest.IsNumber() && rest.number() == 0.0 ? 0 : 2;
  return rest.integer();
}

bool LessOrEqual(const Value& a, const Value& b, Budget& budget) {
  if (a.IsNumber() && b.IsNumber() && (a.IsFloat() || b.IsFloat())) return a.number() <= b.number();
  return !Less(b, a, budget);
}

bool HasOnlyCase(const Value& value, const char* method, Budget& budget) {
  return Truthy(CallMethod(ToText(value, budget), method, {}, budget));
}

const std::map<std::string, Test, std::less<>>& Tests() {
  using V = const Value&;
  using A = const Arguments&;
  using B = Budget&;
  static const auto* tests = [] {
    auto* out = new std::map<std::string, Test, std::less<>>{
        {"defined", [](V v, A, B) { return !v.IsUndefined(); }},
        {"undefined", [](V v, A, B) { return v.IsUndefined(); }},
        {"none", [](V v, A, B) { return v.IsNone(); }},
        {"boolean", [](V v, A, B) { return v.IsBool(); }},
        {"true", [](V v, A, B) { return v.IsBool() && v.boolean(); }},
        {"false", [](V v, A, B) { return v.IsBool() && !v.boolean(); }},
        {"integer", [](V v, A, B) { return v.IsInt() || v.IsBigInt(); }},
        {"float", [](V v, A, B) { return v.IsFloat() && !v.IsBigInt(); }},
        {"number", [](V v, A, B) { return v.IsNumber(); }},
        {"string", [](V v, A, B) { return v.IsText(); }},
        {"mapping", [](V v, A, B) { return v.IsDict(); }},
        {"iterable",
         [](V v, A, B) {
           return v.IsText() || v.IsList() || v.IsDict() || v.IsUndefined() || v.loop() != nullptr;
         }},
        {"sequence", [](V v, A, B) { return IsSequence(v) || v.IsDict() || v.IsUndefined(); }},
        {"callable", [](V v, A, B) { return v.callable() != nullptr || v.IsUndefined(); }},
        {"sameas",
         [](V v, A a, B b) {
           const Value& other = Other(a);
           if (v.IsText()) b.Read(v.text().size());
           return v.TypeName() == other.TypeName() && SimpleEqual(v, other);
         }},
        {"eq", [](V v, A a, B b) { return Equal(v, Other(a), b); }},
        {"ne", [](V v, A a, B b) { return !Equal(v, Other(a), b); }},
        {"lt", [](V v, A a, B b) { return Less(v, Other(a), b); }},
        {"gt", [](V v, A a, B b) { return Less(Other(a), v, b); }},
        {"le", [](V v, A a, B b) { return LessOrEqual(v, Other(a), b); }},
        {"ge", [](V v, A a, B b) { return LessOrEqual(Other(a), v, b); }},
        {"in", [](V v, A a, B b) { return Contains(Other(a), v, b); }},
        {"odd", [](V v, A, B b) { return Remainder(v, int64_t{2}, b) == 1; }},
        {"even", [](V v, A, B b) { return Remainder(v, int64_t{2}, b) == 0; }},
        {"divisibleby", [](V v, A a, B b) { return Remainder(v, Other(a), b) == 0; }},
        {"lower", [](V v, A, B b) { return HasOnlyCase(v, "islower", b); }},
        {"upper", [](V v, A, B b) { return HasOnlyCase(v, "isupper", b); }},
    };
    const std::pair<const char*, const char*> aliases[] = {
        {"==", "eq"}, {"equalto", "eq"},     {"!=", "ne"}, {"<", "lt"}, {"lessthan", "lt"},
        {">", "gt"},  {"greaterthan", "gt"}, {"<=", "le"}, {">=", "ge"}};
    for (const auto& [alias, name] : aliases) (*out)[alias] = out->at(name);
    return out;
  }();
  return *tests;
}

}  // namespace

bool ApplyTest(const std::string& name, const Value& value, const Arguments& args, Budget& budget) {
  budget.Step();
  const auto it = Tests().find(name);
  if (it == Tests().end()) Fail("no test named '" + name.substr(0, 64) + "'");
  return it->second(value, args, budget);
}

}  // namespace moeserve::chat
