// Arrays and objects.
#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/grammar_distances.h"
#include "engine/text/structured/schemas/schema_graph.h"
#include "engine/text/structured/schemas/schema_keys.h"
#include "engine/text/structured/schemas/schema_scalars.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Largest number of nodes of ArrayNode::distinct.
constexpr size_t kMaxDistinct = 64;
// Keys that a pattern or propertyNames allows are named properties if there are at most this many.
constexpr size_t kMaxNamedKeys = 1000;
constexpr size_t kMaxNameParts = 32;
// The properties of an object with more names than this come in any order if minProperties asks for
// more than the required ones.
constexpr size_t kMaxOrderedFillers = 64;

}  // namespace

Status SchemaCompiler::AddArrays(const json* place, const Branch& branch,
                                 std::vector<NodeId>* options) {
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

bool SchemaCompiler::Forbidden(const Conjunction& schemas) {
  return std::any_of(schemas.begin(), schemas.end(), [](const json* schema) {
    return schema->is_boolean() && !schema->get<bool>();
  });
}

size_t SchemaCompiler::PrefixLength(const Branch& branch) {
  size_t prefix = 0;
  for (const ArrayPart& part : branch.arrays) prefix = std::max(prefix, part.prefix.size());
  return prefix;
}

Result<NodeId> SchemaCompiler::Array(const Branch& branch) {
  ArrayNode node;
  node.min_items = branch.min_items;
  node.max_items = branch.max_items;
  const size_t prefix = PrefixLength(branch);
  // Many arrays may share a long list of first items.
  MOESERVE_RETURN_IF_ERROR(budget_->AddStates(static_cast<int64_t>(prefix)));
  for (size_t i = 0; i < prefix; ++i) {
    MOESERVE_ASSIGN_OR_RETURN(node.prefix.emplace_back(), NodeOf(branch.ItemAt(i)));
  }
  MOESERVE_ASSIGN_OR_RETURN(node.items, NodeOf(branch.ItemAt(prefix)));
  return AddNode(std::move(node));
}

Result<NodeId> SchemaCompiler::Containing(const Branch& branch, const ContainsPart& part) {
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

Status SchemaCompiler::AddDistinct(const json* place, const Branch& branch,
                                   std::vector<NodeId>* options) {
  const auto unsupported = [&] {
    return reader_.Error(
        place, Concat("\"uniqueItems\" is supported for arrays of strings, or of at most ",
                      kMaxDistinct, " listed strings, numbers, booleans and null, only"));
  };
  if (PrefixLength(branch) > 0 || !branch.contains.empty()) return unsupported();
  MOESERVE_ASSIGN_OR_RETURN(const Branches items, reader_.Read(branch.ItemAt(0)));
  const bool strings = std::all_of(items.begin(), items.end(),
                                   [](const Branch& item) { return item.types == kStringType; });
  size_t listed = 0;
  bool all_listed = true;
  for (const Branch& item : items) {
    all_listed &= item.values.has_value();
    listed += item.values ? item.values->size() : 0;
  }
  if (strings && !items.empty() && (!all_listed || listed > kMaxDistinct)) {
    MOESERVE_ASSIGN_OR_RETURN(options->emplace_back(), StringSet(place, branch, items));
    return absl::OkStatus();
  }
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
                                     [&](const json* other) { return SameValue(*other, *value); });
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

Result<NodeId> SchemaCompiler::StringSet(const json* place, const Branch& branch,
                                         const Branches& items) {
  ByteDfa empty;
  empty.num_classes = 1;
  empty.AddState(/*is_accepting=*/true, /*is_boundary=*/true);
  MOESERVE_ASSIGN_OR_RETURN(const int32_t id, AddDfa("empty", std::move(empty)));
  MOESERVE_ASSIGN_OR_RETURN(const NodeId nothing, Scalar(id));
  ObjectNode node;
  node.is_set = true;
  node.min_properties = branch.min_items;
  node.max_properties = branch.max_items;
  if (items.size() == 1 && !items[0].values && StringKey(items[0]) == StringKey(Branch())) {
    node.additional = nothing;
    return AddNode(std::move(node));
  }
  MOESERVE_ASSIGN_OR_RETURN(ByteDfa allowed, NamesOf(place, branch.ItemAt(0)));
  MOESERVE_ASSIGN_OR_RETURN(const auto few, FewKeys(allowed, kMaxNamedKeys, budget_));
  if (!few) {
    KeySet set;
    for (const uint8_t accepting : allowed.accepting) {
      set.value.push_back(accepting ? nothing : kNoNode);
    }
    set.dfa = static_cast<int32_t>(grammar_.dfas.size());
    grammar_.dfas.push_back(std::make_shared<const ByteDfa>(std::move(allowed)));
    node.keys = static_cast<int32_t>(grammar_.key_sets.size());
    grammar_.key_sets.push_back(std::move(set));
    return AddNode(std::move(node));
  }
  MOESERVE_RETURN_IF_ERROR(budget_->AddStates(static_cast<int64_t>(few->size())));
  for (const std::string& text : *few) {
    Property property;
    property.name = CodePoints(text);
    property.value = nothing;
    node.properties.push_back(std::move(property));
  }
  return AddNode(Sorted(std::move(node)));
}

Result<NodeId> SchemaCompiler::Object(const json* place, const Branch& branch) {
  const auto at_place = [&](const Status& status) {
    return reader_.Error(place, std::string(status.message()));
  };
  MOESERVE_ASSIGN_OR_RETURN(auto places, PlacesOf(branch));
  std::set<std::string> names = branch.required;
  for (const auto& [name, place_of_name] : places) names.insert(name);
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
  if (branch.min_properties > static_cast<int64_t>(names.size()) + kMaxFillers) {
    return reader_.Error(place, Concat("minProperties asks for more than ", kMaxFillers,
                                       " properties without a name in the schema"));
  }
  node.min_properties = branch.min_properties;
  node.max_properties = branch.max_properties;
  // To fill an object with optional properties in order, the matcher compares the rests of all.
  const bool closed = IsClosed(branch, places.size());
  const bool fills = branch.min_properties > static_cast<int64_t>(branch.required.size());
  if (fills && places.size() > kMaxOrderedFillers) places.clear();
  for (const std::string& name : names) {
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(static_cast<int64_t>(8 + branch.objects.size())));
    Property property;
    property.name = CodePoints(name);
    property.required = branch.required.contains(name);
    if (const auto it = places.find(name); it != places.end()) property.order = it->second;
    if (!allowed || allowed->Matches(json(name).dump())) {
      const auto matched = reader_.Matching(patterns, name);
      if (!matched.ok()) return at_place(matched.status());
      MOESERVE_ASSIGN_OR_RETURN(property.value, NodeOf(branch.PropertyNamed(name, *matched)));
    }
    node.properties.push_back(std::move(property));
  }
  if (!allowed && patterns.empty() && !closed) {
    MOESERVE_ASSIGN_OR_RETURN(node.additional, NodeOf(branch.Unnamed({})));
  }
  return AddNode(Sorted(std::move(node)));
}

bool SchemaCompiler::IsClosed(const Branch& branch, size_t named) const {
  const bool open = std::any_of(branch.objects.begin(), branch.objects.end(),
                                [](const ObjectPart& part) { return part.additional != nullptr; });
  // An object that needs more properties than the schema names cannot be closed.
  return closed_objects_ && !open && named > 0 &&
         branch.min_properties <= static_cast<int64_t>(named);
}

Result<std::map<std::string, int32_t>> SchemaCompiler::PlacesOf(const Branch& branch) {
  std::map<std::string, int32_t> out;
  const auto add = [&](const std::string& name) {
    out.try_emplace(name, static_cast<int32_t>(out.size()));
  };
  for (const ObjectPart& part : branch.objects) {
    const size_t named = part.properties == nullptr ? 0 : part.properties->size();
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(static_cast<int64_t>(1 + part.more.size() + named)));
    for (const auto& [name, schema] : part.more) add(name);
    if (part.properties == nullptr) continue;
    auto it = members_.find(part.properties);
    if (it == members_.end()) {
      it = members_.emplace(part.properties, order_.Members(*part.properties)).first;
    }
    for (const auto& [name, schema] : it->second) add(name);
  }
  return out;
}

