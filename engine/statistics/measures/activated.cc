#include "engine/statistics/measures/activated.h"

namespace moeserve {

ActivatedParameters ActivatedOf(const BlockExpertStats& block) {
  ActivatedParameters out;
  for (size_t e = 0; e < block.selections.size(); ++e) {
    const double parameters = static_cast<double>(block.expert_parameters[e]);
    out.compute += static_cast<double>(block.selections[e]) * parameters;
    out.unique += static_cast<double>(block.touching_tokens[e]) * parameters;
    out.total += block.expert_parameters[e];
  }
  const double tokens = static_cast<double>(block.total_tokens());
  out.compute = tokens > 0.0 ? out.compute / tokens : 0.0;
  out.unique = tokens > 0.0 ? out.unique / tokens : 0.0;
  return out;
}

ActivatedParameters ActivatedOf(const ExpertStats& stats) {
  ActivatedParameters out;
  out.total = stats.always_active_parameters;
  if (stats.tokens > 0) {
    out.compute = out.unique = static_cast<double>(stats.always_active_parameters);
  }
  for (const BlockExpertStats& b : stats.blocks) {
    const ActivatedParameters block = ActivatedOf(b);
    out.compute += block.compute;
    out.unique += block.unique;
    out.total += block.total;
  }
  return out;
}

double MeanActivatedRatio(const ExpertStats& stats) {
  if (stats.blocks.empty()) return 0.0;
  double sum = 0.0;
  for (const BlockExpertStats& b : stats.blocks) sum += ActivatedOf(b).compute_ratio();
  return sum / static_cast<double>(stats.blocks.size());
}

double MeanDiversity(const ExpertStats& stats) {
  double tokens = 0.0, sum = 0.0;
  for (size_t n = 0; n < stats.diversity_histogram.size(); ++n) {
    const double count = static_cast<double>(stats.diversity_histogram[n]);
    tokens += count;
    sum += static_cast<double>(n) * count;
  }
  if (tokens <= 0.0 || stats.diversity_blocks == 0) return 0.0;
  return sum / tokens / stats.diversity_blocks;
}

double MeanDistinctExperts(const BlockExpertStats& block) {
  double tokens = 0.0;
  double sum = 0.0;
  for (size_t n = 0; n < block.distinct_histogram.size(); ++n) {
    tokens += static_cast<double>(block.distinct_histogram[n]);
    sum += static_cast<double>(n) * static_cast<double>(block.distinct_histogram[n]);
  }
  return tokens > 0.0 ? sum / tokens : 0.0;
}

}  // namespace moeserve
