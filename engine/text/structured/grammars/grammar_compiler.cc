#include "engine/text/structured/grammars/grammar_compiler.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/text/structured/automata/pattern.h"
#include "engine/text/structured/grammars/grammar_syntax.h"
#include "engine/text/structured/rules/rule_builder.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

using ExprKind = GrammarExpr::Kind;

// Largest nesting of rules in a text; limits the memory of a state.
constexpr int kMaxRuleDepth = 600;
constexpr size_t kMaxRules = 2000;
// Largest number of rules that refer to each other before the first byte; limits the use of the
// stack.
constexpr int kMaxLead = 200;
// A part of a grammar that refers to no recursive rule becomes one automaton if it has at most this
// many nodes and the automaton at most this many states. Otherwise its parts become automata.
constexpr int64_t kMaxRegularNodes = 2000;
constexpr int kMaxRegularStates = 2000;
constexpr int kMaxRegularDepth = 50;
// Expressions of rules in each other are measured down to this depth and that of one more rule;
// limits the use of the stack.
constexpr int kMaxMeasuredDepth = 2000;
// The regular alternatives of an expression are joined while they have at most this many nodes
// together; limits the memory of their tree.
constexpr int64_t kMaxJoinedNodes = 25 * kMaxRegularNodes;

class GrammarCompiler {
 public:
  GrammarCompiler(GrammarSyntax syntax, DfaPtr any_string, const ByteSet& spellable,
                  CompileBudget* budget)
      : syntax_(std::move(syntax)), spellable_(spellable), budget_(budget) {
    grammar_.dfas.push_back(std::move(any_string));
    grammar_.any_string = 0;
    grammar_.max_depth = kMaxRuleDepth;
    grammar_.end_cost = 1;
  }

