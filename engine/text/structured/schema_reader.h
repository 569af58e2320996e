// Converts JSON schemas into alternative branches of plain conditions.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/constraint.h"
#include "engine/text/structured/schema_branch.h"

namespace moeserve::structured {

// Reads the schemas in one document. Errors are InvalidArgument with a JSON pointer.
class SchemaReader {
 public:
  // `root` must outlive the reader.
  SchemaReader(const nlohmann::json& root, bool strict, const ConstraintLimits& limits,
               CompileBudget* budget)
      : root_(root), strict_(strict), limits_(limits), budget_(budget) {
    paths_[&root] = {"", 0};
  }

  // Returns branches such that a value matches all of `schemas` if and only if it matches one of
  // the branches.
  Result<Branches> Read(const Conjunction& schemas);

  // Returns the JSON pointer of a schema in the document, for error messages.
  std::string PathOf(const nlohmann::json* schema) const;
  Status Error(const nlohmann::json* schema, const std::string& what) const;

 private:
  struct Place {
    std::string path;
    int depth;
  };

  Result<Branches> ReadSchema(const nlohmann::json* schema);
  Result<Branches> ReadKeywords(const nlohmann::json* schema);
  // Each of the following functions reads one keyword, or a few that belong together.
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
  // Records the path of a schema inside another schema, and checks the nesting and that `child` has
  // the type of a schema.
  Status Enter(const nlohmann::json* parent, const std::string& step, const nlohmann::json* child);
  Result<Branches> Product(const nlohmann::json* schema, const Branches& a, const Branches& b);
  // Returns the branches of all parts together. With `disjoint`, returns an error unless it is
  // certain that no value matches two parts.
  Result<Branches> Union(const nlohmann::json* schema, const std::vector<Branches>& parts,
                         bool disjoint);
  // Returns true if certainly no value matches both branches; false in case of doubt.
  Result<bool> Disjoint(const Branch& a, const Branch& b, int depth);

  const nlohmann::json& root_;
  const bool strict_;
  const ConstraintLimits& limits_;
  CompileBudget* budget_;
  std::map<const nlohmann::json*, Place> paths_;
  std::set<const nlohmann::json*> in_progress_;
};

}  // namespace moeserve::structured
