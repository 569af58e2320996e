#include "server/generation/engine_adapter.h"

#include <string>
#include <utility>
#include <vector>

namespace moeserve::server {
namespace {

class EngineAdapter final : public EngineApi {
 public:
  explicit EngineAdapter(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  absl::Status Submit(std::vector<Request> requests,
                      std::vector<std::shared_ptr<TokenSink>> sinks) override {
    return engine_->Submit(std::move(requests), std::move(sinks));
  }
  void Cancel(const TokenSink* sink) override { engine_->Cancel(sink); }
  bool Drain(absl::Time deadline) override { return engine_->Drain(deadline); }
  EngineStats Stats() const override { return engine_->Stats(); }
  EngineProgress Progress() const override { return engine_->Progress(); }
  ExpertStats ExpertSnapshot() const override { return engine_->ExpertSnapshot(); }
  const RouteLayout& route_layout() const override { return engine_->route_layout(); }
  RoutingControlLimits routing_control() const override {
    return engine_->options().routing_control;
  }
  std::optional<TokenExpertCounts> token_expert_counts() const override {
    return engine_->token_expert_counts();
  }
  std::vector<HiddenSample> HiddenSamples() const override { return engine_->HiddenSamples(); }
  int max_model_len() const override { return engine_->max_model_len(); }
  const ModelSpec& spec() const override { return engine_->spec(); }
  const Tokenizer* tokenizer() const override {
    return engine_->has_tokenizer() ? &engine_->tokenizer() : nullptr;
  }

 private:
  const std::unique_ptr<Engine> engine_;
};

}  // namespace

std::shared_ptr<EngineApi> AdaptEngine(std::unique_ptr<Engine> engine) {
  return std::make_shared<EngineAdapter>(std::move(engine));
}

}  // namespace moeserve::server
