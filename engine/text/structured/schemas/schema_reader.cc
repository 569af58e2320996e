#include "engine/text/structured/schemas/schema_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/automata/pattern.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Largest number of names, patterns and listed values in all branches of one schema; limits their
// memory.
constexpr int64_t kMaxBranchParts = 100000;
// Largest depth of nested subschemas ($ref, anyOf and the like) that all apply to one value; limits
// the use of the stack. Schemas of properties and items start a new count.
constexpr size_t kMaxChain = 100;
int64_t PartsOf(const Branch& branch) {
  size_t parts = branch.required.size() + branch.patterns.size() + branch.not_patterns.size() +
                 branch.objects.size() + branch.arrays.size() + branch.contains.size() +
                 branch.excluded.size() + branch.names.size() +
                 (branch.values ? branch.values->size() : 0);
  for (const ObjectPart& part : branch.objects) parts += part.more.size();
  return static_cast<int64_t>(parts);
}

}  // namespace

std::string SchemaReader::PathOf(const json* schema) const {
  const auto it = paths_.find(schema);
  return it == paths_.end() ? "#" : "#" + it->second.path;
}

Status SchemaReader::Error(const json* schema, const std::string& what) const {
  return absl::InvalidArgumentError("schema at " + PathOf(schema) + ": " + what);
}

Status SchemaReader::Enter(const json* parent, const std::string& step, const json* child) {
  if (!child->is_object() && !child->is_boolean()) {
    return Error(parent, step.substr(1) + " must be a schema (an object or a boolean)");
  }
  const Place& place = paths_[parent];
  const int depth = place.depth + 1;
  if (depth > limits_.schema_nesting) {
    return Error(parent, Concat("schemas are nested deeper than ", limits_.schema_nesting));
  }
  std::string path = place.path + step;
  paths_.try_emplace(child, Place{std::move(path), depth});
  return absl::OkStatus();
}

Result<Branches> SchemaReader::Read(const Conjunction& schemas) {
  // A conjunction is sorted by address, which is no order that answers could follow.
  Conjunction in_order = schemas;
  std::stable_sort(in_order.begin(), in_order.end(), [&](const json* a, const json* b) {
    return order_.PlaceOf(a) < order_.PlaceOf(b);
  });
  Branches out(1);
  for (const json* schema : in_order) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches branches, ReadSchema(schema));
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, branches));
  }
  return out;
}

Result<Branches> SchemaReader::Product(const json* schema, const Branches& a, const Branches& b) {
  Branches out;
  int64_t parts = 0;
  for (const Branch& x : a) {
    for (const Branch& y : b) {
      int64_t work = 64 + PartsOf(x) + PartsOf(y);
      if (x.values && y.values) work += static_cast<int64_t>(x.values->size() * y.values->size());
      MOESERVE_RETURN_IF_ERROR(budget_->Tick(work));
      if (std::optional<Branch> both = Meet(x, y)) {
        if (both->number.multiple_of > kMaxMultiple) {
          return Error(schema,
                       Concat("multipleOf: the least common multiple of all values is above ",
                              kMaxMultiple));
        }
        parts += PartsOf(*both);
        out.push_back(*std::move(both));
      }
      if (out.size() > kMaxBranches || (parts > kMaxBranchParts && out.size() > 1)) {
        return Error(schema, "too many combinations of alternatives");
      }
    }
  }
  return out;
}

Result<Branches> SchemaReader::ReadSchema(const json* schema) {
  if (const auto it = negated_.find(schema); it != negated_.end()) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches branches, ReadSchema(it->second));
    return Complement(it->second, branches);
  }
  if (schema->is_boolean()) return Branches(schema->get<bool>() ? 1 : 0);
  if (!in_progress_.insert(schema).second) {
    return Error(schema, "the schema refers to itself without a property or item in between");
  }
  if (in_progress_.size() > kMaxChain) {
    in_progress_.erase(schema);
    return Error(schema,
                 Concat("more than ", kMaxChain,
                        " schemas refer to each other without a property or item in between"));
  }
  Result<Branches> out = ReadKeywords(schema);
  in_progress_.erase(schema);
  return out;
}

