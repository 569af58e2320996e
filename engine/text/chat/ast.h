// The syntax tree of a chat template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/chat/operators.h"
#include "engine/text/chat/value.h"

namespace moeserve::chat {

inline constexpr int kMaxTreeDepth = 400;

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

enum class ExprKind {
  kConstant,
  kName,
  kList,
  kTuple,
  kDict,       // children: key, value, key, value, ...
  kAttribute,  // children[0].name
  kItem,       // children[0][children[1]]
  kSlice,      // children[0][children[1]:children[2]:children[3]]; an omitted part is null
  kCall,       // children[0](children[1], ..., named)
  // children[0] | name(children[1], ..., named); children[0] is null for the first filter in a
  // {% filter %} or {% set %} tag, which applies to the tag's body.
  kFilter,
  kTest,  // children[0] is name(children[1], ..., named)
  kNot,
  kNegate,
  kPositive,
  kAnd,
  kOr,
  kCompare,  // children[0] compare[0] children[1] compare[1] children[2] ...
  kConcat,
  kBinary,
  kConditional,  // children[0] if children[1] else children[2]; children[2] may be null
};

enum class CompareOp { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 0;
  int depth = 1;  // depth of the tree under this node, the node included
  Value constant;
  std::string name;
  BinaryOp op = BinaryOp::kAdd;
  std::vector<ExprPtr> children;
  std::vector<std::pair<std::string, ExprPtr>> named;
  std::vector<CompareOp> compare;
  ExprPtr spread;        // kCall: the operand of *
  ExprPtr named_spread;  // kCall: the operand of **
};

struct Stmt;
using Body = std::vector<std::unique_ptr<Stmt>>;

// The target of an assignment: a variable, an attribute of a namespace, or several targets.
struct Target {
  std::string name;
  std::string attribute;  // attribute of the namespace `name`; empty: the variable `name` itself
  std::vector<Target> elements;  // if not empty, the target is the tuple of these targets
};

struct MacroNode {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;  // default values of the last parameters
  Body body;
};

enum class StmtKind {
  kData,
  kPrint,
  kIf,        // `branches` in order, then `otherwise`
  kFor,       // loops over `expr`, with an optional `condition`; `body`, `otherwise`
  kSet,       // target = expr
  kSetBlock,  // target = body, passed through the filters in `expr` if it is not null
  kMacro,
  kCall,    // {% call %}: calls `expr`, which can call the tag's body, `macro`, as caller()
  kFilter,  // the body, passed through the filters in `expr`
  kWith,    // `bindings` and `body`
  kScope,   // a body with its own variables
  kBreak,
  kContinue,
};

struct Stmt {
  StmtKind kind = StmtKind::kData;
  int line = 0;
  Text data;
  ExprPtr expr;
  ExprPtr condition;
  Target target;
  std::vector<std::pair<ExprPtr, Body>> branches;
  std::vector<std::pair<Target, ExprPtr>> bindings;
  Body body;
  Body otherwise;
  MacroNode macro;
};

}  // namespace moeserve::chat
