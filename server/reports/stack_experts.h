// Reads the expert statistics of one stack of a model.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"

namespace moeserve::server {

// A model with one stack has only kOnly; an encoder-decoder has kEncoder and kDecoder. Refers to
// the engine, which must outlive it. Thread-safe.
class StackExperts {
 public:
  // The model's only stack, or its decoder.
  explicit StackExperts(const Engine& engine) : engine_(&engine), encoder_(nullptr) {}
  // The stack named "encoder" or "decoder". InvalidArgument, for the request's field "stack", if
  // the name is another one or the model has one stack only.
  static Result<StackExperts> Named(const Engine& engine, std::string_view name);
  // All stacks of the model, an encoder before its decoder.
  static std::vector<StackExperts> All(const Engine& engine);

  Stack stack() const;
  ExpertStats Snapshot() const;
  const ModelSpec& spec() const;  // of this stack
  // The following are as those of Engine.
  std::optional<TokenExpertCounts> token_counts() const;
  std::vector<HiddenSample> HiddenSamples() const;
  const RouteLayout& layout() const;

 private:
  StackExperts(const Engine& engine, const ExpertRecorder* encoder)
      : engine_(&engine), encoder_(encoder) {}

  const Engine* engine_;
  const ExpertRecorder* encoder_;  // null if this is not an encoder beside a decoder
};

// Returns the mean number of parameters that a token activated, over the tokens of all stacks.
double MeanActivatedParameters(const std::vector<ExpertStats>& stacks);

}  // namespace moeserve::server
