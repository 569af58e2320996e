#include "engine/text/structured/schemas/schema_compiler.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/automata/nfa.h"
#include "engine/text/structured/schemas/schema_document.h"
#include "engine/text/structured/schemas/schema_graph.h"
#include "engine/text/structured/schemas/schema_keys.h"
#include "engine/text/structured/schemas/schema_scalars.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Largest number of digits of a listed number that is spelt without an exponent; longer ones are
// spelt with an exponent only.
constexpr int64_t kMaxPlainDigits = 40;

}  // namespace

Result<Grammar> SchemaCompiler::Run() {
  MOESERVE_ASSIGN_OR_RETURN(grammar_.root, NodeOf({&root_}));
  while (!queue_.empty()) {
    const auto [node, schemas] = std::move(queue_.back());
    queue_.pop_back();
    MOESERVE_RETURN_IF_ERROR(FillChoice(node, schemas));
  }
  Grammar unpruned = grammar_;
  MOESERVE_RETURN_IF_ERROR(grammar_.Finish(spellable_, budget_));
  const Node& root = grammar_.nodes[grammar_.root];
  if (root.distance >= kUnreachable) return Unsatisfiable(unpruned);
  if (root.height > kMaxDepth) {
    return reader_.Error(&root_, Concat("every instance nests deeper than ", kMaxDepth));
  }
  if (RootsOverlap()) grammar_.end_cost = 1;
  return std::move(grammar_);
}

bool SchemaCompiler::RootsOverlap() const {
  const auto* choice = std::get_if<ChoiceNode>(&grammar_.nodes[grammar_.root].value);
  if (choice == nullptr) return false;
  ByteSet seen;
  for (const NodeId option : choice->options) {
    const Node& node = grammar_.nodes[option];
    if (!std::holds_alternative<ScalarNode>(node.value)) continue;
    ByteSet first = node.first;
    first.reset('"');
    if ((first & seen).any()) return true;
    seen |= first;
  }
  return false;
}

Result<NodeId> SchemaCompiler::NodeOf(const Conjunction& schemas) {
  MOESERVE_RETURN_IF_ERROR(budget_->Tick(static_cast<int64_t>(8 + 8 * schemas.size())));
  const auto it = nodes_.find(schemas);
  if (it != nodes_.end()) return it->second;
  MOESERVE_ASSIGN_OR_RETURN(const NodeId node, AddNode(ChoiceNode()));
  nodes_[schemas] = node;
  queue_.push_back({node, schemas});
  if (!schemas.empty()) schema_of_[node] = schemas[0];
  return node;
}

Status SchemaCompiler::FillChoice(NodeId node, const Conjunction& schemas) {
  MOESERVE_ASSIGN_OR_RETURN(const Branches branches, reader_.Read(schemas));
  const json* place = schemas.empty() ? &root_ : schemas[0];
  std::vector<NodeId> options;
  for (const Branch& branch : branches) {
    MOESERVE_RETURN_IF_ERROR(AddOptions(place, branch, &options));
  }
  std::get<ChoiceNode>(grammar_.nodes[node].value).options = std::move(options);
  return absl::OkStatus();
}

Status SchemaCompiler::AddOptions(const json* place, const Branch& branch,
                                  std::vector<NodeId>* options) {
  if (branch.values) return AddValues(place, branch, options);
  std::vector<std::string> words;
  if (branch.types & kNullType) words.push_back("null");
  if (branch.types & kBooleanType) words.insert(words.end(), {"true", "false"});
  if (!words.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Literals(words, {}));
    options->push_back(node);
  }
  if (branch.types & kNumberTypes) {
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Number(branch));
    options->push_back(node);
  }
  if (branch.types & kStringType) {
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, String(place, branch));
    options->push_back(node);
  }
  if (branch.types & kArrayType) {
    MOESERVE_RETURN_IF_ERROR(AddArrays(place, branch, options));
  }
  if (branch.types & kObjectType) {
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Object(place, branch));
    options->push_back(node);
  }
  return absl::OkStatus();
}

Result<NodeId> SchemaCompiler::Scalar(int32_t dfa) {
  ScalarNode node;
  node.dfa = dfa;
  return AddNode(std::move(node));
}

Result<int32_t> SchemaCompiler::AddDfa(const std::string& key, ByteDfa dfa) {
  MOESERVE_RETURN_IF_ERROR(dfa.Finish(spellable_, budget_));
  grammar_.dfas.push_back(std::make_shared<const ByteDfa>(std::move(dfa)));
  const int32_t id = static_cast<int32_t>(grammar_.dfas.size() - 1);
  dfas_[key] = id;
  return id;
}

