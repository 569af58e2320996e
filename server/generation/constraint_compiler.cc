#include "server/generation/constraint_compiler.h"

#include <algorithm>
#include <chrono>

#include "base/error_text.h"
#include "engine/text/structured/compile_constraint.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

using Clock = std::chrono::steady_clock;

// Replaces schemas that are not strict and cannot be compiled by themselves.
class SchemaRelaxer {
 public:
  SchemaRelaxer(std::shared_ptr<const VocabularyIndex> vocabulary, ConstraintLimits limits)
      : vocabulary_(std::move(vocabulary)),
        limits_(limits),
        deadline_(Clock::now() + limits.compile_time) {}

  TextFormat Relaxed(TextFormat format) {
    if (format.kind == TextFormat::Kind::kJsonSchema && !format.strict && !Compiles(format)) {
      format.kind = TextFormat::Kind::kJsonObject;
      format.text.clear();
      changed_ = true;
    }
    for (TextFormat& part : format.parts) part = Relaxed(std::move(part));
    if (format.tags != nullptr) {
      auto tags = std::make_shared<StructuralTags>(*format.tags);
      for (StructuralTag& tag : tags->tags) tag.content = Relaxed(std::move(tag.content));
      format.tags = std::move(tags);
    }
    return format;
  }

  bool changed() const { return changed_; }

 private:
  // All schemas together may take the time of one compilation.
  bool Compiles(const TextFormat& schema) {
    limits_.compile_time =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    if (limits_.compile_time.count() <= 0) return false;
    ConstraintSpec spec;
    spec.kind = ConstraintSpec::Kind::kJsonSchema;
    spec.text = schema.text;
    spec.closed_objects = schema.closed_objects;
    return CompileConstraint(spec, vocabulary_, limits_).ok();
  }

  const std::shared_ptr<const VocabularyIndex> vocabulary_;
  ConstraintLimits limits_;
  const Clock::time_point deadline_;
  bool changed_ = false;
};

}  // namespace

ConstraintCompiler::ConstraintCompiler(Result<std::shared_ptr<const VocabularyIndex>> vocabulary,
                                       ConstraintLimits limits, size_t max_cached_bytes)
    : vocabulary_(std::move(vocabulary)), limits_(limits), max_cached_bytes_(max_cached_bytes) {}

Result<std::shared_ptr<const CompiledConstraint>> ConstraintCompiler::Compile(
    const ConstraintField& field) {
  const auto refuse = [&](const absl::Status& status) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_schema",
                     Concat("'", field.param, "': ", Printable(std::string(status.message()), 400)),
                     field.param);
  };
  if (!vocabulary_.ok()) {
    return refuse(absl::InvalidArgumentError(Concat("this model cannot constrain its text: ",
                                                    std::string(vocabulary_.status().message()))));
  }
  std::string key = CanonicalText(field.spec);
  if (auto found = FindKey(key)) return found;
  auto compiled = CompileConstraint(field.spec, *vocabulary_, limits_);
  if (!compiled.ok() && field.relaxes_schemas && field.spec.format != nullptr) {
    SchemaRelaxer relaxer(*vocabulary_, limits_);
    ConstraintSpec relaxed = field.spec;
    relaxed.format = std::make_shared<const TextFormat>(relaxer.Relaxed(*field.spec.format));
    if (relaxer.changed()) compiled = CompileConstraint(relaxed, *vocabulary_, limits_);
  }
  if (!compiled.ok()) return refuse(compiled.status());
  Insert(std::move(key), *compiled);
  return compiled;
}

std::shared_ptr<const CompiledConstraint> ConstraintCompiler::Find(const ConstraintField& field) {
  return FindKey(CanonicalText(field.spec));
}

std::shared_ptr<const CompiledConstraint> ConstraintCompiler::FindKey(const std::string& key) {
  MutexLock lock(mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->compiled;
}

void ConstraintCompiler::Insert(std::string key,
                                std::shared_ptr<const CompiledConstraint> compiled) {
  const auto size_of = [](const Entry& entry) {
    return 2 * entry.key.size() + entry.compiled->memory_bytes();
  };
  MutexLock lock(mutex_);
  if (by_key_.contains(key)) return;  // another thread has compiled the same constraint meanwhile
  entries_.push_front({key, std::move(compiled)});
  by_key_.emplace(std::move(key), entries_.begin());
  bytes_ += size_of(entries_.front());
  while (bytes_ > max_cached_bytes_) {
    bytes_ -= size_of(entries_.back());
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
}

size_t ConstraintCompiler::cached() const {
  MutexLock lock(mutex_);
  return entries_.size();
}

}  // namespace moeserve::server
