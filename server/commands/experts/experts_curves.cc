#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/commands/commands.h"
#include "server/commands/report_options.h"
#include "server/commands/score/profile_texts.h"
#include "server/reports/profile_curves.h"

namespace moeserve::server {
namespace {

struct CurvesArguments {
  std::vector<std::string> profiles;           // one run
  std::vector<std::vector<std::string>> runs;  // or several
  bool json = false;
};

absl::Status PrintCurves(const CurvesArguments& options) {
  std::vector<std::vector<std::string>> files = options.runs;
  if (!options.profiles.empty()) files.insert(files.begin(), options.profiles);
  std::vector<ProfileRun> runs;
  for (const std::vector<std::string>& names : files) {
    ProfileRun& run = runs.emplace_back();
    run.names = names;
    for (const std::string& name : names) {
      MOESERVE_ASSIGN_OR_RETURN(ExpertProfile profile, ReadProfile(name));
      profile.token_counts.clear();
      run.profiles.push_back(std::move(profile));
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(const ProfileCurves curves, CurvesOf(runs));
  if (options.json) {
    PrintJson(CurvesJson(curves));
  } else {
    std::fputs(CurvesTable(curves).c_str(), stdout);
  }
  return absl::OkStatus();
}

}  // namespace

void AddExpertsCurvesCommand(CLI::App& experts, Command& selected) {
  CLI::App* command = experts.add_subcommand(
      "curves",
      "Compare the profiles of checkpoints: routing fluctuation from each to the next, "
      "representation collapse, and the consistency of several runs");
  auto options = std::make_shared<CurvesArguments>();
  command->add_option("PROFILES", options->profiles, "Profiles of one run, the earliest first");
  command->add_option("--run", options->runs,
                      "Profiles of a run, the earliest first; can be repeated for more runs");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &selected] {
    if (options->profiles.empty() && options->runs.empty()) throw CLI::RequiredError("PROFILES");
    selected = [options] { return StatusToExit(PrintCurves(*options)); };
  });
}

}  // namespace moeserve::server