Result<std::vector<Branches>> SchemaReader::ReadList(const json* schema, const std::string& key,
                                                     const json& value) {
  if (!value.is_array() || value.empty()) return Error(schema, key + " must be a non-empty array");
  std::vector<Branches> parts;
  for (size_t i = 0; i < value.size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(Enter(schema, Concat("/", key, "/", i), &value[i]));
    MOESERVE_ASSIGN_OR_RETURN(parts.emplace_back(), ReadSchema(&value[i]));
  }
  return parts;
}

Result<Branches> SchemaReader::ReadKeywords(const json* schema) {
  MOESERVE_RETURN_IF_ERROR(budget_->Tick(64));
  PlacedBranches parts;
  const bool alone = references_.ref_stands_alone() && schema->contains("$ref");
  if (!alone) {
    const auto properties = schema->find("properties");
    const bool names = properties != schema->end();
    MOESERVE_ASSIGN_OR_RETURN(Branches own, ReadOwn(schema));
    parts.push_back({names ? order_.PlaceOf(&*properties) : 0, std::move(own)});
  }
  MOESERVE_RETURN_IF_ERROR(AddReference(schema, &parts));
  if (!alone) MOESERVE_RETURN_IF_ERROR(AddLists(schema, &parts));
  // Properties keep the order in which the schema mentions them first.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  Branches out(1);
  for (const auto& [place, branches] : parts) {
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, branches));
  }
  if (alone) return out;
  MOESERVE_ASSIGN_OR_RETURN(out, ApplyConditions(schema, std::move(out)));
  return ApplyDependencies(schema, std::move(out));
}

Result<Branches> SchemaReader::ReadOwn(const json* schema) {
  Branches out;
  Branch own;
  ObjectPart object;
  ArrayPart array;
  for (const auto& [key, value] : schema->items()) {
    MOESERVE_RETURN_IF_ERROR(ReadProperties(schema, key, value, &object, &own));
    MOESERVE_RETURN_IF_ERROR(ReadItems(schema, key, value, &array, &own));
    MOESERVE_RETURN_IF_ERROR(ReadBasics(schema, key, value, &own));
  }
  if (object.properties != nullptr || object.additional != nullptr || object.patterns != nullptr) {
    own.objects.push_back(object);
  }
  if (array.items != nullptr || !array.prefix.empty()) own.arrays.push_back(std::move(array));
  // No fraction is a multiple of an integer.
  if (schema->contains("multipleOf") && own.multiples.empty()) own.types &= ~kFractionType;
  MOESERVE_RETURN_IF_ERROR(CheckBranch(schema, own));
  // Meet() with an unrestricted branch removes listed values of the wrong types.
  if (std::optional<Branch> kept = Meet(own, Branch())) out.push_back(*std::move(kept));
  return out;
}

Status SchemaReader::AddReference(const json* schema, PlacedBranches* out) {
  const auto reference = schema->find("$ref");
  if (reference == schema->end()) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(const json* target, Resolve(schema, *reference));
  MOESERVE_ASSIGN_OR_RETURN(Branches branches, ReadSchema(target));
  out->push_back({order_.PlaceOf(&*reference), std::move(branches)});
  return absl::OkStatus();
}

Status SchemaReader::AddLists(const json* schema, PlacedBranches* out) {
  for (const std::string key : {"allOf", "anyOf", "oneOf"}) {
    const auto it = schema->find(key);
    if (it == schema->end()) continue;
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<Branches> parts, ReadList(schema, key, *it));
    if (key == "allOf") {
      for (const Branches& part : parts) out->push_back({order_.PlaceOf(&*it), part});
      continue;
    }
    Result<Branches> any = key == "oneOf" ? ExactlyOne(schema, parts) : Union(schema, parts);
    if (!any.ok()) return any.status();
    out->push_back({order_.PlaceOf(&*it), *std::move(any)});
  }
  return absl::OkStatus();
}

Result<Branches> SchemaReader::ApplyConditions(const json* schema, Branches out) {
  if (schema->contains("not")) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches child, ReadChild(schema, "not"));
    MOESERVE_ASSIGN_OR_RETURN(const Branches others, Complement(schema, child));
    MOESERVE_ASSIGN_OR_RETURN(out, Product(schema, out, others));
  }
  // Without "if", "then" and "else" have no effect, and the other way round.
  if (!schema->contains("if") || (!schema->contains("then") && !schema->contains("else"))) {
    return out;
  }
  MOESERVE_ASSIGN_OR_RETURN(Branches matching, ReadChild(schema, "if"));
  MOESERVE_ASSIGN_OR_RETURN(Branches others, Complement(schema, matching));
  if (schema->contains("then")) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches then, ReadChild(schema, "then"));
    MOESERVE_ASSIGN_OR_RETURN(matching, Product(schema, matching, then));
  }
  if (schema->contains("else")) {
    MOESERVE_ASSIGN_OR_RETURN(const Branches otherwise, ReadChild(schema, "else"));
    MOESERVE_ASSIGN_OR_RETURN(others, Product(schema, others, otherwise));
  }
  MOESERVE_ASSIGN_OR_RETURN(const Branches both, Union(schema, {matching, others}));
  return Product(schema, out, both);
}

