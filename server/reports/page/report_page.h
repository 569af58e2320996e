// The report of `moeserve score --report`: one HTML page with the papers' figures for a model and a
// text. It needs no other file and no script, and is laid out for screens and for A4 paper.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/routes/row_limit.h"
#include "engine/statistics/expert_profile.h"
#include "engine/statistics/measures/initial_balance.h"
#include "engine/statistics/measures/macs.h"
#include "engine/statistics/measures/word_experts.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "server/reports/statistics_report.h"

namespace moeserve::server {

// The figures whose data are missing are left out.
struct ReportPage {
  const ExpertProfile& profile;
  const Tokenizer& tokenizer;
  ProfileReportOptions options;
  std::vector<std::string> texts = {};  // names of the texts
  int64_t tokens = 0;                   // of the texts
  int window = 0;
  double perplexity = 0.0;  // NaN if the model gives tokens no probabilities
  bool pseudo = false;      // a masked language model's, which has no bits per byte
  double bits_per_byte = 0.0;
  int64_t parameters = 0;  // of the whole model
  MeasuredMacs macs;
  std::vector<std::optional<InitialBalance>> initial_balance;  // by routed block
  std::vector<std::string> words;
  std::optional<WordStatistics> word_experts;  // of `words`
  // What a capacity dropped, by routed block, and the perplexity without it; empty without one.
  std::string capacity = "";
  std::vector<DroppedRows> dropped;
  double perplexity_without = 0.0;
};

// Returns the whole file.
std::string ReportHtml(const ReportPage& page);

}  // namespace moeserve::server
