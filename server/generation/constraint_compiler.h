// Compiles the constraints of structured output and caches the compiled constraints.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/text/structured/constraint.h"

namespace moeserve::server {

struct ConstraintField {
  ConstraintSpec spec;
  std::string param;  // name of the request field, for error messages
  // Whether a schema inside a format (TextFormat::Kind::kJsonSchema) that is not strict and cannot
  // be compiled stands for any JSON object.
  bool relaxes_schemas = false;
};

// Thread-safe. Compile() can take as long as ConstraintLimits::compile_time and must not be called
// on I/O threads.
class ConstraintCompiler {
 public:
  // If `vocabulary` is an error, the model does not support structured output, and every Compile()
  // fails with the message of that error. Keeps the most recently used constraints, up to
  // `max_cached_bytes` in total.
  ConstraintCompiler(Result<std::shared_ptr<const VocabularyIndex>> vocabulary,
                     ConstraintLimits limits, size_t max_cached_bytes);

  // Compiles `field`, or returns the cached constraint. If the constraint cannot be compiled,
  // returns InvalidArgument with API error code "invalid_schema".
  Result<std::shared_ptr<const CompiledConstraint>> Compile(const ConstraintField& field);

  // Returns the constraint if it is cached, else null. Does not compile.
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
  mutable Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);  // most recently used first
  std::unordered_map<std::string, Entries::iterator> by_key_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace moeserve::server
