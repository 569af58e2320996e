// The interface of the engine that the server uses. engine_adapter.h implements it with an Engine;
// tests use a scripted one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/engine.h"

namespace moeserve::server {

// Thread-safe. The contracts are those of the functions of Engine with the same names.
class EngineApi {
 public:
  virtual ~EngineApi() = default;

  // The requests are samples of one prompt.
  virtual absl::Status Submit(std::vector<Request> requests,
                              std::vector<std::shared_ptr<TokenSink>> sinks) = 0;
  virtual void Cancel(const std::string& id) = 0;
  virtual void Drain(absl::Time deadline) = 0;

  virtual EngineStats Stats() const = 0;
  virtual ExpertStats ExpertSnapshot() const = 0;
  virtual const RouteLayout& route_layout() const = 0;
  virtual RoutingControlLimits routing_control() const = 0;
  // Lives as long as the engine; none if these counts are not kept.
  virtual std::optional<TokenExpertCounts> token_expert_counts() const = 0;
  virtual std::vector<HiddenSample> HiddenSamples() const = 0;

  virtual int max_model_len() const = 0;
  virtual const ModelSpec& spec() const = 0;
  // Returns null if the model has no tokenizer. Prompts can then be token ids only.
  virtual const Tokenizer* tokenizer() const = 0;
};

}  // namespace moeserve::server
