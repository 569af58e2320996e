// Runs texts through a model and returns their expert profile.
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
  std::vector<std::string> text_files;  // each file is a separate document
  // As in other programs: models often are far worse beyond the length of their training texts.
  int window = 512;
  int64_t hidden_samples = 16384;
  int token_stats_mib = 1024;
  bool routes = false;      // whether the profile gets the routes of every row
  std::string dump_folder;  // folder for a ScoreDump; empty writes none
  bool dump_hidden = false;
};

// Adds --text, --window, --hidden-samples, --token-stats-mib and the options of the engine.
void AddProfilingOptions(CLI::App& app, ProfilingOptions& options, bool text_required = true);

struct ProfiledTexts {
  Score score;
  ExpertProfile profile;
  RunningModel model;  // the caller needs its tokenizer
};

// Starts the model and computes the texts of `options`. Records router scores in every step.
// Disables the prefix cache, so that the model computes every token of the texts.
Result<ProfiledTexts> ProfileTexts(const ModelOptionsText& model, const ProfilingOptions& options);

}  // namespace moeserve::server
