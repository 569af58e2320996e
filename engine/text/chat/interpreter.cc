#include "engine/text/chat/interpreter.h"

#include <algorithm>

#include "base/error_text.h"
#include "engine/text/chat/builtins.h"
#include "engine/text/chat/format.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

constexpr size_t kMaxMessageBytes = 4096;  // of raise_exception()

constexpr const char* kGlobals[] = {"range", "namespace", "dict", "raise_exception",
                                    "strftime_now"};

Value Range(const Arguments& args, Budget& budget) {
  if (args.positional.empty() || args.positional.size() > 3 || !args.named.empty()) {
    Fail("range(): expected 1 to 3 arguments");
  }
  int64_t bounds[3] = {0, 0, 1};
  for (size_t i = 0; i < args.positional.size(); ++i) {
    const Value& value = args.positional[i];
    if (!value.IsInt() && !value.IsBool()) {
      Fail("range(): expected integers, found " + std::string(value.TypeName()));
    }
    bounds[args.positional.size() == 1 ? 1 : i] = value.integer();
  }
  const auto [begin, end, step] = bounds;
  if (step == 0) Fail("range(): the step must not be zero");
  const bool empty = step > 0 ? begin >= end : begin <= end;
  const auto distance =
      static_cast<unsigned __int128>(empty      ? 0
                                     : step > 0 ? static_cast<__int128>(end) - begin
                                                : static_cast<__int128>(begin) - end);
  const auto size = step > 0 ? static_cast<unsigned __int128>(step)
                             : static_cast<unsigned __int128>(-static_cast<__int128>(step));
  const unsigned __int128 count = (distance + size - 1) / size;
  if (count > static_cast<unsigned __int128>(kMaxRange)) {
    Fail(Concat("range(): more than ", kMaxRange, " numbers"));
  }
  budget.Step(static_cast<int64_t>(count));
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    items.push_back(static_cast<int64_t>(begin + static_cast<__int128>(i) * step));
  }
  return MakeList(std::move(items), false, budget);
}

Value FormatTime(const Arguments& args, std::time_t now) {
  args.Check("strftime_now", {"format"}, 1);
  const Value& format = *args.Get(0, "format");
  if (!format.IsText()) Fail("strftime_now(): expected a string");
  if (format.text().size() > 256) Fail("strftime_now(): the format is too long");
  std::tm parts{};
  localtime_r(&now, &parts);
  char buffer[4096];
  // The appended space distinguishes an empty result from a buffer that is too small.
  const std::string with_space = format.text().bytes() + " ";
  const size_t size = std::strftime(buffer, sizeof(buffer), with_space.c_str(), &parts);
  if (size == 0 || !IsValidUtf8(std::string_view(buffer, size - 1))) {
    Fail("strftime_now(): the format is not usable");
  }
  // strftime() copies characters outside conversions to the result, so the result is as trusted as
  // the format.
  const bool trusted = format.text().IsTrusted(0, format.text().size());
  return Text(std::string(buffer, size - 1), trusted);
}

}  // namespace

void Scope::Set(const std::string& name, Value value) {
  for (auto& [key, old] : variables) {
    if (key != name) continue;
    old = std::move(value);
    return;
  }
  variables.emplace_back(name, std::move(value));
}

// Counts nested evaluations, to limit the stack depth.
class Interpreter::Depth {
 public:
  explicit Depth(int* depth) : depth_(depth) {
    if (++*depth_ > kMaxEvaluationDepth) {
      --*depth_;
      Fail("the template is nested too deeply, or a macro calls itself without end");
    }
  }
  ~Depth() { --*depth_; }

 private:
  int* const depth_;
};

Interpreter::Interpreter(const RenderLimits& limits, std::time_t now) : budget_(limits), now_(now) {
  for (const char* name : kGlobals) {
    auto function = std::make_shared<Callable>();
    function->name = name;
    Define(name, std::shared_ptr<const Callable>(std::move(function)));
  }
}

Interpreter::~Interpreter() {
  for (const auto& space : namespaces_) space->items.clear();
  for (const ScopePtr& scope : captured_) scope->variables.clear();
}