Result<Branches> SchemaReader::ApplyDependencies(const json* schema, Branches out) {
  for (const std::string key : {"dependentRequired", "dependentSchemas", "dependencies"}) {
    const auto it = schema->find(key);
    if (it == schema->end()) continue;
    if (!it->is_object()) return Error(schema, key + " must be an object");
    for (const auto& [name, value] : it->items()) {
      Branches then;
      if (value.is_array() && key != "dependentSchemas") {
        Branch all;
        for (const json& other : value) {
          if (!other.is_string()) return Error(schema, key + " must list names of properties");
          all.required.insert(other.get<std::string>());
        }
        then.push_back(std::move(all));
      } else if (key != "dependentRequired") {
        MOESERVE_RETURN_IF_ERROR(Enter(schema, "/" + key + EscapedStep(name), &value));
        MOESERVE_ASSIGN_OR_RETURN(then, ReadSchema(&value));
      } else {
        return Error(schema, key + " must list names of properties");
      }
      MOESERVE_ASSIGN_OR_RETURN(out, ApplyDependency(schema, name, then, out));
    }
  }
  return out;
}

Result<Branches> SchemaReader::ApplyDependency(const json* schema, const std::string& name,
                                               const Branches& then, const Branches& out) {
  static const json kFalse = false;
  Branch without;
  ObjectPart absent;
  absent.more.push_back({name, &kFalse});
  without.objects.push_back(std::move(absent));
  Branch with;
  with.types = kObjectType;
  with.required.insert(name);
  MOESERVE_ASSIGN_OR_RETURN(const Branches restricted, Product(schema, {with}, then));
  MOESERVE_ASSIGN_OR_RETURN(const Branches either, Union(schema, {{without}, restricted}));
  return Product(schema, out, either);
}

Result<Branches> SchemaReader::ReadChild(const json* schema, const std::string& key) {
  const json* child = &schema->at(key);
  MOESERVE_RETURN_IF_ERROR(Enter(schema, "/" + key, child));
  return ReadSchema(child);
}

const json* SchemaReader::Not(const json* schema) {
  if (const auto it = negations_.find(schema); it != negations_.end()) return it->second;
  // A schema that is negated twice is the schema itself.
  if (const auto it = negated_.find(schema); it != negated_.end()) return it->second;
  made_.emplace_back(json::object());
  const json* out = &made_.back();
  negations_[schema] = out;
  negated_[out] = schema;
  if (const auto it = paths_.find(schema); it != paths_.end()) paths_[out] = it->second;
  return out;
}

Result<std::set<std::string>> SchemaReader::Matching(const std::set<std::string>& patterns,
                                                     const std::string& name) {
  std::set<std::string> out;
  for (const std::string& pattern : patterns) {
    auto it = name_patterns_.find(pattern);
    if (it == name_patterns_.end()) {
      Result<ByteDfa> dfa = PatternDfa(pattern, MatchMode::kSearch, Encoding::kUtf8, budget_);
      if (!dfa.ok()) return dfa.status();
      it = name_patterns_.emplace(pattern, *std::move(dfa)).first;
    }
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(static_cast<int64_t>(name.size())));
    if (it->second.Matches(name)) out.insert(pattern);
  }
  return out;
}

Result<Conjunction> SchemaReader::PropertyNamed(const Branch& branch, const std::string& name) {
  MOESERVE_ASSIGN_OR_RETURN(const std::set<std::string> matched,
                            Matching(branch.NamePatterns(), name));
  return branch.PropertyNamed(name, matched);
}

Result<Branches> SchemaReader::Union(const json* schema, const std::vector<Branches>& parts) {
  Branches any;
  for (const Branches& part : parts) {
    any.insert(any.end(), part.begin(), part.end());
    if (any.size() > kMaxBranches) return Error(schema, "too many alternatives");
  }
  return any;
}

