// Compares models on one text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/statistics/expert_profile.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

struct ComparedModel {
  std::string model;
  int experts = 0;         // of all routed blocks
  int64_t parameters = 0;  // embeddings and head excluded
  double perplexity = 0.0;
  double activation_ratio = 0.0;  // share of experts over the threshold
  double diversity = 0.0;         // distinct experts of a token in a block
  double compute = 0.0;           // activated parameters of a token
  double unique = 0.0;
  double expert_share = 0.0;  // mean over blocks of compute / the block's expert parameters
  double balance = 0.0;       // mean over blocks of mean / max selections per expert
  double balance_loss = 0.0;  // mean over blocks of MoA's L_a: 1 is even
  double entropy = 0.0;       // mean over blocks of the routers' entropy / ln E
};

ComparedModel Summarize(const ExpertProfile& profile, double perplexity, double threshold);

struct Comparison {
  double threshold = 0.0;
  int64_t tokens = 0;
  std::vector<ComparedModel> models;
};

nlohmann::ordered_json ComparisonJson(const Comparison& comparison);
// Returns a table as text or as Markdown, and the meaning of its columns.
std::string ComparisonTable(const Comparison& comparison, bool markdown);

}  // namespace moeserve::server