Text Interpreter::Run(const Body& body) {
  Text out;
  Execute(body, root_, out);
  return out;
}

Interpreter::ScopePtr Interpreter::Inner(const ScopePtr& parent) {
  budget_.Bytes(sizeof(Scope));
  auto scope = std::make_shared<Scope>();
  scope->parent = parent;
  return scope;
}

void Interpreter::Write(const Text& text, Text& out) {
  if (text.size() > budget_.limits().max_output_bytes - out.size()) {
    throw TemplateError{Concat("the rendered conversation is larger than ",
                               budget_.limits().max_output_bytes, " bytes"),
                        true};
  }
  budget_.Copy(text);
  out.Append(text);
}

Interpreter::Flow Interpreter::Execute(const Body& body, const ScopePtr& scope, Text& out) {
  const Depth depth(&depth_);
  for (const auto& stmt : body) {
    try {
      budget_.Step();
      const Flow flow = ExecuteOne(*stmt, scope, out);
      if (flow != Flow::kNext) return flow;
    } catch (TemplateError& error) {
      if (error.line == 0) error.line = stmt->line;
      throw;
    }
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::ExecuteOne(const Stmt& stmt, const ScopePtr& scope, Text& out) {
  switch (stmt.kind) {
    case StmtKind::kData:
      Write(stmt.data, out);
      break;
    case StmtKind::kPrint:
      Write(ToText(Evaluate(*stmt.expr, scope), budget_), out);
      break;
    case StmtKind::kIf:
      for (const auto& [condition, body] : stmt.branches) {
        if (Truthy(Evaluate(*condition, scope))) return Execute(body, scope, out);
      }
      return Execute(stmt.otherwise, scope, out);
    case StmtKind::kFor:
      return RunLoop(stmt, scope, out);
    case StmtKind::kSet:
      Assign(stmt.target, Evaluate(*stmt.expr, scope), scope);
      break;
    case StmtKind::kSetBlock:
      RunSetBlock(stmt, scope);
      break;
    case StmtKind::kMacro:
      scope->Set(stmt.macro.name, MakeMacro(stmt.macro, scope));
      break;
    case StmtKind::kCall: {
      const Value caller = MakeMacro(stmt.macro, scope);
      Write(ToText(EvaluateCall(*stmt.expr, &caller, scope), budget_), out);
      break;
    }
    case StmtKind::kFilter: {
      Text captured;
      Execute(stmt.body, Inner(scope), captured);
      const Value input = std::move(captured);
      Write(ToText(EvaluateFilter(*stmt.expr, &input, scope), budget_), out);
      break;
    }
    case StmtKind::kWith: {
      const ScopePtr inner = Inner(scope);
      for (const auto& [target, expr] : stmt.bindings) {
        Assign(target, Evaluate(*expr, scope), inner);
      }
      return Execute(stmt.body, inner, out);
    }
    case StmtKind::kScope:
      return Execute(stmt.body, Inner(scope), out);
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::RunLoop(const Stmt& stmt, const ScopePtr& scope, Text& out) {
  const std::vector<Value> source = Iterate(Evaluate(*stmt.expr, scope), budget_);
  const auto loop = std::make_shared<LoopState>();
  budget_.Elements(source.size());
  size_t next = 0;
  loop->pull = [&] {
    while (next < source.size()) {
      budget_.Step();
      const Value& item = source[next++];
      if (stmt.condition != nullptr) {
        const ScopePtr inner = Inner(scope);
        Assign(stmt.target, item, inner);
        if (!Truthy(Evaluate(*stmt.condition, inner))) continue;
      }
      loop->depth = std::max(loop->depth, item.depth() + 1);
      if (loop->depth > kMaxContainerDepth) Fail("loops and containers are nested too deeply");
      loop->items.push_back(item);
      return true;
    }
    return false;
  };
  // loop->pull refers to local variables of this function, so it is cleared on return.
  struct Closer {
    LoopState& loop;
    ~Closer() { loop.pull = nullptr; }
  } closer{*loop};
  if (!loop->Has(0)) return Execute(stmt.otherwise, Inner(scope), out);
  for (size_t i = 0; loop->Has(i); ++i) {
    budget_.Step();
    loop->index0 = i;
    const ScopePtr inner = Inner(scope);
    inner->Set("loop", loop);
    Assign(stmt.target, loop->items[i], inner);
    if (Execute(stmt.body, inner, out) == Flow::kBreak) break;
  }
  return Flow::kNext;
}

void Interpreter::RunSetBlock(const Stmt& stmt, const ScopePtr& scope) {
  Text captured;
  Execute(stmt.body, Inner(scope), captured);
  Value value = std::move(captured);
  if (stmt.expr != nullptr) value = EvaluateFilter(*stmt.expr, &value, scope);
  Assign(stmt.target, value, scope);
}

Value Interpreter::MakeMacro(const MacroNode& node, const ScopePtr& scope) {
  auto macro = std::make_shared<Callable>();
  macro->name = node.name;
  macro->macro = &node;
  macro->closure = scope;
  budget_.Bytes(sizeof(Callable));
  captured_.push_back(scope);
  return std::shared_ptr<const Callable>(std::move(macro));
}

void Interpreter::Assign(const Target& target, const Value& value, const ScopePtr& scope) {
  if (!target.elements.empty()) {
    const std::vector<Value> items = Iterate(value, budget_);
    if (items.size() != target.elements.size()) {
      Fail(Concat("expected ", target.elements.size(), " values to unpack, found ", items.size()));
    }
    for (size_t i = 0; i < items.size(); ++i) Assign(target.elements[i], items[i], scope);
    return;
  }
  if (target.attribute.empty()) {
    budget_.Step(static_cast<int64_t>(scope->variables.size() / 16));
    scope->Set(target.name, value);
    return;
  }
  Namespace* space = Lookup(target.name, *scope).space();
  if (space == nullptr) Fail("cannot assign attribute on non-namespace object");
  budget_.Step(static_cast<int64_t>(space->items.size() / 16));
  if (Value* old = space->Find(target.attribute)) {
    // `keep` destroys the old value only after the assignment, because the new value may refer to
    // it.
    const Value keep = std::exchange(*old, value);
  } else {
    budget_.Elements(1);
    space->items.emplace_back(target.attribute, value);
  }
}

Value Interpreter::Lookup(const std::string& name, const Scope& scope) {
  for (const Scope* at = &scope; at != nullptr; at = at->parent.get()) {
    budget_.Step(1 + static_cast<int64_t>(at->variables.size() / 16));
    for (const auto& [key, value] : at->variables) {
      if (key == name) return value;
    }
  }
  return Undefined{"'" + name.substr(0, 64) + "'"};
}

Value Interpreter::Evaluate(const Expr& expr, const ScopePtr& scope) {
  const Depth depth(&depth_);
  budget_.Step();
  const auto child = [&](size_t i) { return Evaluate(*expr.children[i], scope); };
  switch (expr.kind) {
    case ExprKind::kConstant:
      return expr.constant;
    case ExprKind::kName:
      return Lookup(expr.name, *scope);
    case ExprKind::kList:
    case ExprKind::kTuple: {
      std::vector<Value> items;
      for (size_t i = 0; i < expr.children.size(); ++i) items.push_back(child(i));
      return MakeList(std::move(items), expr.kind == ExprKind::kTuple, budget_);
    }
    case ExprKind::kDict:
      return EvaluateDict(expr, scope);
    case ExprKind::kAttribute:
      return Attribute(child(0), expr.name, budget_);
    case ExprKind::kItem: {
      const Value object = child(0);
      return Subscript(object, child(1), budget_);
    }
    case ExprKind::kSlice: {
      const Value object = child(0);
      const auto bound = [&](size_t i) {
        return expr.children[i] == nullptr ? Value(None{}) : child(i);
      };
      const Value begin = bound(1);
      const Value end = bound(2);
      return Slice(object, begin, end, bound(3), budget_);
    }
    case ExprKind::kCall:
      return EvaluateCall(expr, nullptr, scope);
    case ExprKind::kFilter:
      return EvaluateFilter(expr, nullptr, scope);
    case ExprKind::kTest: {
      const Value value = child(0);
      return ApplyTest(expr.name, value, EvaluateArguments(expr, scope), budget_);
    }
    case ExprKind::kNot:
      return !Truthy(child(0));
    case ExprKind::kNegate:
      return Negate(child(0));
    case ExprKind::kPositive:
      return Negate(Negate(child(0)));
    case ExprKind::kAnd: {
      Value left = child(0);
      return Truthy(left) ? child(1) : left;
    }
    case ExprKind::kOr: {
      Value left = child(0);
      return Truthy(left) ? left : child(1);
    }
    case ExprKind::kCompare:
      return EvaluateCompare(expr, scope);
    case ExprKind::kConcat: {
      Text out;
      for (size_t i = 0; i < expr.children.size(); ++i) {
        const Text piece = ToText(child(i), budget_);
        budget_.Copy(piece);
        out.Append(piece);
      }
      return out;
    }
    case ExprKind::kBinary: {
      const Value left = child(0);
      return Binary(expr.op, left, child(1), budget_);
    }
    case ExprKind::kConditional:
      if (Truthy(child(1))) return child(0);
      if (expr.children[2] == nullptr) return Undefined{"the inline if-expression without else"};
      return child(2);
  }
  return Undefined{"the expression"};
}

Value Interpreter::EvaluateDict(const Expr& expr, const ScopePtr& scope) {
  Dict dict;
  budget_.Elements(expr.children.size());
  for (size_t i = 0; i < expr.children.size(); i += 2) {
    Value key = Evaluate(*expr.children[i], scope);
    if (key.IsDict() || (key.IsList() && !key.list().is_tuple)) {
      Fail("unhashable type: '" + std::string(key.TypeName()) + "'");
    }
    dict.Set(std::move(key), Evaluate(*expr.children[i + 1], scope), budget_);
  }
  if (dict.depth > kMaxContainerDepth) Fail("dictionaries are nested too deeply");
  return dict;
}

Value Interpreter::EvaluateCompare(const Expr& expr, const ScopePtr& scope) {
  Value left = Evaluate(*expr.children[0], scope);
  for (size_t i = 0; i < expr.compare.size(); ++i) {
    Value right = Evaluate(*expr.children[i + 1], scope);
    bool holds = false;
    switch (expr.compare[i]) {
      case CompareOp::kEqual:
        holds = Equal(left, right, budget_);
        break;
      case CompareOp::kNotEqual:
        holds = !Equal(left, right, budget_);
        break;
      case CompareOp::kLess:
        holds = Less(left, right, budget_);
        break;
      case CompareOp::kLessEqual:
        holds = ApplyTest("le", left, Arguments{{right}, {}}, budget_);
        break;
      case CompareOp::kGreater:
        holds = Less(right, left, budget_);
        break;
      case CompareOp::kGreaterEqual:
        holds = ApplyTest("ge", left, Arguments{{right}, {}}, budget_);
        break;
      case CompareOp::kIn:
        holds = Contains(right, left, budget_);
        break;
      case CompareOp::kNotIn:
        holds = !Contains(right, left, budget_);
        break;
    }
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

Arguments Interpreter::EvaluateArguments(const Expr& expr, const ScopePtr& scope) {
  Arguments args;
  for (size_t i = 1; i < expr.children.size(); ++i) {
    args.positional.push_back(Evaluate(*expr.children[i], scope));
  }
  for (const auto& [name, value] : expr.named) {
    args.named.emplace_back(name, Evaluate(*value, scope));
  }
  if (expr.spread != nullptr) {
    for (Value& value : Iterate(Evaluate(*expr.spread, scope), budget_)) {
      args.positional.push_back(std::move(value));
    }
  }
  if (expr.named_spread != nullptr) {
    const Value named = Evaluate(*expr.named_spread, scope);
    if (!named.IsDict()) Fail("the argument after ** must be a mapping");
    for (const auto& [name, value] : named.dict().items) {
      if (!name.IsText()) Fail("the names of arguments must be strings");
      budget_.Copy(name.text());
      args.named.emplace_back(name.text().bytes(), value);
    }
  }
  budget_.Elements(args.positional.size() + args.named.size());
  budget_.Step(static_cast<int64_t>(args.named.size() * args.named.size() / 8));
  return args;
}

Value Interpreter::EvaluateFilter(const Expr& expr, const Value* input, const ScopePtr& scope) {
  const Depth depth(&depth_);
  Value value;
  if (expr.children[0] == nullptr) {
    if (input == nullptr) Fail("a filter has no input");
    value = *input;
  } else if (expr.children[0]->kind == ExprKind::kFilter && input != nullptr) {
    value = EvaluateFilter(*expr.children[0], input, scope);
  } else {
    value = Evaluate(*expr.children[0], scope);
  }
  return ApplyFilter(expr.name, value, EvaluateArguments(expr, scope), budget_);
}

Value Interpreter::EvaluateCall(const Expr& expr, const Value* caller, const ScopePtr& scope) {
  const Value callee = Evaluate(*expr.children[0], scope);
  if (callee.IsUndefined()) Fail(callee.undefined().what + " is undefined");
  const Callable* callable = callee.callable();
  if (callable == nullptr) {
    Fail("'" + std::string(callee.TypeName()) + "' object is not callable");
  }
  const Arguments args = EvaluateArguments(expr, scope);
  if (callable->macro != nullptr) return CallMacro(*callable, args, caller);
  if (caller != nullptr) Fail("only a macro can be used in {% call %}");
  if (callable->is_method) return CallMethod(callable->self, callable->name, args, budget_);
  return CallGlobal(callable->name, args);
}

Value Interpreter::CallMacro(const Callable& callable, const Arguments& args, const Value* caller) {
  const MacroNode& macro = *callable.macro;
  const std::vector<std::string_view> names(macro.parameters.begin(), macro.parameters.end());
  // Names are looked up one by one.
  budget_.Step(static_cast<int64_t>(names.size() * (names.size() + args.named.size()) / 8));
  args.Check(macro.name, names);
  const ScopePtr scope = Inner(callable.closure);
  scope->Set("caller", caller == nullptr ? Value(Undefined{"'caller'"}) : *caller);
  const size_t first_default = macro.parameters.size() - macro.defaults.size();
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const std::string& name = macro.parameters[i];
    if (const Value* given = args.Get(i, name)) {
      scope->Set(name, *given);
    } else if (i >= first_default) {
      scope->Set(name, Evaluate(*macro.defaults[i - first_default], scope));
    } else {
      scope->Set(name, Undefined{"parameter '" + name.substr(0, 64) + "'"});
    }
  }
  Text out;
  Execute(macro.body, scope, out);
  return out;
}

Value Interpreter::CallGlobal(const std::string& name, const Arguments& args) {
  if (name == "range") return Range(args, budget_);
  if (name == "strftime_now") return FormatTime(args, now_);
  if (name == "raise_exception") {
    args.Check(name, {"message"}, 1);
    std::string message = ToText(*args.Get(0, "message"), budget_).bytes();
    if (message.size() > kMaxMessageBytes) {
      size_t end = kMaxMessageBytes;
      while (end > 0 && (message[end] & 0xC0) == 0x80) --end;
      message.resize(end);
    }
    throw TemplateError{std::move(message), true};
  }
  // dict() and namespace() take the pairs of a dictionary and then named arguments.
  if (args.positional.size() > 1) Fail(name + "(): expected at most one argument");
  Dict dict;
  if (!args.positional.empty()) {
    const Value& given = args.positional[0];
    if (!given.IsDict()) Fail(name + "(): expected a mapping");
    budget_.Elements(given.dict().items.size());
    dict = given.dict();
  }
  for (const auto& [key, value] : args.named) dict.Set(Value::Trusted(key), value, budget_);
  if (dict.depth > kMaxContainerDepth) Fail("dictionaries are nested too deeply");
  if (name == "dict") return dict;
  auto space = std::make_shared<Namespace>();
  budget_.Bytes(sizeof(Namespace));
  for (auto& [key, value] : dict.items) {
    if (!key.IsText()) Fail("namespace(): names must be strings");
    budget_.Copy(key.text());
    space->items.emplace_back(key.text().bytes(), std::move(value));
  }
  namespaces_.push_back(space);
  return space;
}

}  // namespace moeserve::chat