Result<Branches> SchemaReader::ExactlyOne(const json* schema, const std::vector<Branches>& parts) {
  // others[i]: the parts that may match a value that part i matches.
  std::vector<std::vector<size_t>> others(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      bool disjoint = true;
      for (const Branch& branch : parts[i]) {
        for (const Branch& other : parts[j]) {
          if (!disjoint) break;
          MOESERVE_ASSIGN_OR_RETURN(disjoint, Disjoint(branch, other, 0));
        }
      }
      if (disjoint) continue;
      others[i].push_back(j);
      others[j].push_back(i);
    }
  }
  std::vector<Branches> exact;
  for (size_t i = 0; i < parts.size(); ++i) {
    exact.push_back(parts[i]);
    for (const size_t j : others[i]) {
      Result<Branches> not_other = Complement(schema, parts[j]);
      if (!not_other.ok()) {
        return Error(schema, Concat("oneOf: values may match both alternative ", std::min(i, j),
                                    " and ", std::max(i, j),
                                    ", and this cannot be ruled out; tell them apart by type or by "
                                    "a required constant, or use anyOf (",
                                    std::string(not_other.status().message()).substr(0, 120), ")"));
      }
      MOESERVE_ASSIGN_OR_RETURN(exact.back(), Product(schema, exact.back(), *not_other));
    }
  }
  return Union(schema, exact);
}

Result<const json*> SchemaReader::Resolve(const json* schema, const json& reference) {
  if (!reference.is_string()) return Error(schema, "$ref must be a string");
  const Result<SchemaReferences::Target> target =
      references_.Resolve(schema, reference.get_ref<const std::string&>());
  if (!target.ok()) return Error(schema, std::string(target.status().message()));
  // A definition is two steps below the root (#/$defs/name), which count as one level.
  paths_.try_emplace(target->schema, Place{target->path, (target->steps + 1) / 2});
  return target->schema;
}

Result<bool> SchemaReader::Disjoint(const Branch& a, const Branch& b, int depth) {
  MOESERVE_RETURN_IF_ERROR(budget_->Tick(64));
  const std::optional<Branch> both = Meet(a, b);
  if (!both) return true;
  const uint32_t types = both->types;
  // Meet() has removed listed values that the other branch's list or types exclude.
  if (both->values && both->values->empty()) return true;
  if (types & (kNullType | kBooleanType | kArrayType)) return false;
  if (types & kNumberTypes) {
    const auto& min = both->number.min;
    const auto& max = both->number.max;
    const bool none = min && max &&
                      (min->value > max->value ||
                       (min->value == max->value && (min->exclusive || max->exclusive)));
    if (!none) return false;
  }
  if (types & kStringType) return false;
  if ((types & kObjectType) && depth < 3) return ObjectsDisjoint(a, b, *both, depth);
  return (types & kObjectType) == 0;
}

Result<bool> SchemaReader::ObjectsDisjoint(const Branch& a, const Branch& b, const Branch& both,
                                           int depth) {
  const auto read = [&](const Branch& branch, const std::string& name) -> Result<Branches> {
    MOESERVE_ASSIGN_OR_RETURN(const Conjunction schemas, PropertyNamed(branch, name));
    return Read(schemas);
  };
  // Looks for a property that both branches require with values that cannot be equal.
  for (const std::string& name : both.required) {
    if (!a.required.contains(name) || !b.required.contains(name)) continue;
    // A property that refers back to this choice cannot be read at this point and is skipped.
    const Result<Branches> x = read(a, name);
    const Result<Branches> y = read(b, name);
    if (!x.ok() || !y.ok()) continue;
    bool differ = true;
    for (const Branch& one : *x) {
      for (const Branch& other : *y) {
        if (!differ) break;
        MOESERVE_ASSIGN_OR_RETURN(differ, Disjoint(one, other, depth + 1));
      }
    }
    if (differ) return true;
  }
  // Looks for a property that one branch requires and the other one forbids.
  const auto excludes = [&](const Branch& one, const Branch& other) {
    return std::any_of(one.required.begin(), one.required.end(), [&](const std::string& name) {
      const Result<Branches> values = read(other, name);
      return values.ok() && values->empty();
    });
  };
  return excludes(a, b) || excludes(b, a);
}

}  // namespace moeserve::structured
