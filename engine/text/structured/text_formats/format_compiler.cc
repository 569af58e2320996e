#include "engine/text/structured/text_formats/format_compiler.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/text/structured/grammars/grammar_compiler.h"
#include "engine/text/structured/rules/rule_builder.h"
#include "engine/text/structured/schemas/schema_compiler.h"
#include "engine/text/structured/text_formats/free_text.h"
#include "engine/text/structured/text_formats/plain_texts.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

using Kind = TextFormat::Kind;

// Largest nesting of formats; limits the use of the stack.
constexpr int kMaxNesting = 16;
// Frames of rules that formats need in addition to those of the JSON values in them.
constexpr int kRuleDepth = 4 * kMaxNesting;
constexpr size_t kMaxTriggers = 64;
constexpr int kMaxCountedTags = 256;

class FormatCompiler {
 public:
  FormatCompiler(const ConstraintLimits& limits, DfaPtr any_string, const ByteSet& spellable,
                 CompileBudget* budget)
      : limits_(limits), spellable_(spellable), budget_(budget) {
    grammar_.dfas.push_back(std::move(any_string));
    grammar_.any_string = 0;
    grammar_.max_depth = kMaxDepth + kRuleDepth;
    grammar_.end_cost = 1;
  }

  Result<Grammar> Run(const TextFormat& format) {
    RuleBuilder rule(budget_);
    const int32_t end = rule.AddState();
    MOESERVE_RETURN_IF_ERROR(Add(format, "format", 0, RuleBuilder::kStart, end, &rule));
    MOESERVE_ASSIGN_OR_RETURN(grammar_.root, AddRule(rule, end));
    MOESERVE_RETURN_IF_ERROR(grammar_.Finish(spellable_, budget_));
    grammar_.marker_texts.assign(markers_.begin(), markers_.end());
    if (grammar_.nodes[grammar_.root].distance < kUnreachable) return std::move(grammar_);
    return absl::InvalidArgumentError("no text matches that the model's vocabulary can spell");
  }

 private:
  static Status Error(const std::string& place, std::string_view what) {
    return absl::InvalidArgumentError(Concat(place, ": ", what));
  }
  static Status At(const std::string& place, const Status& status) {
    return status.ok() ? status : Error(place, std::string(status.message()));
  }

  Status CheckText(const std::string& place, const std::string& text) {
    bytes_ += text.size();
    if (bytes_ > 4 * limits_.schema_bytes) {
      return Error(place, Concat("all texts of the format together have more than ",
                                 4 * limits_.schema_bytes, " bytes"));
    }
    if (!IsValidUtf8(text)) return Error(place, "not UTF-8");
    return absl::OkStatus();
  }