Result<NodeId> SchemaCompiler::Literals(const std::vector<std::string>& texts,
                                        const std::vector<std::string>& strings) {
  std::string key = "literals";
  for (const std::string& text : texts) key += '\n' + text;
  for (const std::string& text : strings) key += '\n' + json(text).dump();
  if (const auto it = dfas_.find(key); it != dfas_.end()) return Scalar(it->second);
  Nfa nfa(budget_);
  std::vector<Nfa::NodeId> starts;
  for (const std::string& text : texts) {
    MOESERVE_ASSIGN_OR_RETURN(starts.emplace_back(),
                              nfa.Literal(text, Encoding::kUtf8, nfa.match()));
  }
  for (const std::string& text : strings) {
    MOESERVE_ASSIGN_OR_RETURN(Nfa::NodeId node, nfa.Literal("\"", Encoding::kUtf8, nfa.match()));
    MOESERVE_ASSIGN_OR_RETURN(node, nfa.Literal(text, Encoding::kJsonString, node));
    MOESERVE_ASSIGN_OR_RETURN(starts.emplace_back(), nfa.Literal("\"", Encoding::kUtf8, node));
  }
  MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId start, nfa.Any(starts));
  MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, nfa.Determinize(start));
  MOESERVE_ASSIGN_OR_RETURN(const int32_t id, AddDfa(key, std::move(dfa)));
  return Scalar(id);
}

Result<NodeId> SchemaCompiler::Number(const Branch& branch) {
  const std::string key = NumberKey(branch);
  if (const auto it = dfas_.find(key); it != dfas_.end()) return Scalar(it->second);
  MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, NumbersOf(branch, budget_));
  MOESERVE_ASSIGN_OR_RETURN(const int32_t id, AddDfa(key, std::move(dfa)));
  return Scalar(id);
}

Result<int32_t> SchemaCompiler::Strings(const json* place, const Branch& branch) {
  const std::string key = StringKey(branch);
  if (const auto it = dfas_.find(key); it != dfas_.end()) return it->second;
  Result<ByteDfa> dfa = StringsOf(branch, AnyString(), budget_);
  if (!dfa.ok()) {
    return reader_.Error(place, "pattern: " + std::string(dfa.status().message()));
  }
  return AddDfa(key, *std::move(dfa));
}

Result<NodeId> SchemaCompiler::String(const json* place, const Branch& branch) {
  if (!HasStringConditions(branch)) {
    ScalarNode node;
    node.dfa = grammar_.any_string;
    node.counted = branch.min_chars > 0 || branch.max_chars < kNoLimit;
    node.min_chars = branch.min_chars;
    node.max_chars = branch.max_chars;
    return AddNode(std::move(node));
  }
  MOESERVE_ASSIGN_OR_RETURN(const int32_t dfa, Strings(place, branch));
  return Scalar(dfa);
}

Status SchemaCompiler::AddValues(const json* place, const Branch& branch,
                                 std::vector<NodeId>* options) {
  std::vector<std::string> texts;
  std::vector<std::string> strings;
  for (const json* value : *branch.values) {
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(64));
    const bool structured = value->is_array() || value->is_object();
    if (structured) {
      const bool array = value->is_array();
      const bool restricted =
          array ? !branch.arrays.empty() || branch.min_items > 0 || branch.max_items < kNoLimit ||
                      branch.unique_items || !branch.contains.empty()
                : !branch.objects.empty() || !branch.required.empty() || !branch.names.empty() ||
                      branch.min_properties > 0 || branch.max_properties < kNoLimit;
      if (restricted) {
        return reader_.Error(place,
                             "listed arrays and objects together with other conditions "
                             "on them are not supported");
      }
      MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), Constant(*value));
    } else if (value->is_string()) {
      const std::string& text = value->get_ref<const std::string&>();
      const int64_t length = CountCharacters(text);
      if (length < branch.min_chars || length > branch.max_chars) continue;
      if (HasStringConditions(branch)) {
        MOESERVE_ASSIGN_OR_RETURN(const int32_t dfa, Strings(place, branch));
        if (!grammar_.dfas[dfa]->Matches(value->dump())) continue;
      }
      strings.push_back(text);
    } else if (value->is_number()) {
      if (!AllowsNumber(branch, DecimalOf(*value))) continue;
      AddSpellings(*value, &texts);
    } else {
      texts.push_back(value->dump());
    }
  }
  if (!texts.empty() || !strings.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), Literals(texts, strings));
  }
  return absl::OkStatus();
}

