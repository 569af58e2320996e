#include "server/reports/live_profile.h"

namespace moeserve::server {

ExpertProfile LiveProfile(const StackExperts& experts, const std::string& model) {
  ExpertProfile out;
  out.model = model;
  out.vocabulary = LargestVocabulary(experts.spec());
  out.stats = experts.Snapshot();
  if (const std::optional<TokenExpertCounts> table = experts.token_counts();
      table && table->complete()) {
    out.token_counts = CountsByBlock(*table, out.stats);
  }
  out.hidden = experts.HiddenSamples();
  return out;
}

}  // namespace moeserve::server