  // Remembers a text inside of which special tokens are allowed. One separator or suffix can be
  // part of the texts of many tags.
  Status AddMarker(const std::string& text) {
    const auto [at, added] = markers_.insert(text);
    if (!added) return absl::OkStatus();
    marker_bytes_ += text.size();
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(static_cast<int64_t>(text.size())));
    if (marker_bytes_ <= 4 * limits_.schema_bytes) return absl::OkStatus();
    return absl::InvalidArgumentError(Concat(
        "the texts of the tags, each with the separator or suffix behind it, have more than ",
        4 * limits_.schema_bytes, " bytes together"));
  }

  Status Count(const std::string& place) {
    if (++parts_ <= limits_.format_parts) return absl::OkStatus();
    return Error(place, Concat("the format has more than ", limits_.format_parts, " parts"));
  }

  template <typename T>
  Result<NodeId> AddNode(T value) {
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1));
    grammar_.nodes.push_back({std::move(value)});
    return static_cast<NodeId>(grammar_.nodes.size() - 1);
  }

  Result<NodeId> AddRule(const RuleBuilder& rule, int32_t end) {
    MOESERVE_ASSIGN_OR_RETURN(RuleNode node, rule.Build(end));
    return AddNode(std::move(node));
  }

  Result<int32_t> AddDfa(ByteDfa dfa) {
    MOESERVE_RETURN_IF_ERROR(dfa.Finish(spellable_, budget_));
    grammar_.dfas.push_back(std::make_shared<const ByteDfa>(std::move(dfa)));
    return static_cast<int32_t>(grammar_.dfas.size() - 1);
  }

  Result<NodeId> Scalar(ByteDfa dfa, bool free = false) {
    ScalarNode node;
    node.free = free;
    MOESERVE_ASSIGN_OR_RETURN(node.dfa, AddDfa(std::move(dfa)));
    return AddNode(node);
  }

  // Returns the node for exactly `text`, in which special tokens are allowed.
  Result<NodeId> Literal(const std::string& text) {
    if (const auto it = literals_.find(text); it != literals_.end()) return it->second;
    // Not an Nfa of characters, because `text` may begin or end inside a character.
    ByteDfa dfa;
    std::map<uint8_t, int> classes;
    for (const char c : text) classes.try_emplace(static_cast<uint8_t>(c), classes.size() + 1);
    dfa.num_classes = static_cast<int>(std::min<size_t>(classes.size() + 1, 256));
    for (const auto& [byte, byte_class] : classes) {
      dfa.class_of[byte] = static_cast<uint8_t>(byte_class % dfa.num_classes);
    }
    MOESERVE_RETURN_IF_ERROR(
        budget_->AddStates(static_cast<int64_t>(text.size()) + 1, dfa.num_classes));
    dfa.AddState(text.empty(), true);
    for (size_t i = 0; i < text.size(); ++i) {
      const int32_t next = dfa.AddState(i + 1 == text.size(), true);
      dfa.SetNext(next - 1, dfa.class_of[static_cast<uint8_t>(text[i])], next);
    }
    ScalarNode node;
    node.marker = true;
    MOESERVE_ASSIGN_OR_RETURN(node.dfa, AddDfa(std::move(dfa)));
    MOESERVE_ASSIGN_OR_RETURN(const NodeId id, AddNode(node));
    literals_[text] = id;
    return id;
  }

  // Returns the node for free text up to and including the first of `triggers`, which is trigger
  // `i`.
  // `must_follow`: the text may not be cut off before the trigger.
  Result<NodeId> UpTo(const FreeText& free, const std::vector<std::string>& triggers, int i,
                      bool must_follow = false) {
    MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, free.UpTo(i));
    Trigger trigger = FollowTrigger(triggers[i], dfa);
    MOESERVE_ASSIGN_OR_RETURN(trigger.literal, Literal(triggers[i]));
    MOESERVE_RETURN_IF_ERROR(AddMarker(triggers[i]));
    ScalarNode node;
    MOESERVE_ASSIGN_OR_RETURN(node.dfa, AddDfa(std::move(dfa)));
    node.trigger = static_cast<int32_t>(grammar_.triggers.size());
    node.free = !must_follow;
    grammar_.triggers.push_back(std::move(trigger));
    return AddNode(node);
  }

  // Appends the texts that free text must not contain to its triggers.
  Status AddExcluded(const std::vector<std::string>& excluded, const std::string& place,
                     std::vector<std::string>* texts) {
    if (excluded.size() > kMaxTriggers) {
      return Error(place, Concat("more than ", kMaxTriggers, " excluded texts"));
    }
    for (const std::string& text : excluded) {
      MOESERVE_RETURN_IF_ERROR(CheckText(place + ".excluded", text));
      if (text.empty()) return Error(place, "an excluded text is empty");
      texts->push_back(text);
    }
    return absl::OkStatus();
  }

  // Adds transitions that read a text of `format` between two states.
  Status Add(const TextFormat& format, const std::string& place, int depth, int32_t from,
             int32_t to, RuleBuilder* rule) {
    MOESERVE_RETURN_IF_ERROR(Count(place));
    if (depth > kMaxNesting) {
      return Error(place, Concat("formats are nested deeper than ", kMaxNesting));
    }
    switch (format.kind) {
      case Kind::kText: {
        MOESERVE_RETURN_IF_ERROR(CheckText(place, format.text));
        return AddText(format.text, from, to, rule);
      }
      case Kind::kSequence:
        return AddSequence(format, place, depth, "", from, to, rule);
      case Kind::kAnyOf:
        if (format.parts.empty()) return Error(place, "no alternative");
        for (size_t i = 0; i < format.parts.size(); ++i) {
          MOESERVE_RETURN_IF_ERROR(
              Add(format.parts[i], Concat(place, ".", i), depth + 1, from, to, rule));
        }
        return absl::OkStatus();
      case Kind::kTags:
        if (format.tags == nullptr) return Error(place, "the tags are missing");
        return AddTags(*format.tags, place, depth, from, to, rule);
      default: {
        MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Leaf(format, place));
        rule->AddEdge(from, node, to);
        return absl::OkStatus();
      }
    }
  }

  Status AddText(const std::string& text, int32_t from, int32_t to, RuleBuilder* rule) {
    if (text.empty()) {
      rule->AddEmpty(from, to);
      return absl::OkStatus();
    }
    MOESERVE_RETURN_IF_ERROR(AddMarker(text));
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Literal(text));
    rule->AddEdge(from, node, to);
    return absl::OkStatus();
  }

  // As Add(), with the fixed text `end` behind it. Free text at the end of `format` ends with the
  // first occurrence of `end`.
  Status AddUpTo(const TextFormat& format, const std::string& place, int depth,
                 const std::string& end, int32_t from, int32_t to, RuleBuilder* rule) {
    if (format.kind == Kind::kAnyText && !end.empty()) {
      MOESERVE_RETURN_IF_ERROR(Count(place));
      std::vector<std::string> texts = {end};
      MOESERVE_RETURN_IF_ERROR(AddExcluded(format.excluded, place, &texts));
      MOESERVE_ASSIGN_OR_RETURN(const FreeText free, FreeText::Build(texts, budget_));
      MOESERVE_ASSIGN_OR_RETURN(const NodeId node, UpTo(free, texts, 0, format.must_end));
      rule->AddEdge(from, node, to);
      return absl::OkStatus();
    }
    if (format.kind == Kind::kSequence) {
      MOESERVE_RETURN_IF_ERROR(Count(place));
      return AddSequence(format, place, depth, end, from, to, rule);
    }
    if (format.kind == Kind::kAnyOf && !end.empty()) {
      MOESERVE_RETURN_IF_ERROR(Count(place));
      if (format.parts.empty()) return Error(place, "no alternative");
      if (depth > kMaxNesting) return Error(place, "formats are nested too deep");
      for (size_t i = 0; i < format.parts.size(); ++i) {
        MOESERVE_RETURN_IF_ERROR(
            AddUpTo(format.parts[i], Concat(place, ".", i), depth + 1, end, from, to, rule));
      }
      return absl::OkStatus();
    }
    const int32_t before_end = rule->AddState();
    MOESERVE_RETURN_IF_ERROR(Add(format, place, depth, from, before_end, rule));
    return AddText(end, before_end, to, rule);
  }

  Status AddSequence(const TextFormat& format, const std::string& place, int depth,
                     const std::string& end, int32_t from, int32_t to, RuleBuilder* rule) {
    if (depth > kMaxNesting) {
      return Error(place, Concat("formats are nested deeper than ", kMaxNesting));
    }
    if (format.parts.empty()) return AddText(end, from, to, rule);
    const size_t n = format.parts.size();
    int32_t at = from;
    for (size_t i = 0; i < n;) {
      const TextFormat& part = format.parts[i];
      const std::string part_place = Concat(place, ".", i);
      const bool joined = i + 1 < n && format.parts[i + 1].kind == Kind::kText;
      const std::string& behind = joined ? format.parts[i + 1].text : (i + 1 == n ? end : kNothing);
      if (joined) {
        MOESERVE_RETURN_IF_ERROR(Count(part_place));
        MOESERVE_RETURN_IF_ERROR(CheckText(part_place, behind));
      }
      i += joined ? 2 : 1;
      const int32_t next = i == n && !(joined && !end.empty()) ? to : rule->AddState();
      MOESERVE_RETURN_IF_ERROR(AddUpTo(part, part_place, depth + 1, behind, at, next, rule));
      at = next;
    }
    return at == to ? absl::OkStatus() : AddText(end, at, to, rule);
  }

  // Returns the node of a format without parts.
  Result<NodeId> Leaf(const TextFormat& format, const std::string& place) {
    switch (format.kind) {
      case Kind::kAnyText: {
        std::vector<std::string> texts;
        MOESERVE_RETURN_IF_ERROR(AddExcluded(format.excluded, place, &texts));
        MOESERVE_ASSIGN_OR_RETURN(const FreeText free, FreeText::Build(texts, budget_));
        MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, free.Without());
        return Scalar(std::move(dfa), /*free=*/!format.must_end);
      }
      case Kind::kJsonObject:
        return Schema(R"({"type": "object"})", {}, place);
      case Kind::kJsonSchema:
        return Schema(format.text, {format.strict, format.closed_objects}, place);
      case Kind::kRegex: {
        Result<ByteDfa> dfa = RegexDfa(format.text, limits_, budget_);
        if (!dfa.ok()) return At(place, dfa.status());
        return Scalar(*std::move(dfa));
      }
      case Kind::kChoice: {
        Result<ByteDfa> dfa = ChoiceDfa(format.choices, limits_, budget_);
        if (!dfa.ok()) return At(place, dfa.status());
        return Scalar(*std::move(dfa));
      }
      case Kind::kGrammar: {
        const DfaPtr any_string = grammar_.dfas[grammar_.any_string];
        Result<Grammar> part =
            CompileGrammarText(format.text, limits_, any_string, spellable_, budget_);
        if (!part.ok()) return At(place, part.status());
        grammar_.max_depth = std::max(grammar_.max_depth, part->max_depth + kRuleDepth);
        return grammar_.Append(*std::move(part));
      }
      default:
        return Error(place, "unknown kind of format");
    }
  }

  Result<NodeId> Schema(const std::string& text, const SchemaOptions& options,
                        const std::string& place) {
    const std::tuple key(text, options.strict, options.closed_objects);
    if (const auto it = schemas_.find(key); it != schemas_.end()) return it->second;
    bytes_ += text.size();
    if (bytes_ > 4 * limits_.schema_bytes) {
      return Error(place, Concat("all texts of the format together have more than ",
                                 4 * limits_.schema_bytes, " bytes"));
    }
    const DfaPtr any_string = grammar_.dfas[grammar_.any_string];
    Result<Grammar> part = CompileSchema(text, options, limits_, any_string, spellable_, budget_);
    if (!part.ok()) return At(place, part.status());
    const NodeId node = grammar_.Append(*std::move(part));
    schemas_[key] = node;
    return node;
  }

  // Tags that begin with `before` + StructuralTag::begin, of which `read` is already read.
  Result<NodeId> TagsAfter(const StructuralTags& tags, const std::string& before,
                           std::string_view read, const std::vector<NodeId>& contents) {
    RuleBuilder rule(budget_);
    const int32_t end = rule.AddState();
    std::vector<Beginning> beginnings;
    for (size_t i = 0; i < tags.tags.size(); ++i) {
      std::string text = before + tags.tags[i].begin;
      if (!text.starts_with(read)) continue;
      MOESERVE_RETURN_IF_ERROR(AddMarker(text));
      beginnings.push_back({text.substr(read.size()), contents[i]});
    }
    std::sort(beginnings.begin(), beginnings.end());
    MOESERVE_RETURN_IF_ERROR(AddBeginnings(beginnings, RuleBuilder::kStart, end, &rule));
    return AddRule(rule, end);
  }

  struct Beginning {
    std::string text;
    NodeId content;
    auto operator<=>(const Beginning&) const = default;
  };

  // Adds transitions for `all`, which is sorted. Beginnings that share bytes share transitions.
  Status AddBeginnings(const std::vector<Beginning>& all, int32_t from, int32_t end,
                       RuleBuilder* rule) {
    struct Task {
      const Beginning* list;
      size_t count;
      size_t read;  // number of bytes that all texts of the list share and that are already read
      int32_t from;
    };
    std::vector<Task> tasks = {{all.data(), all.size(), 0, from}};
    while (!tasks.empty()) {
      const Task task = tasks.back();
      tasks.pop_back();
      size_t i = 0;
      for (; i < task.count && task.list[i].text.size() == task.read; ++i) {
        rule->AddEdge(task.from, task.list[i].content, end);
      }
      while (i < task.count) {
        const std::string& first = task.list[i].text;
        size_t last = i;
        while (last + 1 < task.count && task.list[last + 1].text[task.read] == first[task.read]) {
          ++last;
        }
        // In a sorted list, the first and the last text share what all share.
        const std::string& other = task.list[last].text;
        size_t shared = task.read;
        while (shared < first.size() && shared < other.size() && first[shared] == other[shared]) {
          ++shared;
        }
        const int32_t next = rule->AddState();
        MOESERVE_ASSIGN_OR_RETURN(const NodeId node,
                                  Literal(first.substr(task.read, shared - task.read)));
        rule->AddEdge(task.from, node, next);
        tasks.push_back({task.list + i, last + 1 - i, shared, next});
        i = last + 1;
      }
    }
    return absl::OkStatus();
  }

  // Returns the nodes of the tags' contents with what ends them.
  Result<std::vector<NodeId>> Contents(const StructuralTags& tags, const std::string& place,
                                       int depth) {
    std::vector<NodeId> out;
    for (size_t i = 0; i < tags.tags.size(); ++i) {
      const StructuralTag& tag = tags.tags[i];
      const std::string tag_place = Concat(place, ".tags.", i);
      MOESERVE_RETURN_IF_ERROR(CheckText(tag_place + ".begin", tag.begin));
      MOESERVE_RETURN_IF_ERROR(CheckText(tag_place + ".end", tag.end));
      MOESERVE_RETURN_IF_ERROR(AddMarker(tag.end + tags.separator));
      MOESERVE_RETURN_IF_ERROR(AddMarker(tag.end + tags.suffix));
      RuleBuilder rule(budget_);
      const int32_t end = rule.AddState();
      MOESERVE_RETURN_IF_ERROR(AddUpTo(tag.content, tag_place + ".content", depth + 1, tag.end,
                                       RuleBuilder::kStart, end, &rule));
      MOESERVE_ASSIGN_OR_RETURN(out.emplace_back(), AddRule(rule, end));
    }
    return out;
  }

  // Returns the node of a JSON array whose items are the contents of the tags.
  Result<NodeId> JsonArray(const StructuralTags& tags, const std::string& place) {
    ChoiceNode items;
    for (size_t i = 0; i < tags.tags.size(); ++i) {
      const StructuralTag& tag = tags.tags[i];
      const std::string tag_place = Concat(place, ".tags.", i);
      MOESERVE_RETURN_IF_ERROR(Count(tag_place));
      if (!tag.begin.empty() || !tag.end.empty()) {
        return Error(tag_place, "begin and end must be empty in a JSON array");
      }
      if (tag.content.kind != Kind::kJsonObject && tag.content.kind != Kind::kJsonSchema) {
        return Error(tag_place, "the content must be a JSON schema or object in a JSON array");
      }
      MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Leaf(tag.content, tag_place + ".content"));
      if (const auto* choice = std::get_if<ChoiceNode>(&grammar_.nodes[node].value)) {
        items.options.insert(items.options.end(), choice->options.begin(), choice->options.end());
      } else {
        items.options.push_back(node);
      }
    }
    ArrayNode array;
    MOESERVE_ASSIGN_OR_RETURN(array.items, AddNode(std::move(items)));
    array.min_items = 1;
    if (tags.max_tags > 0) array.max_items = tags.max_tags;
    return AddNode(std::move(array));
  }

  Status CheckTags(const StructuralTags& tags, const std::string& place) {
    if (tags.tags.empty()) return Error(place, "no tags");
    if (tags.max_tags < 0 || tags.max_tags > kMaxCountedTags) {
      return Error(place, Concat("max_tags must be 0 to ", kMaxCountedTags));
    }
    MOESERVE_RETURN_IF_ERROR(CheckText(place + ".prefix", tags.prefix));
    MOESERVE_RETURN_IF_ERROR(CheckText(place + ".separator", tags.separator));
    MOESERVE_RETURN_IF_ERROR(CheckText(place + ".suffix", tags.suffix));
    if (tags.json_array && !tags.separator.empty()) {
      return Error(place, "separator must be empty in a JSON array");
    }
    if (tags.triggers.size() > kMaxTriggers) {
      return Error(place, Concat("more than ", kMaxTriggers, " triggers"));
    }
    if (!tags.free_text && !tags.triggers.empty()) {
      return Error(place, "triggers have no use without free text");
    }
    return absl::OkStatus();
  }

  // Returns the triggers, after checking that they fit the tags.
  Result<std::vector<std::string>> Triggers(const StructuralTags& tags, const std::string& place) {
    std::vector<std::string> triggers = tags.triggers;
    if (triggers.empty()) {
      for (const StructuralTag& tag : tags.tags) triggers.push_back(tags.prefix + tag.begin);
    }
    std::sort(triggers.begin(), triggers.end());
    triggers.erase(std::unique(triggers.begin(), triggers.end()), triggers.end());
    if (triggers.size() > kMaxTriggers) {
      return Error(place, Concat("the tags have more than ", kMaxTriggers,
                                 " different beginnings; give shorter triggers"));
    }
    if (triggers[0].empty()) {
      return Error(place, "free text needs triggers, or tags that do not begin with an empty text");
    }
    std::vector<uint8_t> used(triggers.size(), 0);
    for (size_t i = 0; i < tags.tags.size(); ++i) {
      bool found = false;
      for (size_t t = 0; t < triggers.size(); ++t) {
        if (!(tags.prefix + tags.tags[i].begin).starts_with(triggers[t])) continue;
        found = true;
        used[t] = 1;
      }
      if (!found) return Error(Concat(place, ".tags.", i), "begins with none of the triggers");
    }
    for (size_t t = 0; t < triggers.size(); ++t) {
      MOESERVE_RETURN_IF_ERROR(CheckText(place + ".triggers", triggers[t]));
      if (!used[t]) {
        return Error(place,
                     Concat("no tag begins with the trigger ", moeserve::Quoted(triggers[t])));
      }
    }
    // Where a trigger contains another one, the shorter one counts.
    return triggers;
  }

  Status AddTags(const StructuralTags& tags, const std::string& place, int depth, int32_t from,
                 int32_t to, RuleBuilder* rule) {
    MOESERVE_RETURN_IF_ERROR(CheckTags(tags, place));
    const bool several = !tags.json_array && (!tags.free_text || !tags.prefix.empty() ||
                                              !tags.separator.empty() || !tags.suffix.empty());
    std::vector<NodeId> contents;
    if (tags.json_array) {
      MOESERVE_ASSIGN_OR_RETURN(const NodeId array, JsonArray(tags, place));
      contents.assign(tags.tags.size(), array);
    } else {
      MOESERVE_ASSIGN_OR_RETURN(contents, Contents(tags, place, depth));
    }
    NodeId first = kNoNode;
    NodeId further = kNoNode;
    if (!tags.free_text) {
      MOESERVE_ASSIGN_OR_RETURN(first, TagsAfter(tags, tags.prefix, "", contents));
    }
    if (several && tags.max_tags != 1) {
      MOESERVE_ASSIGN_OR_RETURN(further, TagsAfter(tags, tags.separator, "", contents));
    }
    // The states after `k` tags of a group. Without a limit, one state stands for all.
    const int most = tags.max_tags > 0 && !tags.json_array ? tags.max_tags : 1;
    const bool counted = tags.max_tags > 0 && !tags.json_array;
    std::vector<int32_t> in_group(most + 1, 0);
    for (int k = 1; k <= most; ++k) in_group[k] = rule->AddState();
    for (int k = 1; k <= most && further != kNoNode; ++k) {
      if (!counted) {
        rule->AddEdge(in_group[k], further, in_group[k]);
      } else if (k < most) {
        rule->AddEdge(in_group[k], further, in_group[k + 1]);
      }
    }
    if (!tags.free_text) {
      rule->AddEdge(from, first, in_group[1]);
      if (!tags.at_least_one) rule->AddEmpty(from, to);
      for (int k = 1; k <= most; ++k) {
        MOESERVE_RETURN_IF_ERROR(AddText(tags.suffix, in_group[k], to, rule));
      }
      return absl::OkStatus();
    }
    return AddFreeText(tags, place, contents, in_group, counted, from, to, rule);
  }

  Status AddFreeText(const StructuralTags& tags, const std::string& place,
                     const std::vector<NodeId>& contents, const std::vector<int32_t>& in_group,
                     bool counted, int32_t from, int32_t to, RuleBuilder* rule) {
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> triggers, Triggers(tags, place));
    std::vector<std::string> texts = triggers;
    MOESERVE_RETURN_IF_ERROR(AddExcluded(tags.excluded, place, &texts));
    MOESERVE_ASSIGN_OR_RETURN(const FreeText free, FreeText::Build(texts, budget_));
    MOESERVE_ASSIGN_OR_RETURN(ByteDfa without_dfa, free.Without());
    MOESERVE_ASSIGN_OR_RETURN(const NodeId without, Scalar(std::move(without_dfa), /*free=*/true));
    std::vector<std::pair<NodeId, NodeId>> triggered;
    for (size_t t = 0; t < triggers.size(); ++t) {
      MOESERVE_ASSIGN_OR_RETURN(const NodeId up_to,
                                UpTo(free, triggers, static_cast<int>(t), tags.at_least_one));
      MOESERVE_ASSIGN_OR_RETURN(const NodeId rest,
                                TagsAfter(tags, tags.prefix, triggers[t], contents));
      triggered.push_back({up_to, rest});
    }
    const int most = static_cast<int>(in_group.size()) - 1;
    // The states between groups, after `k` tags.
    std::vector<int32_t> between = {from};
    for (int k = 1; k <= most; ++k) between.push_back(rule->AddState());
    for (int k = 0; k <= most; ++k) {
      if (k > 0) {
        MOESERVE_RETURN_IF_ERROR(
            AddText(tags.suffix, in_group[k], tags.stop_after_first ? to : between[k], rule));
        if (tags.stop_after_first) continue;
      }
      if (k > 0 || !tags.at_least_one) rule->AddEdge(between[k], without, to);
      if (counted && k == most) continue;
      for (const auto& [up_to, rest] : triggered) {
        const int32_t after_trigger = rule->AddState();
        rule->AddEdge(between[k], up_to, after_trigger);
        rule->AddEdge(after_trigger, rest, in_group[counted ? k + 1 : 1]);
      }
    }
    return absl::OkStatus();
  }

  static inline const std::string kNothing;

  const ConstraintLimits& limits_;
  const ByteSet& spellable_;
  CompileBudget* budget_;
  Grammar grammar_;
  int parts_ = 0;
  size_t bytes_ = 0;
  std::set<std::string> markers_;  // becomes Grammar::marker_texts
  size_t marker_bytes_ = 0;
  std::map<std::string, NodeId> literals_;
  std::map<std::tuple<std::string, bool, bool>, NodeId> schemas_;
};

}  // namespace

Result<Grammar> CompileFormat(const TextFormat& format, const ConstraintLimits& limits,
                              DfaPtr any_string, const ByteSet& spellable, CompileBudget* budget) {
  return FormatCompiler(limits, std::move(any_string), spellable, budget).Run(format);
}

}  // namespace moeserve::structured
