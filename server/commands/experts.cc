#include <climits>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/message.h"
#include "model_loaders/loader.h"
#include "model_loaders/profiles/profile_file.h"
#include "server/commands/commands.h"
#include "server/commands/profile_texts.h"
#include "server/commands/report_options.h"
#include "server/reports/profile_diff.h"

namespace moeserve::server {
namespace {

// LoadProfile(), with the whole path in errors, which begin with its last component.
Result<ExpertProfile> ReadProfile(const std::string& file) {
  auto profile = LoadProfile(file);
  if (profile.ok()) return profile;
  const std::string folder = std::filesystem::path(file).parent_path().string();
  return Prefixed(folder.empty() ? "" : Printable(folder, PATH_MAX) + "/", profile.status());
}

int StatusToExit(const absl::Status& status) { return status.ok() ? 0 : Fail(status); }

struct SaveOptions {
  ModelOptionsText model;
  ProfilingOptions profiling;
  std::string file;
  bool hidden = false;
};

absl::Status Save(SaveOptions options) {
  options.profiling.routes = true;
  MOESERVE_ASSIGN_OR_RETURN(ProfiledTexts result, ProfileTexts(options.model, options.profiling));
  if (!options.hidden) result.profile.hidden.clear();
  return SaveProfile(options.file, result.profile);
}

void AddSave(CLI::App& experts, Command& selected) {
  CLI::App* command =
      experts.add_subcommand("save", "Run texts through a model and write its expert profile");
  auto options = std::make_shared<SaveOptions>();
  command->add_option("FILE", options->file, "Profile to write")->required();
  AddModelOptions(*command, options->model);
  AddProfilingOptions(*command, options->profiling);
  command->add_flag("--hidden", options->hidden,
                    "Include the sampled router inputs in the profile");
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(Save(*options)); }; });
}

absl::Status MergeFiles(const std::vector<std::string>& files) {
  MOESERVE_ASSIGN_OR_RETURN(ExpertProfile sum, ReadProfile(files[1]));
  for (size_t i = 2; i < files.size(); ++i) {
    MOESERVE_ASSIGN_OR_RETURN(const ExpertProfile next, ReadProfile(files[i]));
    const absl::Status merged = Merge(sum, next);
    if (!merged.ok()) {
      return Prefixed(Concat(Quoted(files[1]), " and ", Quoted(files[i]), ": "), merged);
    }
  }
  return SaveProfile(files[0], sum);
}

void AddMerge(CLI::App& experts, Command& selected) {
  CLI::App* command = experts.add_subcommand(
      "merge", "Add profiles of one model, as if their texts had been run in one go");
  auto files = std::make_shared<std::vector<std::string>>();
  command->add_option("FILES", *files, "Profile to write, then the profiles to add")
      ->required()
      ->expected(2, 10000);
  command->callback(
      [files, &selected] { selected = [files] { return StatusToExit(MergeFiles(*files)); }; });
}

struct ShowOptions {
  std::string file;
  // Checkpoint folder whose tokenizer prints the tokens' texts; if empty, token ids are printed.
  std::string model;
  std::vector<std::string> ignored_keys;
  ProfileReportOptions report;
  bool json = false;
};

absl::Status Show(const ShowOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const ExpertProfile profile, ReadProfile(options.file));
  std::shared_ptr<const Tokenizer> tokenizer;
  if (!options.model.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(
        const Checkpoint checkpoint,
        LoadCheckpoint(options.model, {.ignored_keys = options.ignored_keys}));
    tokenizer = checkpoint.tokenizer;
  }
  if (options.json) {
    PrintJson(ProfileJson(profile, tokenizer.get(), options.report));
  } else {
    std::printf("%s\n\n", Printable(profile.model).c_str());
    std::fputs(ProfileTable(profile, tokenizer.get(), options.report).c_str(), stdout);
  }
  return absl::OkStatus();
}

void AddShow(CLI::App& experts, Command& selected) {
  CLI::App* command = experts.add_subcommand("show", "Print the statistics of a profile");
  auto options = std::make_shared<ShowOptions>();
  command->add_option("FILE", options->file, "Profile")->required();
  command->add_option("--model", options->model,
                      "Checkpoint folder; its tokenizer shows tokens as text instead of ids");
  AddIgnoreConfig(*command, options->ignored_keys);
  AddReportOptions(*command, options->report);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(Show(*options)); }; });
}

struct DiffOptions {
  ModelOptionsText compute;  // `directory` is set to A or B before use
  ProfilingOptions profiling;
  std::string a, b;
  int top = 5;
  bool json = false;
};

// Reads an expert profile if `path` is a file. If it is a model folder, computes the profile by
// running the texts of --text through the model.
Result<ExpertProfile> ProfileOf(const std::string& path, const DiffOptions& options) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return ReadProfile(path);
  if (options.profiling.text_files.empty()) {
    return absl::InvalidArgumentError(
        Concat(Quoted(path), " is a model folder: give the text to run with --text"));
  }
  ModelOptionsText model = options.compute;
  model.directory = path;
  MOESERVE_ASSIGN_OR_RETURN(ProfiledTexts result, ProfileTexts(model, options.profiling));
  return std::move(result.profile);
}

absl::Status PrintDiff(DiffOptions options) {
  options.profiling.routes = true;
  options.profiling.hidden_samples = 0;
  options.profiling.token_stats_mib = 0;
  MOESERVE_ASSIGN_OR_RETURN(const ExpertProfile a, ProfileOf(options.a, options));
  MOESERVE_ASSIGN_OR_RETURN(const ExpertProfile b, ProfileOf(options.b, options));
  MOESERVE_ASSIGN_OR_RETURN(const ProfileDiff diff, Diff(a, b));
  if (options.json) {
    PrintJson(DiffJson(diff));
  } else {
    std::fputs(DiffTable(diff, options.top).c_str(), stdout);
  }
  return absl::OkStatus();
}

void AddDiff(CLI::App& experts, Command& selected) {
  CLI::App* command = experts.add_subcommand(
      "diff",
      "Compare two profiles, or two models over --text: load shares, inter-run consistency, "
      "routing fluctuation, largest changes");
  auto options = std::make_shared<DiffOptions>();
  command->add_option("A", options->a, "Profile or checkpoint folder")->required();
  command->add_option("B", options->b, "Profile or checkpoint folder")->required();
  AddComputeOptions(*command, options->compute);
  AddQuietOption(*command, options->compute.quiet);
  AddProfilingOptions(*command, options->profiling, false);
  command
      ->add_option("--top", options->top,
                   "Experts with the largest change of load to show per block")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(PrintDiff(*options)); }; });
}

}  // namespace

void AddExpertsCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("experts", "Save, show, merge and compare expert profiles");
  command->require_subcommand(1);
  AddSave(*command, selected);
  AddShow(*command, selected);
  AddMerge(*command, selected);
  AddDiff(*command, selected);
  AddExpertsCompareCommand(*command, selected);
}

}  // namespace moeserve::server
