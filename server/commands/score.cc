#include <cstdio>
#include <memory>
#include <string>

#include "model_loaders/profiles/profile_file.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/profile_texts.h"
#include "server/commands/report_options.h"
#include "server/reports/statistics_report.h"

namespace moeserve::server {
namespace {

struct ScoreArguments {
  ModelOptionsText model;
  ProfilingOptions profiling;
  ProfileReportOptions report;
  std::string profile_file;
  bool profile_hidden = false;
  bool profile_routes = true;
  bool json = false;
};

void PrintScore(const ScoreArguments& options, const ProfiledTexts& result) {
  const Score& score = result.score;
  const Tokenizer* tokenizer = result.model.engine->tokenizer();
  if (options.json) {
    OrderedJson out;
    out["model"] = result.model.directory_name;
    out["tokens"] = score.tokens;
    out["scored_tokens"] = score.scored;
    out["window"] = score.window;
    out["nll_per_token"] = score.nll_per_token();
    out["perplexity"] = score.perplexity();
    out["bits_per_byte"] = score.bits_per_byte();
    out["experts"] = ProfileJson(result.profile, tokenizer, options.report);
    PrintJson(out);
    return;
  }
  std::printf(
      "tokens %lld, scored %lld in windows of %d, nll/token %.6f, perplexity %.4f, bits/byte "
      "%.4f\n\n",
      static_cast<long long>(score.tokens), static_cast<long long>(score.scored), score.window,
      score.nll_per_token(), score.perplexity(), score.bits_per_byte());
  std::fputs(ProfileTable(result.profile, tokenizer, options.report).c_str(), stdout);
}

absl::Status ScoreFiles(ScoreArguments options) {
  const bool save = !options.profile_file.empty();
  options.profiling.routes = save && options.profile_routes;
  MOESERVE_ASSIGN_OR_RETURN(ProfiledTexts result, ProfileTexts(options.model, options.profiling));
  PrintScore(options, result);
  if (!save) return absl::OkStatus();
  if (!options.profile_hidden) result.profile.hidden.clear();
  return SaveProfile(options.profile_file, result.profile);
}

}  // namespace

void AddScoreCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("score", "Perplexity of a text in windows, and its expert statistics");
  auto options = std::make_shared<ScoreArguments>();
  AddModelOptions(*command, options->model);
  AddProfilingOptions(*command, options->profiling);
  AddReportOptions(*command, options->report);
  command->add_option("--dump", options->profiling.dump_folder,
                      "Folder to write router scores, routes and token ids to");
  command->add_flag("--dump-hidden", options->profiling.dump_hidden,
                    "With --dump: also write the routers' inputs");
  command->add_option("--profile", options->profile_file, "File to write an expert profile to");
  command->add_flag("--profile-hidden", options->profile_hidden,
                    "With --profile: include the sampled router inputs");
  command->add_flag("!--no-profile-routes", options->profile_routes,
                    "With --profile: leave out the routes of every row");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &selected] {
    selected = [options] { return StatusToExit(ScoreFiles(*options)); };
  });
}

}  // namespace moeserve::server