  Result<Grammar> Run() {
    MOESERVE_RETURN_IF_ERROR(IndexRules());
    const auto root = indices_.find(syntax_.root);
    if (root == indices_.end()) {
      return Error(Concat("the rule \"", syntax_.root, "\", which describes the whole text, is ",
                          "missing"));
    }
    for (size_t i = 0; i < syntax_.rules.size(); ++i) {
      MOESERVE_RETURN_IF_ERROR(MeasureRule(static_cast<int>(i), 0));
    }
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, NodeOf(root->second));
    while (!queue_.empty()) {
      const int rule = queue_.back();
      queue_.pop_back();
      MOESERVE_RETURN_IF_ERROR(Fill(rule));
    }
    grammar_.root = node;
    MOESERVE_RETURN_IF_ERROR(grammar_.Finish(spellable_, budget_));
    if (grammar_.nodes[node].distance >= kUnreachable) {
      return Error("no text matches that the model's vocabulary can spell");
    }
    if (grammar_.nodes[node].height > kMaxRuleDepth) {
      return Error(Concat("every text nests rules deeper than ", kMaxRuleDepth));
    }
    MOESERVE_RETURN_IF_ERROR(CheckLeads());
    return std::move(grammar_);
  }

 private:
  // The size of an expression with all rules written out, if it refers to no recursive rule.
  using Size = std::optional<int64_t>;

  struct Rule {
    enum class Mark { kNew, kOpen, kDone } mark = Mark::kNew;
    Size size;
    NodeId node = kNoNode;
  };

  static Status Error(const std::string& what) {
    return absl::InvalidArgumentError("grammar: " + what);
  }

  Status IndexRules() {
    if (syntax_.rules.size() > kMaxRules) {
      return Error(Concat("more than ", kMaxRules, " rules"));
    }
    rules_.resize(syntax_.rules.size());
    for (size_t i = 0; i < syntax_.rules.size(); ++i) {
      const std::string& name = syntax_.rules[i].name;
      if (!indices_.try_emplace(name, static_cast<int>(i)).second) {
        return Error("the rule " + moeserve::Quoted(name, 64) + " is defined twice");
      }
    }
    return absl::OkStatus();
  }

  Result<int> IndexOf(const std::string& name) const {
    const auto it = indices_.find(name);
    if (it != indices_.end()) return it->second;
    return Error("the rule " + moeserve::Quoted(name, 64) + " is not defined");
  }

  // Computes Rule::size of the rule and those that it refers to. A rule that is reached again while
  // it is being measured is recursive, and so has no size.
  Status MeasureRule(int index, int depth) {
    Rule& rule = rules_[index];
    if (rule.mark != Rule::Mark::kNew) return absl::OkStatus();
    rule.mark = Rule::Mark::kOpen;
    MOESERVE_ASSIGN_OR_RETURN(const Size size, SizeOf(*syntax_.rules[index].body, depth));
    rules_[index].mark = Rule::Mark::kDone;
    rules_[index].size = size;
    return absl::OkStatus();
  }

  // `depth`: the number of rules that led to this expression.
  Result<Size> SizeOf(const GrammarExpr& expr, int depth) {
    ++measured_depth_;
    Result<Size> size = MeasureExpr(expr, depth);
    --measured_depth_;
    return size;
  }

  Result<Size> MeasureExpr(const GrammarExpr& expr, int depth) {
    MOESERVE_RETURN_IF_ERROR(budget_->Tick());
    switch (expr.kind) {
      case ExprKind::kPattern:
        return Size(SizeOf(*expr.pattern));
      case ExprKind::kRule: {
        MOESERVE_ASSIGN_OR_RETURN(const int index, IndexOf(expr.rule));
        // A long chain of rules counts as recursive, which only changes how it is matched.
        const bool deep = depth > kMaxRegularDepth || measured_depth_ > kMaxMeasuredDepth;
        if (deep && rules_[index].mark == Rule::Mark::kNew) return Size();
        MOESERVE_RETURN_IF_ERROR(MeasureRule(index, depth + 1));
        if (rules_[index].mark == Rule::Mark::kOpen) return Size();
        return rules_[index].size;
      }
      default:
        break;
    }
    int64_t total = 1;
    bool regular = true;
    for (const auto& child : expr.children) {
      MOESERVE_ASSIGN_OR_RETURN(const Size size, SizeOf(*child, depth));
      regular &= size.has_value();
      total += size.value_or(0);
    }
    if (expr.kind == ExprKind::kRepeat) {
      total *= std::max({expr.min, expr.max, 1});
    }
    if (!regular || total > kMaxRegularNodes) return Size();
    return Size(total);
  }

  static int64_t SizeOf(const PatternNode& node) {
    int64_t total = 1;
    for (const auto& child : node.children) total += SizeOf(*child);
    if (node.kind == PatternNode::Kind::kRepeat) total *= std::max({node.min, node.max, 1});
    return std::min<int64_t>(total, 1 << 30);
  }

  Result<NodeId> AddNode(Node node) {
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1));
    grammar_.nodes.push_back(std::move(node));
    return static_cast<NodeId>(grammar_.nodes.size() - 1);
  }

  Result<NodeId> NodeOf(int index) {
    Rule& rule = rules_[index];
    if (rule.node == kNoNode) {
      Node node;
      node.value = RuleNode();
      MOESERVE_ASSIGN_OR_RETURN(rule.node, AddNode(std::move(node)));
      queue_.push_back(index);
    }
    return rule.node;
  }

  Status Fill(int index) {
    RuleBuilder builder(budget_);
    const int32_t end = builder.AddState();
    const NodeId self = rules_[index].node;
    MOESERVE_RETURN_IF_ERROR(Add(*syntax_.rules[index].body, RuleBuilder::kStart, end, &builder));
    MOESERVE_RETURN_IF_ERROR(builder.RemoveLeftRecursion(self, end));
    MOESERVE_ASSIGN_OR_RETURN(RuleNode node, builder.Build(end));
    grammar_.nodes[self].value = std::move(node);
    return absl::OkStatus();
  }

  // Adds transitions that read a text of `expr`.
  Status Add(const GrammarExpr& expr, int32_t from, int32_t to, RuleBuilder* builder) {
    MOESERVE_ASSIGN_OR_RETURN(const bool added, AddRegular({&expr}, from, to, builder));
    if (added) return absl::OkStatus();
    switch (expr.kind) {
      case ExprKind::kPattern:
        return Error("a literal, class or pattern needs too many automaton states");
      case ExprKind::kRule: {
        MOESERVE_ASSIGN_OR_RETURN(const int index, IndexOf(expr.rule));
        MOESERVE_ASSIGN_OR_RETURN(const NodeId node, NodeOf(index));
        builder->AddEdge(from, node, to);
        return absl::OkStatus();
      }
      case ExprKind::kAlternatives:
        return AddAlternatives(expr, from, to, builder);
      case ExprKind::kSequence:
        return AddSequence(expr, from, to, builder);
      case ExprKind::kRepeat:
        return AddRepeat(expr, from, to, builder);
    }
    return absl::OkStatus();
  }

  Status AddAlternatives(const GrammarExpr& expr, int32_t from, int32_t to, RuleBuilder* builder) {
    // Alternatives that are regular become one automaton.
    std::vector<const GrammarExpr*> regular;
    int64_t total = 0;
    for (const auto& child : expr.children) {
      MOESERVE_ASSIGN_OR_RETURN(const Size size, SizeOf(*child, 0));
      if (!size.has_value() || total + *size > kMaxJoinedNodes) continue;
      total += *size;
      regular.push_back(child.get());
    }
    bool joined = false;
    if (regular.size() > 1) {
      MOESERVE_ASSIGN_OR_RETURN(const auto tree, Alternatives(regular));
      MOESERVE_ASSIGN_OR_RETURN(joined, AddTree(*tree, from, to, builder));
    }
    // `regular` has the order of the children.
    size_t next = 0;
    for (const auto& child : expr.children) {
      if (joined && next < regular.size() && regular[next] == child.get()) {
        ++next;
        continue;
      }
      MOESERVE_RETURN_IF_ERROR(Add(*child, from, to, builder));
    }
    return absl::OkStatus();
  }

  Status AddSequence(const GrammarExpr& expr, int32_t from, int32_t to, RuleBuilder* builder) {
    int32_t at = from;
    const size_t n = expr.children.size();
    for (size_t i = 0; i < n;) {
      // Takes as many regular items as possible together.
      std::vector<const GrammarExpr*> run;
      int64_t total = 0;
      for (size_t j = i; j < n; ++j) {
        MOESERVE_ASSIGN_OR_RETURN(const Size size, SizeOf(*expr.children[j], 0));
        if (!size.has_value() || (total += *size) > kMaxRegularNodes) break;
        run.push_back(expr.children[j].get());
      }
      bool joined = false;
      if (run.size() > 1) {
        const int32_t next = i + run.size() == n ? to : builder->AddState();
        MOESERVE_ASSIGN_OR_RETURN(joined, AddRegular(run, at, next, builder));
        if (joined) {
          at = next;
          i += run.size();
          continue;
        }
      }
      const int32_t next = i + 1 == n ? to : builder->AddState();
      MOESERVE_RETURN_IF_ERROR(Add(*expr.children[i], at, next, builder));
      at = next;
      ++i;
    }
    if (n == 0) builder->AddEmpty(from, to);
    return absl::OkStatus();
  }

  Status AddRepeat(const GrammarExpr& expr, int32_t from, int32_t to, RuleBuilder* builder) {
    const GrammarExpr& child = *expr.children[0];
    int32_t at = from;
    for (int i = 0; i < expr.min; ++i) {
      MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1));
      const int32_t next = builder->AddState();
      MOESERVE_RETURN_IF_ERROR(Add(child, at, next, builder));
      at = next;
    }
    if (expr.max == PatternNode::kUnbounded) {
      const int32_t loop = builder->AddState();
      builder->AddEmpty(at, loop);
      MOESERVE_RETURN_IF_ERROR(Add(child, loop, loop, builder));
      builder->AddEmpty(loop, to);
      return absl::OkStatus();
    }
    builder->AddEmpty(at, to);
    for (int i = expr.min; i < expr.max; ++i) {
      MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1));
      const int32_t next = builder->AddState();
      MOESERVE_RETURN_IF_ERROR(Add(child, at, next, builder));
      builder->AddEmpty(next, to);
      at = next;
    }
    return absl::OkStatus();
  }

  // Adds one transition for the regular expressions `sequence`. Returns false if one of them is not
  // regular or the automaton is too large.
  Result<bool> AddRegular(const std::vector<const GrammarExpr*>& sequence, int32_t from, int32_t to,
                          RuleBuilder* builder) {
    PatternNode tree;
    tree.kind = PatternNode::Kind::kSequence;
    for (const GrammarExpr* expr : sequence) {
      MOESERVE_ASSIGN_OR_RETURN(const Size size, SizeOf(*expr, 0));
      if (!size.has_value() && expr->kind != ExprKind::kPattern) return false;
      MOESERVE_ASSIGN_OR_RETURN(tree.children.emplace_back(), Tree(*expr));
    }
    return AddTree(tree, from, to, builder);
  }

  Result<bool> AddTree(const PatternNode& tree, int32_t from, int32_t to, RuleBuilder* builder) {
    std::string key;
    Describe(tree, &key);
    auto it = scalars_.find(key);
    if (it == scalars_.end()) {
      CompileBudget part = budget_->Part(kMaxRegularStates);
      Result<ByteDfa> dfa = TreeDfa(tree, Encoding::kUtf8, &part);
      MOESERVE_RETURN_IF_ERROR(budget_->Tick(4096));
      NodeId id = kNoNode;
      if (dfa.ok()) {
        MOESERVE_RETURN_IF_ERROR(budget_->AddStates(dfa->num_states(), dfa->num_classes));
        MOESERVE_RETURN_IF_ERROR(dfa->Finish(spellable_, budget_));
        Node node;
        ScalarNode scalar;
        scalar.dfa = static_cast<int32_t>(grammar_.dfas.size());
        grammar_.dfas.push_back(std::make_shared<const ByteDfa>(*std::move(dfa)));
        node.value = scalar;
        MOESERVE_ASSIGN_OR_RETURN(id, AddNode(std::move(node)));
      }
      it = scalars_.emplace(std::move(key), id).first;
    }
    if (it->second == kNoNode) return false;
    builder->AddEdge(from, it->second, to);
    return true;
  }

  static void Describe(const PatternNode& node, std::string* out) {
    *out += Concat(static_cast<int>(node.kind), ':', node.min, ',', node.max, '[');
    for (const CodePointRange& range : node.set) {
      *out +=
          Concat(static_cast<uint32_t>(range.first), '-', static_cast<uint32_t>(range.last), ' ');
    }
    for (const auto& child : node.children) Describe(*child, out);
    *out += ']';
  }

  // Returns the tree of a regular expression with all rules written out.
  Result<std::unique_ptr<PatternNode>> Tree(const GrammarExpr& expr) {
    MOESERVE_RETURN_IF_ERROR(budget_->Tick());
    if (expr.kind == ExprKind::kPattern) {
      MOESERVE_RETURN_IF_ERROR(budget_->Tick(SizeOf(*expr.pattern)));
      if (HasAnchor(*expr.pattern)) return Error("^ and $ are not supported in patterns");
      return Copy(*expr.pattern);
    }
    if (expr.kind == ExprKind::kRule) {
      MOESERVE_ASSIGN_OR_RETURN(const int index, IndexOf(expr.rule));
      return Tree(*syntax_.rules[index].body);
    }
    auto out = std::make_unique<PatternNode>();
    out->kind = expr.kind == ExprKind::kSequence       ? PatternNode::Kind::kSequence
                : expr.kind == ExprKind::kAlternatives ? PatternNode::Kind::kAlternatives
                                                       : PatternNode::Kind::kRepeat;
    out->min = expr.min;
    out->max = expr.max;
    for (const auto& child : expr.children) {
      MOESERVE_ASSIGN_OR_RETURN(out->children.emplace_back(), Tree(*child));
    }
    return out;
  }

  Result<std::unique_ptr<PatternNode>> Alternatives(const std::vector<const GrammarExpr*>& list) {
    auto out = std::make_unique<PatternNode>();
    out->kind = PatternNode::Kind::kAlternatives;
    for (const GrammarExpr* expr : list) {
      MOESERVE_ASSIGN_OR_RETURN(out->children.emplace_back(), Tree(*expr));
    }
    return out;
  }

  static bool HasAnchor(const PatternNode& node) {
    if (node.kind == PatternNode::Kind::kAtStart || node.kind == PatternNode::Kind::kAtEnd) {
      return true;
    }
    return std::any_of(node.children.begin(), node.children.end(),
                       [](const auto& child) { return HasAnchor(*child); });
  }

  // Checks that no rule leads back to itself before a byte is read.
  Status CheckLeads() {
    std::vector<int> lead(grammar_.nodes.size(), -1);  // -1: not visited; -2: being visited
    struct Visit {
      NodeId node;
      size_t edge = 0;
      int longest = 0;
    };
    for (size_t start = 0; start < grammar_.nodes.size(); ++start) {
      if (lead[start] != -1) continue;
      std::vector<Visit> visits = {{static_cast<NodeId>(start)}};
      lead[start] = -2;
      while (!visits.empty()) {
        Visit& visit = visits.back();
        const auto* rule = std::get_if<RuleNode>(&grammar_.nodes[visit.node].value);
        if (rule != nullptr && visit.edge < rule->states[0].edges.size()) {
          const NodeId next = rule->states[0].edges[visit.edge].node;
          if (lead[next] == -2) return Error(Circle(next));
          if (lead[next] >= 0) {
            visit.longest = std::max(visit.longest, lead[next] + 1);
            ++visit.edge;
          } else {
            lead[next] = -2;
            visits.push_back({next});
          }
          continue;
        }
        lead[visit.node] = visit.longest;
        if (visit.longest > kMaxLead) {
          return Error(Concat("more than ", kMaxLead, " rules begin with each other"));
        }
        visits.pop_back();
      }
    }
    return absl::OkStatus();
  }

  std::string Circle(NodeId node) const {
    for (size_t i = 0; i < rules_.size(); ++i) {
      if (rules_[i].node != node) continue;
      return Concat("the rule ", moeserve::Quoted(syntax_.rules[i].name, 64),
                    " begins with itself by way of other rules or of parts that may be empty; "
                    "write the repetition with * instead");
    }
    return "a rule begins with itself by way of other rules";
  }

  const GrammarSyntax syntax_;
  const ByteSet& spellable_;
  CompileBudget* budget_;
  Grammar grammar_;
  std::map<std::string, int> indices_;
  std::vector<Rule> rules_;
  int measured_depth_ = 0;  // of the SizeOf() calls in each other
  std::vector<int> queue_;
  std::map<std::string, NodeId> scalars_;  // kNoNode: the automaton is too large
};

}  // namespace

Result<Grammar> CompileGrammarText(std::string_view text, const ConstraintLimits& limits,
                                   DfaPtr any_string, const ByteSet& spellable,
                                   CompileBudget* budget) {
  if (text.size() > limits.grammar_bytes) {
    return absl::InvalidArgumentError(
        Concat("grammar: ", text.size(), " bytes, more than ", limits.grammar_bytes));
  }
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("grammar: not UTF-8");
  MOESERVE_ASSIGN_OR_RETURN(GrammarSyntax syntax, ParseGrammar(text));
  return GrammarCompiler(std::move(syntax), std::move(any_string), spellable, budget).Run();
}

}  // namespace moeserve::structured
