// Structured output: which tokens may come next so that the text of a sequence matches a JSON
// schema, a regular expression or one of a list of choices.
//
// JSON is written with the white space of common writers. Inside an object or array there may be,
// after the opening bracket and after a comma, nothing, one space, or a line end and up to 64
// spaces and tabs; after a colon nothing or one space; before the closing bracket of one that is
// not empty nothing, or a line end and up to 64 spaces and tabs (an empty one: as after the opening
// bracket). There is none anywhere else, around the answer included. Strings are spelt as
// Encoding::kJsonString says, numbers as NumberDfa does. Keys come in any order, each once.
//
// Scalars are byte automata; objects and arrays are frames on a stack. A state is a small set of
// such stacks, and a mask is a walk of the vocabulary's byte trie with the state.
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

  // Sets bit t of `mask` [ceil(vocab_size / 32) words] where token t may come next and clears all
  // others. The end-of-sequence tokens are set exactly where the text so far is complete.
  //
  // `tokens_left` is the number of tokens that may still be generated, this one included. Only
  // tokens are set after which the text can be completed within that limit, spelt byte by byte,
  // with one token for the end of the sequence where the complete text could also go on. If no
  // token keeps the limit, the limit is ignored. The mask is never empty.
  virtual void AllowedTokens(std::span<uint32_t> mask, int64_t tokens_left) = 0;

  // Takes the token that was drawn. False, and nothing changed, if it was not allowed (by the
  // constraint; the limit on tokens is not looked at).
  virtual bool Accept(TokenId token) = 0;

  // The text so far is a full match.
  virtual bool complete() const = 0;
  // Some byte may follow the text so far.
  virtual bool can_continue() const = 0;

  // Shares nothing that changes: original and clone may be used by different threads.
  virtual std::unique_ptr<ConstraintState> Clone() const = 0;
};

// Immutable: any number of threads may use one object.
class CompiledConstraint {
 public:
  virtual ~CompiledConstraint() = default;
  // The state keeps what it needs alive; it may outlive this object.
  virtual std::unique_ptr<ConstraintState> NewState() const = 0;
  // Bytes of memory, the masks that it may come to keep included; about.
  virtual size_t memory_bytes() const = 0;
};

struct ConstraintSpec {
  enum class Kind { kJsonObject, kJsonSchema, kRegex, kChoice };
  Kind kind = Kind::kJsonObject;
  // The JSON schema, or the pattern, which has to match the whole text.
  std::string text;
  std::vector<std::string> choices;
  // Keywords that JSON Schema does not know are errors instead of annotations.
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

// InvalidArgument: what is wrong or unsupported and where, as a JSON pointer into the schema or a
// position in the pattern; also a constraint that nothing can match, that exceeds a limit, or that
// the vocabulary cannot spell. A keyword that restricts values and is not supported is always an
// error: a constraint is never loosened.
Result<std::shared_ptr<const CompiledConstraint>> CompileConstraint(
    const ConstraintSpec& spec, std::shared_ptr<const VocabularyIndex> vocabulary,
    const ConstraintLimits& limits = {});

}  // namespace moeserve
