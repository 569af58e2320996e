// The interface through which the server uses the engine. engine_adapter.h implements it by an
// Engine; tests implement it by a scripted engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/engine.h"

namespace moeserve::server {

// Thread-safe. Each function has the contract of the function of Engine with the same name.
class EngineApi {
 public:
  virtual ~EngineApi() = default;

  // Submits requests that are samples of the same prompt.
  virtual absl::Status Submit(std::vector<Request> requests,
                              std::vector<std::shared_ptr<TokenSink>> sinks) = 0;
  virtual void Cancel(const TokenSink* sink) = 0;
  virtual bool Drain(absl::Time deadline) = 0;

  virtual EngineStats Stats() const = 0;
  virtual EngineProgress Progress() const = 0;
  virtual ExpertStats ExpertSnapshot() const = 0;
  virtual const RouteLayout& route_layout() const = 0;
  virtual RoutingControlLimits routing_control() const = 0;
  // Returns a view of the counts of selections by token and expert, valid as long as the engine
  // lives; nullopt if these counts are not kept.
  virtual std::optional<TokenExpertCounts> token_expert_counts() const = 0;
  virtual std::vector<HiddenSample> HiddenSamples() const = 0;

  virtual int max_model_len() const = 0;
  virtual const ModelSpec& spec() const = 0;
  // Returns null if the model has no tokenizer. Prompts can then be token ids only.
  virtual const Tokenizer* tokenizer() const = 0;
};

}  // namespace moeserve::server
