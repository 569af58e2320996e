// What structured output asks of a text, as a state that follows one sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/tokenizer/tokenizer.h"

namespace moeserve {

// State of one sequence's constraint. One thread at a time.
class ConstraintState {
 public:
  virtual ~ConstraintState() = default;
  // Sets bit t of `mask` [ceil(vocab/32) words] where token t may come next and clears all others.
  virtual void AllowedTokens(std::span<uint32_t> mask, int64_t tokens_left) = 0;
  // The token that was drawn. False: it was not allowed (state unchanged).
  virtual bool Accept(TokenId token) = 0;
  virtual bool complete() const = 0;
  virtual bool can_continue() const = 0;
  virtual std::unique_ptr<ConstraintState> Clone() const = 0;
};

// Immutable, any number of threads.
class CompiledConstraint {
 public:
  virtual ~CompiledConstraint() = default;
  virtual std::unique_ptr<ConstraintState> NewState() const = 0;
};

}  // namespace moeserve
