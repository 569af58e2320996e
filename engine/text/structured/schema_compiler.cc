#include "engine/text/structured/schema_compiler.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/message.h"
#include "engine/text/structured/automata/formats.h"
#include "engine/text/structured/automata/nfa.h"
#include "engine/text/structured/automata/pattern.h"
#include "engine/text/structured/schema_reader.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Largest number of digits of a listed number that is spelt without an exponent; longer ones are
// spelt with an exponent only.
constexpr int64_t kMaxPlainDigits = 40;

std::u32string CodePoints(const std::string& text) {
  std::u32string out;
  for (size_t pos = 0; pos < text.size();) out.push_back(NextCodePoint(text, &pos));
  return out;
}

class SchemaCompiler {
 public:
  SchemaCompiler(const json& root, bool strict, const ConstraintLimits& limits, DfaPtr any_string,
                 const ByteSet& spellable, CompileBudget* budget)
      : root_(root),
        limits_(limits),
        spellable_(spellable),
        budget_(budget),
        reader_(root, strict, limits, budget) {
    grammar_.dfas.push_back(std::move(any_string));
    grammar_.any_string = 0;
  }

  Result<Grammar> Run() {
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
    return std::move(grammar_);
  }

 private:
  template <typename T>
  Result<NodeId> AddNode(T value) {
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1));
    grammar_.nodes.push_back({std::move(value)});
    return static_cast<NodeId>(grammar_.nodes.size() - 1);
  }

  // Returns the choice node for the branches of `schemas`. Its options are filled in later, because
  // schemas may refer to each other in cycles.
  Result<NodeId> NodeOf(const Conjunction& schemas) {
    const auto it = nodes_.find(schemas);
    if (it != nodes_.end()) return it->second;
    MOESERVE_ASSIGN_OR_RETURN(const NodeId node, AddNode(ChoiceNode()));
    nodes_[schemas] = node;
    queue_.push_back({node, schemas});
    if (!schemas.empty()) schema_of_[node] = schemas[0];
    return node;
  }

  Status FillChoice(NodeId node, const Conjunction& schemas) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches branches, reader_.Read(schemas));
    const json* place = schemas.empty() ? &root_ : schemas[0];
    std::vector<NodeId> options;
    for (const Branch& branch : branches) {
      MOESERVE_RETURN_IF_ERROR(AddOptions(place, branch, &options));
    }
    std::get<ChoiceNode>(grammar_.nodes[node].value).options = std::move(options);
    return absl::OkStatus();
  }

  Status AddOptions(const json* place, const Branch& branch, std::vector<NodeId>* options) {
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
      MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Array(place, branch));
      options->push_back(node);
    }
    if (branch.types & kObjectType) {
      MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Object(branch));
      options->push_back(node);
    }
    return absl::OkStatus();
  }

  Result<NodeId> Scalar(int32_t dfa) {
    ScalarNode node;
    node.dfa = dfa;
    return AddNode(std::move(node));
  }

  Result<int32_t> AddDfa(const std::string& key, ByteDfa dfa) {
    MOESERVE_RETURN_IF_ERROR(dfa.Finish(spellable_, budget_));
    grammar_.dfas.push_back(std::make_shared<const ByteDfa>(std::move(dfa)));
    const int32_t id = static_cast<int32_t>(grammar_.dfas.size() - 1);
    dfas_[key] = id;
    return id;
  }

  // Returns a node that matches any of `texts`, literally, or of `strings`, spelt as JSON strings.
  Result<NodeId> Literals(const std::vector<std::string>& texts,
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

  Result<NodeId> Number(const Branch& branch) {
    NumberRange range = branch.number;
    range.integer = !(branch.types & kFractionType);
    std::string key = "number";
    for (const auto& bound : {range.min, range.max}) {
      key += ' ';
      if (bound) key += bound->value.Plain() + (bound->exclusive ? "x" : "");
    }
    key += " " + std::to_string(range.multiple_of) + (range.integer ? "i" : "");
    if (const auto it = dfas_.find(key); it != dfas_.end()) return Scalar(it->second);
    MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, NumberDfa(range, budget_));
    MOESERVE_ASSIGN_OR_RETURN(const int32_t id, AddDfa(key, std::move(dfa)));
    return Scalar(id);
  }

  // Returns the index of an automaton for the strings that match all formats and patterns of
  // `branch`, which must have at least one.
  Result<int32_t> PatternedStrings(const json* place, const Branch& branch) {
    std::string key = Concat("string ", branch.min_chars, ' ', branch.max_chars);
    for (const std::string& format : branch.formats) key += "\nf" + format;
    for (const std::string& pattern : branch.patterns) key += "\np" + pattern;
    if (const auto it = dfas_.find(key); it != dfas_.end()) return it->second;
    std::optional<ByteDfa> all;
    const auto add = [&](const std::string& pattern, MatchMode mode) -> Status {
      Result<ByteDfa> content = PatternDfa(pattern, mode, Encoding::kJsonString, budget_);
      if (!content.ok()) {
        return reader_.Error(place, "pattern: " + std::string(content.status().message()));
      }
      MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, Quoted(*content, budget_));
      // Finish() removes useless transitions before the automaton is combined with others.
      MOESERVE_RETURN_IF_ERROR(dfa.Finish(spellable_, budget_));
      if (all) {
        MOESERVE_ASSIGN_OR_RETURN(dfa, Intersection(*all, dfa, budget_));
      }
      all = std::move(dfa);
      return absl::OkStatus();
    };
    for (const std::string& format : branch.formats) {
      MOESERVE_RETURN_IF_ERROR(add(*FormatPattern(format), MatchMode::kWholeText));
    }
    for (const std::string& pattern : branch.patterns) {
      MOESERVE_RETURN_IF_ERROR(add(pattern, MatchMode::kSearch));
    }
    if (branch.min_chars > 0 || branch.max_chars < kNoLimit) {
      MOESERVE_ASSIGN_OR_RETURN(all, WithLength(*all, branch.min_chars, branch.max_chars, budget_));
    }
    return AddDfa(key, *std::move(all));
  }

  Result<NodeId> String(const json* place, const Branch& branch) {
    if (branch.patterns.empty() && branch.formats.empty()) {
      ScalarNode node;
      node.dfa = grammar_.any_string;
      node.counted = branch.min_chars > 0 || branch.max_chars < kNoLimit;
      node.min_chars = branch.min_chars;
      node.max_chars = branch.max_chars;
      return AddNode(std::move(node));
    }
    MOESERVE_ASSIGN_OR_RETURN(const int32_t dfa, PatternedStrings(place, branch));
    return Scalar(dfa);
  }

  Result<NodeId> Array(const json* place, const Branch& branch) {
    if (branch.unique_items && branch.max_items > 1) {
      return reader_.Error(place, "\"uniqueItems\" is not supported");
    }
    ArrayNode node;
    node.min_items = branch.min_items;
    node.max_items = branch.max_items;
    size_t prefix = 0;
    for (const ArrayPart& part : branch.arrays) prefix = std::max(prefix, part.prefix.size());
    for (size_t i = 0; i < prefix; ++i) {
      MOESERVE_ASSIGN_OR_RETURN(node.prefix.emplace_back(), NodeOf(branch.ItemAt(i)));
    }
    MOESERVE_ASSIGN_OR_RETURN(node.items, NodeOf(branch.ItemAt(prefix)));
    return AddNode(std::move(node));
  }

  Result<NodeId> Object(const Branch& branch) {
    std::set<std::string> names = branch.required;
    for (const ObjectPart& part : branch.objects) {
      if (part.properties == nullptr) continue;
      for (const auto& [name, schema] : part.properties->items()) names.insert(name);
    }
    // Charges the names to the budget, because many branches may share a long list of names.
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(static_cast<int64_t>(names.size())));
    ObjectNode node;
    node.min_properties = branch.min_properties;
    node.max_properties = branch.max_properties;
    for (const std::string& name : names) {
      Property property;
      property.name = CodePoints(name);
      property.required = branch.required.contains(name);
      MOESERVE_ASSIGN_OR_RETURN(property.value, NodeOf(branch.PropertyNamed(name)));
      node.properties.push_back(std::move(property));
    }
    MOESERVE_ASSIGN_OR_RETURN(node.additional, NodeOf(branch.Additional()));
    return AddNode(Sorted(std::move(node)));
  }

  static ObjectNode Sorted(ObjectNode node) {
    std::sort(node.properties.begin(), node.properties.end(),
              [](const Property& a, const Property& b) { return a.name < b.name; });
    return node;
  }

  // Adds options for the listed values that the branch's other conditions allow.
  Status AddValues(const json* place, const Branch& branch, std::vector<NodeId>* options) {
    std::vector<std::string> texts;
    std::vector<std::string> strings;
    NumberRange range = branch.number;
    range.integer = range.multiple_of > 1;
    for (const json* value : *branch.values) {
      MOESERVE_RETURN_IF_ERROR(budget_->Tick(64));
      const bool structured = value->is_array() || value->is_object();
      if (structured) {
        const bool array = value->is_array();
        const bool restricted = array ? !branch.arrays.empty() || branch.min_items > 0 ||
                                            branch.max_items < kNoLimit || branch.unique_items
                                      : !branch.objects.empty() || !branch.required.empty() ||
                                            branch.min_properties > 0 ||
                                            branch.max_properties < kNoLimit;
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
        if (!branch.patterns.empty() || !branch.formats.empty()) {
          MOESERVE_ASSIGN_OR_RETURN(const int32_t dfa, PatternedStrings(place, branch));
          if (!grammar_.dfas[dfa]->Matches(value->dump())) continue;
        }
        strings.push_back(text);
      } else if (value->is_number()) {
        if (!range.Contains(DecimalOf(*value))) continue;
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

  // Adds the spellings of a listed number: plain, and with an exponent where common writers use
  // one. An integer is spelt with a fraction only if the schema spells it so.
  static void AddSpellings(const json& value, std::vector<std::string>* texts) {
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

  // Returns a node that matches exactly `value`.
  Result<NodeId> Constant(const json& value) {
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
      for (const auto& [name, item] : value.items()) {
        Property property;
        property.name = CodePoints(name);
        property.required = true;
        MOESERVE_ASSIGN_OR_RETURN(property.value, Constant(item));
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

  // Returns an error that names the part of the schema that no text matches; finds it by following
  // mandatory parts down from the root.
  Status Unsatisfiable(const Grammar& unpruned) const {
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

  const json& root_;
  const ConstraintLimits& limits_;
  const ByteSet& spellable_;
  CompileBudget* budget_;
  SchemaReader reader_;
  Grammar grammar_;
  std::map<Conjunction, NodeId> nodes_;
  std::vector<std::pair<NodeId, Conjunction>> queue_;
  std::map<NodeId, const json*> schema_of_;
  std::map<std::string, int32_t> dfas_;
};

}  // namespace

Result<Grammar> CompileSchema(std::string_view schema, bool strict, const ConstraintLimits& limits,
                              DfaPtr any_string, const ByteSet& spellable, CompileBudget* budget) {
  if (schema.size() > limits.schema_bytes) {
    return absl::InvalidArgumentError(
        Concat("schema: ", schema.size(), " bytes, more than ", limits.schema_bytes));
  }
  if (!IsValidUtf8(schema)) return absl::InvalidArgumentError("schema: not UTF-8");
  // A schema inside another schema is at most three levels of JSON values deeper; listed values may
  // add some levels.
  const int max_depth = 3 * limits.schema_nesting + 32;
  bool too_deep = false;
  std::string duplicate;
  // Keys so far of each object that encloses the current value.
  std::vector<std::set<std::string>> keys;
  json document;
  try {
    document = json::parse(
        schema.begin(), schema.end(),
        [&](int depth, json::parse_event_t event, json& value) {
          too_deep |= depth > max_depth;
          if (event == json::parse_event_t::object_start) keys.emplace_back();
          if (event == json::parse_event_t::object_end) keys.pop_back();
          if (event == json::parse_event_t::key && duplicate.empty() &&
              !keys.back().insert(value.get<std::string>()).second) {
            duplicate = value.dump();
          }
          return !too_deep;
        },
        /*allow_exceptions=*/false);
  } catch (const std::exception&) {
    return absl::InvalidArgumentError("schema: not valid JSON");
  }
  if (too_deep) return absl::InvalidArgumentError("schema: values are nested too deep");
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError("schema: the key " + duplicate.substr(0, 64) +
                                      " stands twice in one object");
  }
  if (document.is_discarded()) return absl::InvalidArgumentError("schema: not valid JSON");
  if (!document.is_object() && !document.is_boolean()) {
    return absl::InvalidArgumentError("schema: must be an object or a boolean");
  }
  return SchemaCompiler(document, strict, limits, std::move(any_string), spellable, budget).Run();
}

}  // namespace moeserve::structured