void SchemaCompiler::AddSpellings(const json& value, std::vector<std::string>* texts) {
  const Decimal number = DecimalOf(value);
  const bool with_fraction = value.is_number_float();
  const int64_t digits = static_cast<int64_t>(number.digits.size());
  const bool plain =
      std::max(number.point, digits) <= kMaxPlainDigits && number.point >= -kMaxPlainDigits;
  const bool usual = number.is_zero() || (number.point > -4 && number.point <= 16);
  if (!plain || (!usual && with_fraction)) texts->push_back(number.Scientific());
  if (!plain) return;
  texts->push_back(number.Plain());
  if (number.is_integer() && with_fraction) texts->push_back(number.Plain() + ".0");
}

Result<NodeId> SchemaCompiler::Constant(const json& value) {
  if (value.is_array()) {
    ArrayNode node;
    for (const json& item : value) {
      MOESERVE_ASSIGN_OR_RETURN(node.prefix.emplace_back(), Constant(item));
    }
    node.min_items = node.max_items = static_cast<int64_t>(value.size());
    return AddNode(std::move(node));
  }
  if (value.is_object()) {
    ObjectNode node;
    for (const auto& [name, item] : order_.Members(value)) {
      Property property;
      property.name = CodePoints(name);
      property.order = static_cast<int32_t>(node.properties.size());
      property.required = true;
      MOESERVE_ASSIGN_OR_RETURN(property.value, Constant(*item));
      node.properties.push_back(std::move(property));
    }
    return AddNode(Sorted(std::move(node)));
  }
  if (value.is_string()) return Literals({}, {value.get<std::string>()});
  std::vector<std::string> texts;
  if (value.is_number()) {
    AddSpellings(value, &texts);
  } else {
    texts.push_back(value.dump());
  }
  return Literals(texts, {});
}

Status SchemaCompiler::Unsatisfiable(const Grammar& unpruned) const {
  const json* place = &root_;
  NodeId at = grammar_.root;
  const auto hopeless = [&](NodeId id) {
    return id == kNoNode || grammar_.nodes[id].distance >= kUnreachable;
  };
  std::set<NodeId> visited;
  while (visited.insert(at).second) {
    if (const auto it = schema_of_.find(at); it != schema_of_.end()) place = it->second;
    const Node& node = unpruned.nodes[at];
    if (const auto* choice = std::get_if<ChoiceNode>(&node.value)) {
      if (choice->options.empty()) return reader_.Error(place, "no value matches");
      at = choice->options[0];
    } else if (const auto* array = std::get_if<ArrayNode>(&node.value)) {
      if (array->min_contained > 0 && array->contained != kNoNode && hopeless(array->contained)) {
        at = array->contained;
        continue;
      }
      int64_t i = 0;
      while (i < array->min_items && i < static_cast<int64_t>(array->prefix.size()) &&
             !hopeless(array->ItemAt(i))) {
        ++i;
      }
      if (array->ItemAt(i) == kNoNode) return reader_.Error(place, "no array matches");
      at = array->ItemAt(i);
    } else if (const auto* object = std::get_if<ObjectNode>(&node.value)) {
      const auto it =
          std::find_if(object->properties.begin(), object->properties.end(),
                       [&](const Property& p) { return p.required && hopeless(p.value); });
      if (it == object->properties.end()) return reader_.Error(place, "no object matches");
      if (it->value == kNoNode) return reader_.Error(place, "a required property is not allowed");
      at = it->value;
    } else {
      return reader_.Error(place, "no value matches that the model's vocabulary can spell");
    }
  }
  return reader_.Error(place, "no finite value matches: the schema requires itself");
}

Result<Grammar> CompileSchema(std::string_view schema, const SchemaOptions& options,
                              const ConstraintLimits& limits, DfaPtr any_string,
                              const ByteSet& spellable, CompileBudget* budget) {
  MOESERVE_ASSIGN_OR_RETURN(const json document, ParseSchema(schema, limits));
  const DocumentOrder order(schema, document);
  return SchemaCompiler(document, order, options, limits, std::move(any_string), spellable, budget)
      .Run();
}

}  // namespace moeserve::structured
