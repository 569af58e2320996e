#include "server/reports/live_profile.h"

namespace moeserve::server {

ExpertProfile LiveProfile(const Engine& engine, const std::string& model) {
  ExpertProfile out;
  out.model = model;
  out.vocabulary = LargestVocabulary(engine.spec());
  out.stats = engine.ExpertSnapshot();
  if (const std::optional<TokenExpertCounts> table = engine.token_expert_counts();
      table && table->complete()) {
    out.token_counts = CountsByBlock(*table, out.stats);
  }
  out.hidden = engine.HiddenSamples();
  return out;
}

}  // namespace moeserve::server
