// Converts the alternatives of schemas to a grammar.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/structured/grammar.h"
#include "engine/text/structured/schemas/schema_compiler.h"
#include "engine/text/structured/schemas/schema_reader.h"

namespace moeserve::structured {

// Compiles the schemas of one document.
class SchemaCompiler {
  using json = nlohmann::json;

 public:
  // `root`, its `order`, `limits`, `spellable` and `budget` must outlive this object.
  SchemaCompiler(const json& root, const DocumentOrder& order, const SchemaOptions& options,
                 const ConstraintLimits& limits, DfaPtr any_string, const ByteSet& spellable,
                 CompileBudget* budget)
      : root_(root),
        order_(order),
        closed_objects_(options.closed_objects),
        limits_(limits),
        spellable_(spellable),
        budget_(budget),
        reader_(root, order, options.strict, limits, budget) {
    grammar_.dfas.push_back(std::move(any_string));
    grammar_.any_string = 0;
  }

  // Returns the grammar after Grammar::Finish(). May be called once.
  Result<Grammar> Run();

 private:
  template <typename T>
  Result<NodeId> AddNode(T value) {
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1));
    grammar_.nodes.push_back({std::move(value)});
    return static_cast<NodeId>(grammar_.nodes.size() - 1);
  }

  const ByteDfa& AnyString() const { return *grammar_.dfas[grammar_.any_string]; }

  // Whether a text may be complete as one scalar and go on as another one, as 1 and 12.5 may. (A
  // string ends with its quote.)
  bool RootsOverlap() const;
  // Returns the choice node for the branches of `schemas`. Its options are filled in later, because
  // schemas may refer to each other in cycles.
  Result<NodeId> NodeOf(const Conjunction& schemas);
  Status FillChoice(NodeId node, const Conjunction& schemas);
  Status AddOptions(const json* place, const Branch& branch, std::vector<NodeId>* options);
  Result<NodeId> Scalar(int32_t dfa);
  Result<int32_t> AddDfa(const std::string& key, ByteDfa dfa);
  // Returns a node that matches any of `texts`, literally, or of `strings`, spelt as JSON strings.
  Result<NodeId> Literals(const std::vector<std::string>& texts,
                          const std::vector<std::string>& strings);
  Result<NodeId> Number(const Branch& branch);
  // Returns the index of an automaton for the strings that `branch` allows.
  Result<int32_t> Strings(const json* place, const Branch& branch);
  Result<NodeId> String(const json* place, const Branch& branch);
  // Adds options for the listed values that the branch's other conditions allow.
  Status AddValues(const json* place, const Branch& branch, std::vector<NodeId>* options);
  // Adds the spellings of a listed number: plain, and with an exponent where common writers use
  // one. An integer is spelt with a fraction only if the schema spells it so.
  static void AddSpellings(const json& value, std::vector<std::string>* texts);
  // Returns a node that matches exactly `value`.
  Result<NodeId> Constant(const json& value);
  // Returns an error that names the part of the schema that no text matches; finds it by following
  // mandatory parts down from the root.
  Status Unsatisfiable(const Grammar& unpruned) const;

  // The following functions are defined in schema_containers.cc.
  Status AddArrays(const json* place, const Branch& branch, std::vector<NodeId>* options);
  static bool Forbidden(const Conjunction& schemas);
  static size_t PrefixLength(const Branch& branch);
  Result<NodeId> Array(const Branch& branch);
  // Arrays without a prefix, of which some items must match a schema.
  Result<NodeId> Containing(const Branch& branch, const ContainsPart& part);
  // Adds arrays of different items, which must be strings or few.
  Status AddDistinct(const json* place, const Branch& branch, std::vector<NodeId>* options);
  // Returns a node for arrays of different strings, which match `items`.
  Result<NodeId> StringSet(const json* place, const Branch& branch, const Branches& items);
  Result<NodeId> Object(const json* place, const Branch& branch);
  // Returns an automaton for the quoted names that match all of `schemas`.
  Result<ByteDfa> NamesOf(const json* place, const Conjunction& schemas);
  static std::set<std::string> LabelOf(uint32_t bits, const std::set<std::string>& patterns);
  // Removes the keys whose schema is false.
  Status ExcludeForbidden(const Branch& branch, const std::set<std::string>& patterns,
                          LabeledDfa* keys);
  Result<int32_t> AddKeys(const Branch& branch, const std::set<std::string>& patterns,
                          LabeledDfa keys);
  static ObjectNode Sorted(ObjectNode node);
  // Whether SchemaOptions::closed_objects forbids other properties than the named ones.
  bool IsClosed(const Branch& branch, size_t named) const;
  // Returns the places of the named properties of an object: the order in which the schema mentions
  // them first. Names that no part has are left out.
  Result<std::map<std::string, int32_t>> PlacesOf(const Branch& branch);

  const json& root_;
  const DocumentOrder& order_;
  const bool closed_objects_;
  const ConstraintLimits& limits_;
  const ByteSet& spellable_;
  CompileBudget* budget_;
  SchemaReader reader_;
  Grammar grammar_;
  std::map<Conjunction, NodeId> nodes_;
  std::vector<std::pair<NodeId, Conjunction>> queue_;
  std::map<NodeId, const json*> schema_of_;
  std::map<std::string, int32_t> dfas_;
  // The members of the objects of `properties`, in order.
  std::map<const json*, std::vector<std::pair<std::string, const json*>>> members_;
};

}  // namespace moeserve::structured
