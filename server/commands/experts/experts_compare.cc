#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/report_options.h"
#include "server/commands/score/profile_texts.h"
#include "server/reports/model_comparison.h"

namespace moeserve::server {
namespace {

struct CompareArguments {
  ModelOptionsText compute;  // `directory` is set to each of `models` in turn
  ProfilingOptions profiling;
  std::vector<std::string> models;
  double threshold = 0.01;
  bool json = false;
  bool markdown = false;
};

absl::Status Compare(CompareArguments options) {
  options.profiling.hidden_samples = 0;
  options.profiling.token_stats_mib = 0;
  Comparison comparison;
  comparison.threshold = options.threshold;
  for (const std::string& folder : options.models) {
    options.compute.directory = folder;
    auto result = ProfileTexts(options.compute, options.profiling);
    if (!result.ok()) return Prefixed(Concat(Quoted(folder), ": "), result.status());
    comparison.tokens = static_cast<int64_t>(result->profile.stats.tokens);
    comparison.models.push_back(
        Summarize(result->profile, result->score.perplexity(), result->macs, options.threshold));
  }
  if (options.json) {
    PrintJson(ComparisonJson(comparison));
  } else {
    std::fputs(ComparisonTable(comparison, options.markdown).c_str(), stdout);
  }
  return absl::OkStatus();
}

}  // namespace

void AddExpertsCompareCommand(CLI::App& experts, Command& selected) {
  CLI::App* command = experts.add_subcommand(
      "compare", "Run models over one text and compare their expert statistics");
  auto options = std::make_shared<CompareArguments>();
  command->add_option("MODELS", options->models, "Checkpoint folders")->required();
  AddComputeOptions(*command, options->compute);
  AddQuietOption(*command, options->compute.quiet);
  AddProfilingOptions(*command, options->profiling);
  AddNumberOption(
      *command, "--threshold", options->threshold,
      "An expert counts as active if its selections, divided by the tokens, exceed this", 0.0, 1e6);
  CLI::Option* json = command->add_flag("--json", options->json, "Print JSON");
  command->add_flag("--markdown", options->markdown, "Print Markdown tables")->excludes(json);
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(Compare(*options)); }; });
}

}  // namespace moeserve::server
