// Structured output: which tokens may come next so that the text of a sequence matches a JSON
// schema, a regular expression, one of a list of choices, a context-free grammar, or a format of
// several parts (text_format.h).
//
// White space in JSON is limited to what common JSON writers produce. After an opening bracket and
// after a comma: nothing, one space, or a line end and up to 64 spaces and tabs. After a colon:
// nothing or one space. Before the closing bracket of a container that is not empty: nothing, or a
// line end and up to 64 spaces and tabs. No white space is allowed elsewhere or around the
// response. Encoding::kJsonString defines the spelling of strings, NumberDfa() that of numbers.
// The properties that a schema names come in the schema's order, each once, and may be left out if
// they are optional; all others follow in any order.
//
// Scalars are matched by byte automata; objects and arrays are frames on a stack. A state is a
// small set of such stacks. A mask is computed by walking the byte trie of the vocabulary from that
// state.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/text/structured/text_format.h"
#include "engine/text/structured/vocabulary_index.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// The constraint's state for one sequence. One thread at a time.
class ConstraintState {
 public:
  virtual ~ConstraintState() = default;

  // Sets bit t of `mask` [ceil(vocab_size / 32) words] if token t may come next, and clears all
  // other bits. The end-of-sequence tokens are set if and only if the text so far is complete.
  //
  // `tokens_left` is the number of tokens that may still be generated, this one included. A token
  // is allowed only if the text can be completed within this limit, counting one token for each
  // further byte, and one for the end of the sequence if the complete text could also continue.
  // Free text counts as complete. If no token meets the limit, only the first token of an ending
  // with few tokens is allowed; if none is found, the limit is ignored. The mask is never empty.
  virtual void AllowedTokens(std::span<uint32_t> mask, int64_t tokens_left) = 0;

  // Advances the state by the chosen token. Returns false, with the state unchanged, if the
  // constraint does not allow the token. The limit on tokens is not checked.
  virtual bool Accept(TokenId token) = 0;

  // As Accept(), but also returns false, with the text unchanged, if the text could be completed
  // with `token` and `tokens_left` further tokens, or others instead, but no more after `token`. So
  // a text that is complete in time is never refused, except where an ending search of bounded work
  // misses its end. Once the text cannot be completed in time, the limit is ignored for good.
  virtual bool AcceptInTime(TokenId token, int64_t /*tokens_left*/) { return Accept(token); }
  // Returns the work that this object and those that it was cloned from have done since the start
  // of the text, in units of one step of the matcher (some nanoseconds). It depends only on the
  // constraint, the vocabulary and the calls, not on the machine or on what is cached.
  virtual int64_t work() const = 0;
  // Whether the text takes more work than is allowed, in one token or on average. Then masks may
  // lack tokens or be empty, Accept() returns false, and the caller must end the text. Stays true.
  virtual bool overworked() const = 0;

  // Whether the text so far matches the whole constraint.
  virtual bool complete() const = 0;
  // Whether any byte may follow the text so far.
  virtual bool can_continue() const = 0;

  // Returns a hash of the state. Equal states of a constraint have equal hashes, whatever texts led
  // to them.
  virtual uint64_t StateHash() const = 0;

  // Returns a copy that shares no mutable data with this object, so different threads may use the
  // two.
  virtual std::unique_ptr<ConstraintState> Clone() const = 0;
};

// The work of one text (ConstraintState::work()) in one step of the engine after which further
// tokens, drafted ones or those without a choice, wait for the next step.
inline constexpr int64_t kStepWork = 400000;

// The error of a text whose state is overworked().
absl::Status OverworkedError();

// Immutable: any number of threads may use one object.
class CompiledConstraint {
 public:
  virtual ~CompiledConstraint() = default;
  // Returns the state at the start of a text. The state may outlive this object.
  virtual std::unique_ptr<ConstraintState> NewState() const = 0;
  // Returns the approximate number of bytes of memory, including masks that may be cached later.
  virtual size_t memory_bytes() const = 0;
  // Returns the special tokens that this constraint allows as text, in ascending order: their text
  // is part of the response even if the request omits special tokens (see text_format.h). Valid as
  // long as the object.
  virtual std::span<const TokenId> text_tokens() const { return {}; }
};

struct ConstraintSpec {
  enum class Kind { kJsonObject, kJsonSchema, kRegex, kChoice, kGrammar, kFormat };
  Kind kind = Kind::kJsonObject;
  // The JSON schema, the pattern or the grammar. A pattern must match the whole text.
  std::string text;
  std::vector<std::string> choices;
  // If true, unknown keywords and formats are errors; otherwise they are ignored as annotations.
  bool strict = false;
  // kJsonSchema: if true, an object whose schema names properties, but says nothing about others
  // (additionalProperties, patternProperties, propertyNames), has no others. JSON Schema allows
  // them.
  bool closed_objects = false;
  // kFormat: the format of the whole text; not null.
  std::shared_ptr<const TextFormat> format;
};

// Returns the constraint for texts with tagged regions, such as tool calls.
ConstraintSpec TagsConstraint(StructuralTags tags);

// Returns a text that two constraints share if and only if they are equal.
std::string CanonicalText(const ConstraintSpec& spec);

struct ConstraintLimits {
  int schema_nesting = 32;          // largest depth of schemas inside schemas
  size_t schema_bytes = 64 << 10;   // largest size of the schema, also of all choices together
  int enum_entries = 1000;          // largest number of entries in one enum, also of choices
  size_t pattern_bytes = 1 << 10;   // largest size of one pattern
  size_t grammar_bytes = 64 << 10;  // largest size of one grammar
  int format_parts = 2000;          // largest number of parts and tags of a format
  int states = 100000;              // largest number of states of all automata together
  std::chrono::milliseconds compile_time{2000};
  int64_t shortest_answer = 1 << 20;  // largest size in bytes of the shortest text that matches
};

}  // namespace moeserve
