#include "server/reports/stack_experts.h"

#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server {

Result<StackExperts> StackExperts::Named(const Engine& engine, std::string_view name) {
  const ExpertRecorder* const encoder = engine.encoder_experts();
  if (encoder == nullptr) {
    return InvalidValue("stack", "'stack': this model has one stack of layers only");
  }
  if (name == KindName(Stack::kEncoder)) return StackExperts(engine, encoder);
  if (name == KindName(Stack::kDecoder)) return StackExperts(engine);
  return InvalidValue("stack",
                      Concat("'stack' must be encoder or decoder, not ", Printable(name, 32)));
}

std::vector<StackExperts> StackExperts::All(const Engine& engine) {
  std::vector<StackExperts> out;
  if (const ExpertRecorder* const encoder = engine.encoder_experts(); encoder != nullptr) {
    out.push_back(StackExperts(engine, encoder));
  }
  out.emplace_back(engine);
  return out;
}

Stack StackExperts::stack() const {
  if (encoder_ != nullptr) return Stack::kEncoder;
  return engine_->encoder_experts() != nullptr ? Stack::kDecoder : Stack::kOnly;
}

ExpertStats StackExperts::Snapshot() const {
  return encoder_ != nullptr ? encoder_->Snapshot() : engine_->ExpertSnapshot();
}

const ModelSpec& StackExperts::spec() const {
  return encoder_ != nullptr ? *engine_->spec().encoder : engine_->spec();
}

std::optional<TokenExpertCounts> StackExperts::token_counts() const {
  return encoder_ != nullptr ? encoder_->token_counts() : engine_->token_expert_counts();
}

std::vector<HiddenSample> StackExperts::HiddenSamples() const {
  return encoder_ != nullptr ? encoder_->HiddenSamples() : engine_->HiddenSamples();
}

const RouteLayout& StackExperts::layout() const {
  return encoder_ != nullptr ? encoder_->layout() : engine_->route_layout();
}

double MeanActivatedParameters(const std::vector<ExpertStats>& stacks) {
  double tokens = 0.0;
  double sum = 0.0;
  for (const ExpertStats& stats : stacks) {
    tokens += static_cast<double>(stats.tokens);
    sum += static_cast<double>(stats.tokens) * MeanActivatedParameters(stats);
  }
  return tokens > 0.0 ? sum / tokens : 0.0;
}

}  // namespace moeserve::server
