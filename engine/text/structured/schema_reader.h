// Reads JSON Schema documents into alternatives of plain conditions.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/number_dfa.h"
#include "engine/text/structured/constraint.h"

namespace moeserve::structured {

// Schemas that all hold. Sorted, each once. An empty one allows every value.
using Conjunction = std::vector<const nlohmann::json*>;

enum TypeBits : uint32_t {
  kNullType = 1,
  kBooleanType = 2,
  kIntegerType = 4,   // numbers with an integer value
  kFractionType = 8,  // all other numbers
  kStringType = 16,
  kArrayType = 32,
  kObjectType = 64,
  kNumberTypes = kIntegerType | kFractionType,
  kAllTypes = 127,
};

struct ArrayPart {
  std::vector<const nlohmann::json*> prefix;
  const nlohmann::json* items = nullptr;  // after the prefix; null: any
};

struct ObjectPart {
  const nlohmann::json* properties = nullptr;  // name to schema; null: none
  const nlohmann::json* additional = nullptr;  // of all other names; null: any
};

// Conditions that all hold. Conditions on a type that is not in `types` have no effect.
struct Branch {
  uint32_t types = kAllTypes;
  std::optional<std::vector<const nlohmann::json*>> values;  // one of these
  NumberRange number;                                        // `types` decides about `integer`
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  std::set<std::string> patterns;  // each found anywhere in the string
  std::set<std::string> formats;
  int64_t min_items = 0;
  int64_t max_items = kNoLimit;
  bool unique_items = false;
  std::vector<ArrayPart> arrays;
  int64_t min_properties = 0;
  int64_t max_properties = kNoLimit;
  std::set<std::string> required;
  std::vector<ObjectPart> objects;

  Conjunction ItemAt(size_t i) const;
  Conjunction PropertyNamed(const std::string& name) const;
  Conjunction Additional() const;
};

using Branches = std::vector<Branch>;

// The values that both allow; nullopt if their types have nothing in common.
std::optional<Branch> Meet(const Branch& a, const Branch& b);

// Reads schemas of one document. Errors are InvalidArgument with a JSON pointer.
class SchemaReader {
 public:
  // `root` must outlive the reader.
  SchemaReader(const nlohmann::json& root, bool strict, const ConstraintLimits& limits,
               CompileBudget* budget)
      : root_(root), strict_(strict), limits_(limits), budget_(budget) {
    paths_[&root] = {"", 0};
  }

  // A value matches all schemas of `schemas` if and only if it matches one of the branches.
  Result<Branches> Read(const Conjunction& schemas);

  // Where the schema is in the document, for messages.
  std::string PathOf(const nlohmann::json* schema) const;
  Status Error(const nlohmann::json* schema, const std::string& what) const;

 private:
  struct Place {
    std::string path;
    int depth;
  };

  Result<Branches> ReadSchema(const nlohmann::json* schema);
  Result<Branches> ReadKeywords(const nlohmann::json* schema);
  // One keyword each, or a few that belong together.
  Status ReadProperties(const nlohmann::json* schema, const std::string& key,
                        const nlohmann::json& value, ObjectPart* object);
  Status ReadItems(const nlohmann::json* schema, const std::string& key,
                   const nlohmann::json& value, ArrayPart* array);
  Result<std::vector<Branches>> ReadList(const nlohmann::json* schema, const std::string& key,
                                         const nlohmann::json& value);
  Status ReadBasics(const nlohmann::json* schema, const std::string& key,
                    const nlohmann::json& value, Branch* branch);
  Status ReadValues(const nlohmann::json* schema, const std::string& key,
                    const nlohmann::json& value, Branch* branch);
  Status ReadMultiple(const nlohmann::json* schema, const nlohmann::json& value, Branch* branch);
  Status ReadText(const nlohmann::json* schema, const std::string& key, const nlohmann::json& value,
                  Branch* branch);
  Status ReadTypes(const nlohmann::json* schema, const nlohmann::json& value, Branch* branch);
  Status ReadBound(const nlohmann::json* schema, const std::string& key,
                   const nlohmann::json& value, Branch* branch);
  Result<int64_t> ReadCount(const nlohmann::json* schema, const std::string& key,
                            const nlohmann::json& value) const;
  Status CheckBranch(const nlohmann::json* schema, const Branch& branch) const;
  Result<const nlohmann::json*> Resolve(const nlohmann::json* schema,
                                        const nlohmann::json& reference);
  // Records the path of a schema inside another one; checks the nesting and the schema's type.
  Status Enter(const nlohmann::json* parent, const std::string& step, const nlohmann::json* child);
  Result<Branches> Product(const nlohmann::json* schema, const Branches& a, const Branches& b);
  // The branches of all parts. `disjoint`: an error unless no value matches two parts.
  Result<Branches> Union(const nlohmann::json* schema, const std::vector<Branches>& parts,
                         bool disjoint);
  // Whether no value matches both; false where that is not certain.
  Result<bool> Disjoint(const Branch& a, const Branch& b, int depth);

  const nlohmann::json& root_;
  const bool strict_;
  const ConstraintLimits& limits_;
  CompileBudget* budget_;
  std::map<const nlohmann::json*, Place> paths_;
  std::set<const nlohmann::json*> in_progress_;
};

// The exact value of a JSON number, by its shortest decimal spelling.
Decimal DecimalOf(const nlohmann::json& number);
// The type bit of a value.
uint32_t TypeOf(const nlohmann::json& value);
int64_t CountCharacters(const std::string& text);

}  // namespace moeserve::structured
