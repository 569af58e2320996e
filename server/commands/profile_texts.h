// Runs texts through a model and keeps all that statistics need.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/statistics/expert_profile.h"
#include "server/commands/model_options.h"
#include "server/commands/text_scorer.h"

namespace moeserve::server {

struct ProfilingOptions {
  EngineOptionsText engine;
  std::vector<std::string> text_files;  // each a document of its own
  int window = 0;
  int64_t hidden_samples = 16384;
  int token_stats_mib = 1024;
  bool routes = false;      // keep the routes of every row
  std::string dump_folder;  // empty: none
  bool dump_hidden = false;
};

// --text, --window, --hidden-samples, --token-stats-mib and the engine's.
void AddProfilingOptions(CLI::App& app, ProfilingOptions& options, bool text_required = true);

struct ProfiledTexts {
  Score score;
  ExpertProfile profile;
  RunningModel model;  // for its tokenizer
};

// Router scores are looked at in every step and every token is run once.
Result<ProfiledTexts> ProfileTexts(const ModelOptionsText& model, const ProfilingOptions& options);

}  // namespace moeserve::server
