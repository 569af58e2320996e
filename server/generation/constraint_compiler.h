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
  std::string param;  // the request field that it came from, for messages
};

// Thread-safe. Compile can take as long as ConstraintLimits allows: not for io threads.
class ConstraintCompiler {
 public:
  // `vocabulary` may be an error: the model cannot have structured output, and Compile says why.
  // Compiled constraints of up to `max_cached_bytes` in all are kept, the last used ones.
  ConstraintCompiler(Result<std::shared_ptr<const VocabularyIndex>> vocabulary,
                     ConstraintLimits limits, size_t max_cached_bytes = size_t{256} << 20);

  // InvalidArgument, code "invalid_schema": see CompileConstraint.
  Result<std::shared_ptr<const CompiledConstraint>> Compile(const ConstraintField& field);

  // The same constraint where it was compiled before, else null; quick.
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
  Entries entries_;  // the last used first
  std::unordered_map<std::string, Entries::iterator> by_key_;
  size_t bytes_ = 0;
};

}  // namespace moeserve::server
