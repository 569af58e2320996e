// Computes vectors or labels of texts for a command.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/commands/model_options.h"
#include "server/commands/start_model.h"
#include "server/encode/encode_run.h"

namespace moeserve::server {

// Where a command's texts come from: arguments, files with a text in each line, or standard input.
struct TextOptions {
  std::vector<std::string> texts;
  std::vector<std::string> files;  // "-": standard input
  bool pairs = false;              // whether a tab divides a line into two texts
  int max_tokens = 0;              // longer texts are cut; 0: they are an error
};

// Adds TEXT and --file, and --truncate.
void AddTextOptions(CLI::App& app, TextOptions& options);

// Calls `on_results` with each of the runs that compute the texts in order, and the index of the
// run's first text. `prepare` completes the job of a run, whose inputs are set.
absl::Status EncodeTexts(const RunningModel& model, const TextOptions& options,
                         const std::function<absl::Status(const EncodeModel&, EncodeJob&)>& prepare,
                         const std::function<absl::Status(EncodeRun&, size_t first)>& on_results);

}  // namespace moeserve::server
