#include "engine/text/structured/schemas/schema_compiler.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/message.h"
#include "engine/text/structured/automata/nfa.h"
#include "engine/text/structured/schemas/schema_document.h"
#include "engine/text/structured/schemas/schema_keys.h"
#include "engine/text/structured/schemas/schema_reader.h"
#include "engine/text/structured/schemas/schema_scalars.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Largest number of digits of a listed number that is spelt without an exponent; longer ones are
// spelt with an exponent only.
constexpr int64_t kMaxPlainDigits = 40;
// Largest number of nodes of ArrayNode::distinct.
constexpr size_t kMaxDistinct = 64;
// Keys that a pattern or propertyNames allows are named properties if there are at most this many.
constexpr size_t kMaxNamedKeys = 1000;
constexpr size_t kMaxNameParts = 32;

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
    if (RootsOverlap()) grammar_.end_cost = 1;
    return std::move(grammar_);
  }

 private:
  // Whether a text may be complete as one scalar and go on as another one, as 1 and 12.5 may. (A
  // string ends with its quote.)
  bool RootsOverlap() const {
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
      MOESERVE_RETURN_IF_ERROR(AddArrays(place, branch, options));
    }
    if (branch.types & kObjectType) {
      MOESERVE_ASSIGN_OR_RETURN(const NodeId node, Object(place, branch));
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
    const std::string key = NumberKey(branch);
    if (const auto it = dfas_.find(key); it != dfas_.end()) return Scalar(it->second);
    MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, NumbersOf(branch, budget_));
    MOESERVE_ASSIGN_OR_RETURN(const int32_t id, AddDfa(key, std::move(dfa)));
    return Scalar(id);
  }

  // Returns the index of an automaton for the strings that `branch` allows.
  Result<int32_t> Strings(const json* place, const Branch& branch) {
    const std::string key = StringKey(branch);
    if (const auto it = dfas_.find(key); it != dfas_.end()) return it->second;
    Result<ByteDfa> dfa = StringsOf(branch, AnyString(), budget_);
    if (!dfa.ok()) {
      return reader_.Error(place, "pattern: " + std::string(dfa.status().message()));
    }
    return AddDfa(key, *std::move(dfa));
  }

  const ByteDfa& AnyString() const { return *grammar_.dfas[grammar_.any_string]; }

  Result<NodeId> String(const json* place, const Branch& branch) {
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

  Status AddArrays(const json* place, const Branch& branch, std::vector<NodeId>* options) {
    if (branch.unique_items && branch.max_items > 1) return AddDistinct(place, branch, options);
    if (branch.contains.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), Array(branch));
      return absl::OkStatus();
    }
    if (branch.contains.size() > 1) {
      return reader_.Error(place, "more than one \"contains\" for an array is not supported");
    }
    const ContainsPart& part = branch.contains[0];
    const size_t prefix = PrefixLength(branch);
    Branch others = branch;
    others.contains.clear();
    if (prefix == 0) {
      if (part.min > part.max) return absl::OkStatus();
      MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), Containing(others, part));
      return absl::OkStatus();
    }
    if (part.min != 1 || part.max < kNoLimit) {
      return reader_.Error(place,
                           "\"minContains\" and \"maxContains\" are not supported beside "
                           "\"prefixItems\"");
    }
    // One of the first items is contained, if no item behind them can be.
    const bool open = branch.max_items > static_cast<int64_t>(prefix);
    if (open && !Forbidden(branch.ItemAt(prefix))) {
      return reader_.Error(place,
                           "\"contains\" beside \"prefixItems\" is supported only if no "
                           "further items are allowed");
    }
    static const json kTrue = true;
    for (size_t i = 0; i < prefix; ++i) {
      Branch one = others;
      ArrayPart found;
      found.prefix.assign(i, &kTrue);
      found.prefix.push_back(part.schema);
      one.arrays.push_back(std::move(found));
      one.min_items = std::max(one.min_items, static_cast<int64_t>(i) + 1);
      if (one.min_items > one.max_items) continue;
      MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), Array(one));
    }
    return absl::OkStatus();
  }

  static bool Forbidden(const Conjunction& schemas) {
    return std::any_of(schemas.begin(), schemas.end(), [](const json* schema) {
      return schema->is_boolean() && !schema->get<bool>();
    });
  }

  static size_t PrefixLength(const Branch& branch) {
    size_t prefix = 0;
    for (const ArrayPart& part : branch.arrays) prefix = std::max(prefix, part.prefix.size());
    return prefix;
  }

  Result<NodeId> Array(const Branch& branch) {
    ArrayNode node;
    node.min_items = branch.min_items;
    node.max_items = branch.max_items;
    const size_t prefix = PrefixLength(branch);
    for (size_t i = 0; i < prefix; ++i) {
      MOESERVE_ASSIGN_OR_RETURN(node.prefix.emplace_back(), NodeOf(branch.ItemAt(i)));
    }
    MOESERVE_ASSIGN_OR_RETURN(node.items, NodeOf(branch.ItemAt(prefix)));
    return AddNode(std::move(node));
  }

  // Arrays without a prefix, of which some items must match a schema.
  Result<NodeId> Containing(const Branch& branch, const ContainsPart& part) {
    ArrayNode node;
    node.min_items = branch.min_items;
    node.max_items = branch.max_items;
    node.min_contained = part.min;
    node.max_contained = part.max;
    Conjunction contained = branch.ItemAt(0);
    contained.push_back(part.schema);
    Tidy(&contained);
    MOESERVE_ASSIGN_OR_RETURN(node.contained, NodeOf(contained));
    Conjunction items = branch.ItemAt(0);
    if (part.max < kNoLimit) {
      // Every item that matches counts.
      items.push_back(reader_.Not(part.schema));
      Tidy(&items);
    }
    MOESERVE_ASSIGN_OR_RETURN(node.items, NodeOf(items));
    return AddNode(std::move(node));
  }

  // Adds arrays of different items, of which there must be few.
  Status AddDistinct(const json* place, const Branch& branch, std::vector<NodeId>* options) {
    const auto unsupported = [&] {
      return reader_.Error(
          place, Concat("\"uniqueItems\" is supported for arrays of at most ", kMaxDistinct,
                        " listed strings, numbers, booleans and null only"));
    };
    if (PrefixLength(branch) > 0 || !branch.contains.empty()) return unsupported();
    MOESERVE_ASSIGN_OR_RETURN(const Branches items, reader_.Read(branch.ItemAt(0)));
    static const json kPlain[] = {nullptr, false, true};
    ArrayNode node;
    std::vector<const json*> seen;
    for (const Branch& item : items) {
      std::vector<const json*> values;
      if (item.values) {
        values = *item.values;
      } else {
        if (item.types & ~(kNullType | kBooleanType)) return unsupported();
        if (item.types & kNullType) values.push_back(&kPlain[0]);
        if (item.types & kBooleanType) values.insert(values.end(), {&kPlain[1], &kPlain[2]});
      }
      for (const json* value : values) {
        if (value->is_structured()) return unsupported();
        const bool known = std::any_of(seen.begin(), seen.end(),
                                       [&](const json* other) { return *other == *value; });
        if (known) continue;
        Branch one = item;
        one.values = {value};
        std::vector<NodeId> nodes;
        MOESERVE_RETURN_IF_ERROR(AddValues(place, one, &nodes));
        if (nodes.empty()) continue;
        seen.push_back(value);
        node.distinct.push_back(nodes[0]);
        if (node.distinct.size() > kMaxDistinct) return unsupported();
      }
    }
    node.min_items = branch.min_items;
    node.max_items = std::min(branch.max_items, static_cast<int64_t>(node.distinct.size()));
    if (node.distinct.empty()) node.max_items = 0;
    MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), AddNode(std::move(node)));
    return absl::OkStatus();
  }

  Result<NodeId> Object(const json* place, const Branch& branch) {
    const auto at_place = [&](const Status& status) {
      return reader_.Error(place, std::string(status.message()));
    };
    std::set<std::string> names = branch.required;
    for (const ObjectPart& part : branch.objects) {
      for (const auto& [name, schema] : part.more) names.insert(name);
      if (part.properties == nullptr) continue;
      for (const auto& [name, schema] : part.properties->items()) names.insert(name);
    }
    ObjectNode node;
    const std::set<std::string> patterns = branch.NamePatterns();
    std::optional<ByteDfa> allowed;
    if (!branch.names.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(allowed, NamesOf(place, branch.names));
    }
    std::optional<LabeledDfa> keys;
    if (allowed || !patterns.empty()) {
      Result<LabeledDfa> labeled =
          KeysByPatterns(AnyString(), allowed ? &*allowed : nullptr, patterns, spellable_, budget_);
      if (!labeled.ok()) return at_place(labeled.status());
      keys = *std::move(labeled);
      MOESERVE_RETURN_IF_ERROR(ExcludeForbidden(branch, patterns, &*keys));
      // A few keys are better named.
      MOESERVE_ASSIGN_OR_RETURN(const auto few, FewKeys(keys->dfa, kMaxNamedKeys, budget_));
      if (few) {
        names.insert(few->begin(), few->end());
        keys.reset();
      } else {
        MOESERVE_ASSIGN_OR_RETURN(node.keys, AddKeys(branch, patterns, *std::move(keys)));
      }
    }
    // Charges the names to the budget, because many branches may share a long list of names.
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(static_cast<int64_t>(names.size())));
    node.min_properties = branch.min_properties;
    node.max_properties = branch.max_properties;
    for (const std::string& name : names) {
      Property property;
      property.name = CodePoints(name);
      property.required = branch.required.contains(name);
      if (!allowed || allowed->Matches(json(name).dump())) {
        const auto matched = reader_.Matching(patterns, name);
        if (!matched.ok()) return at_place(matched.status());
        MOESERVE_ASSIGN_OR_RETURN(property.value, NodeOf(branch.PropertyNamed(name, *matched)));
      }
      node.properties.push_back(std::move(property));
    }
    if (!allowed && patterns.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(node.additional, NodeOf(branch.Unnamed({})));
    }
    return AddNode(Sorted(std::move(node)));
  }

  // Returns an automaton for the quoted names that match all of `schemas`.
  Result<ByteDfa> NamesOf(const json* place, const Conjunction& schemas) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches branches, reader_.Read(schemas));
    std::vector<ByteDfa> parts;
    for (const Branch& branch : branches) {
      if (!(branch.types & kStringType)) continue;
      if (branch.values) {
        std::vector<NodeId> nodes;
        Branch strings = branch;
        std::erase_if(*strings.values, [](const json* value) { return !value->is_string(); });
        MOESERVE_RETURN_IF_ERROR(AddValues(place, strings, &nodes));
        for (const NodeId node : nodes) {
          parts.push_back(*grammar_.dfas[std::get<ScalarNode>(grammar_.nodes[node].value).dfa]);
        }
      } else {
        MOESERVE_ASSIGN_OR_RETURN(const int32_t dfa, Strings(place, branch));
        parts.push_back(*grammar_.dfas[dfa]);
      }
      if (parts.size() > kMaxNameParts) {
        return reader_.Error(place, "propertyNames has too many alternatives");
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(LabeledDfa out, Labeled(AnyString(), parts, budget_));
    for (int32_t s = 0; s < out.dfa.num_states(); ++s) {
      if (out.labels[s] == 0) out.dfa.accepting[s] = 0;
    }
    MOESERVE_RETURN_IF_ERROR(out.dfa.Finish(spellable_, budget_));
    return std::move(out.dfa);
  }

  static std::set<std::string> LabelOf(uint32_t bits, const std::set<std::string>& patterns) {
    std::set<std::string> out;
    int i = 0;
    for (const std::string& pattern : patterns) {
      if ((bits >> i++) & 1) out.insert(pattern);
    }
    return out;
  }

  // Removes the keys whose schema is false.
  Status ExcludeForbidden(const Branch& branch, const std::set<std::string>& patterns,
                          LabeledDfa* keys) {
    for (int32_t s = 0; s < keys->dfa.num_states(); ++s) {
      if (!keys->dfa.accepting[s]) continue;
      if (Forbidden(branch.Unnamed(LabelOf(keys->labels[s], patterns)))) keys->dfa.accepting[s] = 0;
    }
    return keys->dfa.Finish(spellable_, budget_);
  }

  Result<int32_t> AddKeys(const Branch& branch, const std::set<std::string>& patterns,
                          LabeledDfa keys) {
    KeySet set;
    set.value.assign(keys.dfa.num_states(), kNoNode);
    for (int32_t s = 0; s < keys.dfa.num_states(); ++s) {
      if (!keys.dfa.accepting[s]) continue;
      MOESERVE_ASSIGN_OR_RETURN(set.value[s],
                                NodeOf(branch.Unnamed(LabelOf(keys.labels[s], patterns))));
    }
    set.dfa = static_cast<int32_t>(grammar_.dfas.size());
    grammar_.dfas.push_back(std::make_shared<const ByteDfa>(std::move(keys.dfa)));
    grammar_.key_sets.push_back(std::move(set));
    return static_cast<int32_t>(grammar_.key_sets.size() - 1);
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
        MOESERVE_ASSIGN_OR_RETURN(const bool allowed,
                                  AllowsNumber(branch, DecimalOf(*value), budget_));
        if (!allowed) continue;
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
  MOESERVE_ASSIGN_OR_RETURN(const json document, ParseSchema(schema, limits));
  return SchemaCompiler(document, strict, limits, std::move(any_string), spellable, budget).Run();
}

}  // namespace moeserve::structured
