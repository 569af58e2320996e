// Runs texts through a model and returns their expert profile.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/routes/row_limit.h"
#include "engine/statistics/expert_profile.h"
#include "engine/statistics/measures/initial_balance.h"
#include "engine/statistics/measures/macs.h"
#include "engine/statistics/measures/word_experts.h"
#include "server/commands/model_options.h"
#include "server/commands/score/text_scorer.h"
#include "server/commands/start_model.h"

namespace moeserve::server {

struct ProfilingOptions {
  EngineOptionsText engine;
  std::vector<std::string> text_files;  // each file is a separate document
  std::vector<std::string> pair_files;  // ReadTextPairs(); instead of texts, for an encoder-decoder
  bool of_encoder = false;              // with pairs: what is profiled is the encoder
  // As in other programs: models often are far worse beyond the length of their training texts.
  int window = 512;
  int64_t hidden_samples = 16384;
  int token_stats_mib = 1024;
  bool routes = false;      // whether the profile gets the routes of every row
  MaskOptions mask;         // for masked language models
  std::string dump_folder;  // folder for a ScoreDump; empty writes none
  std::string words_file;   // file with one word per line; empty: none
  // Drops rows over the capacity of their experts, one window at a time; only on the CPU.
  std::optional<CapacityRule> capacity;
  // tau_0 of InitialBalance; that of the paper if absent.
  std::optional<double> initial_temperature;
  bool dump_hidden = false;
};

// Adds --text, --window, --hidden-samples, --token-stats-mib and the options of the engine.
void AddProfilingOptions(CLI::App& app, ProfilingOptions& options, bool text_required = true);

// LoadProfile(), with the whole path in errors, which begin with its last component.
Result<ExpertProfile> ReadProfile(const std::string& file);

struct ProfiledTexts {
  Score score;
  ExpertProfile profile;
  MeasuredMacs macs;  // of the tokens of the texts
  // X-MoE, eq. 9, by routed block; absent if the block's router has no learned temperature.
  std::vector<std::optional<InitialBalance>> initial_balance;
  std::vector<std::string> words;              // those of ProfilingOptions::words_file
  std::optional<WordStatistics> word_experts;  // of `words`
  std::vector<DroppedRows> dropped;  // by routed block; empty without ProfilingOptions::capacity
  RunningModel model;                // the caller needs its tokenizer
};

// Starts the model and computes the texts of `options`. Records router scores in every step.
// Disables the prefix cache, so that the model computes every token of the texts.
Result<ProfiledTexts> ProfileTexts(const ModelOptionsText& model, const ProfilingOptions& options);

}  // namespace moeserve::server
