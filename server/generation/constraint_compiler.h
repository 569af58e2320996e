// Compiles the constraints of structured output and caches them by their content.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/status.h"
#include "engine/text/structured/constraint.h"

namespace moeserve::server {

struct ConstraintField {
  ConstraintSpec spec;
  std::string param;  // name of the request field, for error messages
};

// Thread-safe. Compile takes up to the time of ConstraintLimits: do not call it on io threads.
class ConstraintCompiler {
 public:
  // `vocabulary` may be an error, which Compile then returns: the model cannot have structured
  // output. Keeps the most recently used constraints, up to `max_cached_bytes` together.
  ConstraintCompiler(Result<std::shared_ptr<const VocabularyIndex>> vocabulary,
                     ConstraintLimits limits, size_t max_cached_bytes = size_t{256} << 20);

  // Compiles `field`. Fails with InvalidArgument, code "invalid_schema", as CompileConstraint().
  Result<std::shared_ptr<const CompiledConstraint>> Compile(const ConstraintField& field);

  // Returns the constraint if it is cached, else null. Never compiles.
  std::shared_ptr<const CompiledConstraint> Find(const ConstraintField& field);

  size_t cached() const;

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const CompiledConstraint> compiled;
  };
  using Entries = std::list<Entry>;

  std::shared_ptr<const CompiledConstraint> FindKey(const std::string& key);
  void Insert(std::string key, std::shared_ptr<const CompiledConstraint> compiled);

  const Result<std::shared_ptr<const VocabularyIndex>> vocabulary_;
  const ConstraintLimits limits_;
  const size_t max_cached_bytes_;
  mutable std::mutex mutex_;
  Entries entries_;  // most recently used first
  std::unordered_map<std::string, Entries::iterator> by_key_;
  size_t bytes_ = 0;
};

}  // namespace moeserve::server
