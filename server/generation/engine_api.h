// What the servers need of an engine. The one real implementation is
// server/generation/engine_adapter.h; tests put a scripted one in its place.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/engine.h"

namespace moeserve::server {

// All functions are thread-safe; their contracts are those of the same functions of Engine.
class EngineApi {
 public:
  virtual ~EngineApi() = default;

  // Samples of one prompt.
  virtual absl::Status Submit(std::vector<Request> requests,
                              std::vector<std::shared_ptr<TokenSink>> sinks) = 0;
  virtual void Cancel(const std::string& id) = 0;
  virtual void Drain(absl::Time deadline) = 0;

  virtual EngineStats Stats() const = 0;
  virtual ExpertStats ExpertSnapshot() const = 0;
  virtual const RouteLayout& route_layout() const = 0;
  virtual RoutingControlLimits routing_control() const = 0;
  // Valid as long as the engine; null where they are not kept.
  virtual std::optional<TokenExpertCounts> token_expert_counts() const = 0;
  virtual std::vector<HiddenSample> HiddenSamples() const = 0;

  virtual int max_model_len() const = 0;
  virtual const ModelSpec& spec() const = 0;
  virtual const Tokenizer* tokenizer() const = 0;  // null: the model takes and gives ids only
};

}  // namespace moeserve::server
