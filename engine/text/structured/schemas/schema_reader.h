// Converts JSON schemas into alternative branches of plain conditions.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/constraint.h"
#include "engine/text/structured/schemas/schema_branch.h"
#include "engine/text/structured/schemas/schema_document.h"
#include "engine/text/structured/schemas/schema_references.h"

namespace moeserve::structured {

// Largest number of branches of one schema.
inline constexpr size_t kMaxBranches = 512;

// Reads the schemas in one document. Errors are InvalidArgument with a JSON pointer.
class SchemaReader {
 public:
  // `root` and `order`, which is that of `root`, must outlive the reader.
  SchemaReader(const nlohmann::json& root, const DocumentOrder& order, bool strict,
               const ConstraintLimits& limits, CompileBudget* budget)
      : root_(root),
        order_(order),
        strict_(strict),
        limits_(limits),
        budget_(budget),
        references_(root) {
    paths_[&root] = {"", 0};
  }

  // Returns branches such that a value matches all of `schemas` if and only if it matches one of
  // the branches.
  Result<Branches> Read(const Conjunction& schemas);

  // Returns a schema, owned by the reader, that matches exactly the values that `schema` does not
  // match.
  const nlohmann::json* Not(const nlohmann::json* schema);

  // Returns which of the patterns match somewhere in `name`.
  Result<std::set<std::string>> Matching(const std::set<std::string>& patterns,
                                         const std::string& name);

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
  // Returns the branches that the keywords of `schema` describe which are not about other schemas
  // for the same value.
  Result<Branches> ReadOwn(const nlohmann::json* schema);
  // Appends the branches of $ref, allOf, anyOf and oneOf, each with its place in the document.
  using PlacedBranches = std::vector<std::pair<int32_t, Branches>>;
  Status AddReference(const nlohmann::json* schema, PlacedBranches* out);
  Status AddLists(const nlohmann::json* schema, PlacedBranches* out);
  // The following functions return `out` restricted by further keywords of `schema`.
  Result<Branches> ApplyConditions(const nlohmann::json* schema, Branches out);
  Result<Branches> ApplyDependencies(const nlohmann::json* schema, Branches out);
  // Restricts `out`: a value with property `name` must match one of `then`.
  Result<Branches> ApplyDependency(const nlohmann::json* schema, const std::string& name,
                                   const Branches& then, const Branches& out);

  // Each of the following functions reads one keyword, or a few that belong together. They are
  // defined in schema_keywords.cc.
  Status ReadProperties(const nlohmann::json* schema, const std::string& key,
                        const nlohmann::json& value, ObjectPart* object, Branch* own);
  Status ReadItems(const nlohmann::json* schema, const std::string& key,
                   const nlohmann::json& value, ArrayPart* array, Branch* own);
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
  Result<std::vector<Branches>> ReadList(const nlohmann::json* schema, const std::string& key,
                                         const nlohmann::json& value);
  // Reads the schema that is the value of `key`, without the other keywords of `schema`.
  Result<Branches> ReadChild(const nlohmann::json* schema, const std::string& key);
  Result<Branches> Product(const nlohmann::json* schema, const Branches& a, const Branches& b);
  Result<Branches> Union(const nlohmann::json* schema, const std::vector<Branches>& parts);
  // Returns branches for the values that match exactly one of `parts`.
  Result<Branches> ExactlyOne(const nlohmann::json* schema, const std::vector<Branches>& parts);
  // Returns true if certainly no value matches both branches; false in case of doubt.
  Result<bool> Disjoint(const Branch& a, const Branch& b, int depth);
  Result<bool> ObjectsDisjoint(const Branch& a, const Branch& b, const Branch& both, int depth);
  Result<Conjunction> PropertyNamed(const Branch& branch, const std::string& name);

  // Defined in schema_complement.cc. Return branches for the values that match none of `branches`,
  // or that do not match `branch`; an error, which names the keyword, if that cannot be described.
  Result<Branches> Complement(const nlohmann::json* schema, const Branches& branches);
  Result<Branches> ComplementOf(const nlohmann::json* schema, const Branch& branch);
  void ComplementScalars(const Branch& branch, Branches* out);
  Status ComplementArrays(const nlohmann::json* schema, const Branch& branch, Branches* out);
  Status ComplementObjects(const nlohmann::json* schema, const Branch& branch, Branches* out);

  const nlohmann::json& root_;
  const DocumentOrder& order_;
  const bool strict_;
  const ConstraintLimits& limits_;
  CompileBudget* budget_;
  SchemaReferences references_;
  std::map<const nlohmann::json*, Place> paths_;
  std::set<const nlohmann::json*> in_progress_;
  std::deque<nlohmann::json> made_;  // schemas that are not in the document
  std::map<const nlohmann::json*, const nlohmann::json*> negations_;  // what Not() returned
  std::map<const nlohmann::json*, const nlohmann::json*> negated_;    // the reverse
  std::map<std::string, ByteDfa> name_patterns_;
};

// Escapes and shortens a step of a JSON pointer for error messages; "/" comes before it.
std::string EscapedStep(std::string_view step);

}  // namespace moeserve::structured
