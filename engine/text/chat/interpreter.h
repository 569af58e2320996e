// Executes the syntax tree of a template.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/chat/ast.h"
#include "engine/text/chat/budget.h"

namespace moeserve::chat {

// The variables of one scope; `parent` is the enclosing scope.
struct Scope {
  std::vector<std::pair<std::string, Value>> variables;
  std::shared_ptr<Scope> parent;

  void Set(const std::string& name, Value value);
};

// An object serves one rendering, on one thread. Errors are thrown as TemplateError.
class Interpreter {
 public:
  // `now` is the time that strftime_now() formats, in local time.
  Interpreter(const RenderLimits& limits, std::time_t now);
  ~Interpreter();

  Budget& budget() { return budget_; }
  void Define(const std::string& name, Value value) { root_->Set(name, std::move(value)); }
  Text Run(const Body& body);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  using ScopePtr = std::shared_ptr<Scope>;
  class Depth;

  Flow Execute(const Body& body, const ScopePtr& scope, Text& out);
  Flow ExecuteOne(const Stmt& stmt, const ScopePtr& scope, Text& out);
  Flow RunLoop(const Stmt& stmt, const ScopePtr& scope, Text& out);
  void RunSetBlock(const Stmt& stmt, const ScopePtr& scope);
  Value MakeMacro(const MacroNode& macro, const ScopePtr& scope);
  ScopePtr Inner(const ScopePtr& parent);
  void Write(const Text& text, Text& out);
  void Assign(const Target& target, const Value& value, const ScopePtr& scope);

  Value Evaluate(const Expr& expr, const ScopePtr& scope);
  Value Lookup(const std::string& name, const Scope& scope);
  Value EvaluateDict(const Expr& expr, const ScopePtr& scope);
  Value EvaluateCompare(const Expr& expr, const ScopePtr& scope);
  // `caller` is the body of a {% call %} block as a callable; null in calls without such a block.
  Value EvaluateCall(const Expr& expr, const Value* caller, const ScopePtr& scope);
  // `input` is the operand of the first filter in a chain of filters if that filter has none.
  Value EvaluateFilter(const Expr& expr, const Value* input, const ScopePtr& scope);
  Arguments EvaluateArguments(const Expr& expr, const ScopePtr& scope);
  Value CallMacro(const Callable& macro, const Arguments& args, const Value* caller);
  Value CallGlobal(const std::string& name, const Arguments& args);

  Budget budget_;
  const std::time_t now_;
  const ScopePtr root_ = std::make_shared<Scope>();
  int depth_ = 0;
  // Namespaces, and scopes that macros capture, can form reference cycles; the destructor clears
  // them.
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  std::vector<ScopePtr> captured_;
};

}  // namespace moeserve::chat
