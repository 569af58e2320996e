// The tree of a template.
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
  kDict,       // children: key, value, key, value...
  kAttribute,  // children[0].name
  kItem,       // children[0][children[1]]
  kSlice,      // children[0][children[1]:children[2]:children[3]]; null: left out
  kCall,       // children[0](children[1...], named)
  kFilter,     // children[0] | name(children[1...], named); children[0] may be null
  kTest,       // children[0] is name(children[1...], named)
  kNot,
  kNegate,
  kPositive,
  kAnd,
  kOr,
  kCompare,  // children[0] compare[0] children[1] compare[1] ...
  kConcat,
  kBinary,
  kConditional,  // children[0] if children[1] else children[2]; the last may be null
};

enum class CompareOp { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 0;
  int depth = 1;  // of this tree
  Value constant;
  std::string name;
  BinaryOp op = BinaryOp::kAdd;
  std::vector<ExprPtr> children;
  std::vector<std::pair<std::string, ExprPtr>> named;
  std::vector<CompareOp> compare;
  ExprPtr spread;        // of a call: *spread
  ExprPtr named_spread;  // of a call: **named_spread
};

struct Stmt;
using Body = std::vector<std::unique_ptr<Stmt>>;

// What is assigned to: a name, the attribute of a namespace, or several targets.
struct Target {
  std::string name;
  std::string attribute;         // of the namespace `name`; empty: the variable itself
  std::vector<Target> elements;  // not empty: a tuple
};

struct MacroNode {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;  // of the last parameters
  Body body;
};

enum class StmtKind {
  kData,
  kPrint,
  kIf,        // branches in order, then `otherwise`
  kFor,       // `expr` elements, `condition` may be null, `body`, `otherwise`
  kSet,       // target = expr
  kSetBlock,  // target = body, through the filters of `expr` if not null
  kMacro,
  kCall,    // the call `expr`, which can call `macro` back
  kFilter,  // body through `expr`
  kWith,    // `bindings`, body
  kScope,   // body
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