Result<ByteDfa> SchemaCompiler::NamesOf(const json* place, const Conjunction& schemas) {
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

std::set<std::string> SchemaCompiler::LabelOf(uint32_t bits,
                                              const std::set<std::string>& patterns) {
  std::set<std::string> out;
  int i = 0;
  for (const std::string& pattern : patterns) {
    if ((bits >> i++) & 1) out.insert(pattern);
  }
  return out;
}

Status SchemaCompiler::ExcludeForbidden(const Branch& branch, const std::set<std::string>& patterns,
                                        LabeledDfa* keys) {
  for (int32_t s = 0; s < keys->dfa.num_states(); ++s) {
    if (!keys->dfa.accepting[s]) continue;
    if (Forbidden(branch.Unnamed(LabelOf(keys->labels[s], patterns)))) keys->dfa.accepting[s] = 0;
  }
  return keys->dfa.Finish(spellable_, budget_);
}

Result<int32_t> SchemaCompiler::AddKeys(const Branch& branch, const std::set<std::string>& patterns,
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

ObjectNode SchemaCompiler::Sorted(ObjectNode node) {
  std::sort(node.properties.begin(), node.properties.end(),
            [](const Property& a, const Property& b) { return a.name < b.name; });
  return node;
}

}  // namespace moeserve::structured
