// Compares several models on the same text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/statistics/expert_profile.h"
#include "engine/statistics/measures/macs.h"
#include "server/base/json.h"

namespace moeserve::server {

struct ComparedModel {
  std::string model;
  int experts = 0;         // in all routed blocks together
  int64_t parameters = 0;  // without embeddings and LM head
  double perplexity = 0.0;
  double activation_ratio = 0.0;  // share of experts that count as active
  double diversity = 0.0;         // distinct experts per token and block
  // Activated parameters per token. If several sub-tokens of a token select the same expert,
  // `compute` counts that expert several times and `unique` once.
  double compute = 0.0;
  double unique = 0.0;
  // Mean over blocks of the expert parameters that a token activates (counted as in `compute`),
  // divided by all expert parameters of the block.
  double expert_share = 0.0;
  MeasuredMacs macs;          // per token
  double balance = 0.0;       // mean over blocks of mean / max selections per expert
  double balance_loss = 0.0;  // mean over blocks of MoA's L_a; 1 for even load
  double entropy = 0.0;       // mean over blocks of router entropy / ln E, for E experts
};

ComparedModel Summarize(const ExpertProfile& profile, double perplexity, const MeasuredMacs& macs,
                        double threshold);

struct Comparison {
  double threshold = 0.0;
  int64_t tokens = 0;
  std::vector<ComparedModel> models;
};

OrderedJson ComparisonJson(const Comparison& comparison);
// Returns a table as text or as Markdown, followed by an explanation of its columns.
std::string ComparisonTable(const Comparison& comparison, bool markdown);

}  // namespace moeserve::server
