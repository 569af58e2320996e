// Structured output: which tokens may come next so that the text of a sequence matches a JSON
// schema, a regular expression or one of a list of choices.
//
// JSON has the white space of common writers: after an opening bracket and after a comma, nothing,
// one space, or a line end and up to 64 spaces and tabs; after a colon, nothing or one space;
// before the closing bracket of a container that is not empty, nothing, or a line end and up to 64
// spaces and tabs. There is none anywhere else, nor around the answer. Encoding::kJsonString
// defines the spelling of strings, NumberDfa() that of numbers. Keys are in any order, each once.
//
// Scalars are byte automata, objects and arrays are frames on a stack. A state is a small set of
// such stacks. A mask is computed by walking the vocabulary's byte trie with the state.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/text/structured/vocabulary_index.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// State of one sequence's constraint. One thread at a time.
class ConstraintState {
 public:
  virtual ~ConstraintState() = default;

  // Sets bit t of `mask` [ceil(vocab_size / 32) words] if token t may come next, and clears all
  // other bits. The end-of-sequence tokens are set if and only if the text so far is complete.
  //
  // `tokens_left`: tokens that may still be generated, this one included. A token is allowed only
  // if the text can be completed within this limit, counting one token for each further byte, and
  // one for the end of the sequence if the complete text could also continue. If no token meets the
  // limit, the limit is ignored. The mask is never empty.
  virtual void AllowedTokens(std::span<uint32_t> mask, int64_t tokens_left) = 0;

  // Advances by the drawn token. False, with the state unchanged, if the constraint does not allow
  // it; the limit on tokens is not checked.
  virtual bool Accept(TokenId token) = 0;

  // Whether the text so far is a full match.
  virtual bool complete() const = 0;
  // Whether any byte may follow the text so far.
  virtual bool can_continue() const = 0;

  // Original and clone share no mutable data, so different threads may use them.
  virtual std::unique_ptr<ConstraintState> Clone() const = 0;
};

// Immutable: any number of threads may use one object.
class CompiledConstraint {
 public:
  virtual ~CompiledConstraint() = default;
  // The state may outlive this object.
  virtual std::unique_ptr<ConstraintState> NewState() const = 0;
  // Approximate bytes of memory, including masks that may be cached later.
  virtual size_t memory_bytes() const = 0;
};

struct ConstraintSpec {
  enum class Kind { kJsonObject, kJsonSchema, kRegex, kChoice };
  Kind kind = Kind::kJsonObject;
  // The JSON schema, or the pattern, which must match the whole text.
  std::string text;
  std::vector<std::string> choices;
  // Whether unknown keywords are errors instead of annotations.
  bool strict = false;
};

struct ConstraintLimits {
  int schema_nesting = 32;         // schemas inside schemas
  size_t schema_bytes = 64 << 10;  // also all choices together
  int enum_entries = 1000;         // of one enum, also the number of choices
  size_t pattern_bytes = 1 << 10;  // of one pattern
  int states = 100000;             // of all automata together
  std::chrono::milliseconds compile_time{2000};
  int64_t shortest_answer = 1 << 20;  // bytes of the shortest text that matches
};

// InvalidArgument, with a JSON pointer into the schema or a position in the pattern: a fault, an
// unsupported feature, a constraint that no text matches, that exceeds a limit, or that the
// vocabulary cannot spell. A keyword that restricts values and is not supported is always an error,
// so the answer never violates the constraint.
Result<std::shared_ptr<const CompiledConstraint>> CompileConstraint(
    const ConstraintSpec& spec, std::shared_ptr<const VocabularyIndex> vocabulary,
    const ConstraintLimits& limits = {});

}  // namespace moeserve
