#include <climits>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/profiles/profile_file.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/report_options.h"
#include "server/commands/score/profile_texts.h"
#include "server/reports/profile_diff.h"

namespace moeserve::server {
namespace {

// Whether a path names a model: a folder, or a file that exists with an ending of weights.
bool NamesModel(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return true;
  const std::string ending = std::filesystem::path(path).extension().string();
  return (ending == ".gguf" || ending == ".pt" || ending == ".safetensors") &&
         std::filesystem::exists(path, ignored);
}

// A profile and a model, which the command line may name in either order.
struct ProfileAndModel {
  std::string first, second;  // the arguments without a name, FILE and MODEL; empty if missing
  std::string file;           // --output
  std::string model;          // --model

  void Add(CLI::App& command, const char* file_text, const std::string& model_text) {
    command.add_option("FILE", first, file_text);
    command.add_option("MODEL", second, "The same as --model; may also come first");
    command.add_option("-m,--model", model, model_text);
  }

  // Sets `file` and `model` to what the arguments mean. Throws CLI::ParseError if one is left over,
  // or missing: the file always, the model if `model_required`.
  void Resolve(bool model_required) {
    std::vector<std::string> words;
    for (const std::string& word : {first, second}) {
      if (!word.empty()) words.push_back(word);
    }
    if (model.empty() && !words.empty()) {
      // Of two arguments, the second is the model unless only the first one looks like it.
      size_t at = words.size() == 2 ? 1 : 0;
      if (words.size() == 2 && NamesModel(words[0]) && !NamesModel(words[1])) at = 0;
      if (words.size() == 2 || !file.empty() || NamesModel(words[0])) {
        model = words[at];
        words.erase(words.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    if (file.empty() && !words.empty()) {
      file = words[0];
      words.erase(words.begin());
    }
    if (!words.empty()) throw CLI::ExtrasError(words);
    if (file.empty()) throw CLI::RequiredError("FILE");
    if (model_required && model.empty()) throw CLI::RequiredError("--model");
  }
};

// Refuses to replace a file that is no profile, which arguments in an unforeseen order may name.
absl::Status CheckReplaceable(const std::string& file) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) {
    return absl::InvalidArgumentError(
        Concat(Quoted(file), ": expected a profile to write, found a folder"));
  }
  if (!std::filesystem::is_regular_file(file, ignored) ||
      std::filesystem::file_size(file, ignored) == 0) {
    return absl::OkStatus();
  }
  const auto profile = ReadProfile(file);
  if (profile.ok()) return absl::OkStatus();
  return absl::AlreadyExistsError(Concat("a file that is no profile is not overwritten: ",
                                         std::string(profile.status().message())));
}

struct SaveOptions {
  ProfileAndModel paths;
  ModelOptionsText model;
  ProfilingOptions profiling;
  bool hidden = false;
};

absl::Status Save(SaveOptions options) {
  MOESERVE_RETURN_IF_ERROR(CheckReplaceable(options.paths.file));
  options.profiling.routes = true;
  MOESERVE_ASSIGN_OR_RETURN(ProfiledTexts result, ProfileTexts(options.model, options.profiling));
  if (!options.hidden) result.profile.hidden.clear();
  return SaveProfile(options.paths.file, result.profile);
}

void AddSave(CLI::App& experts, Command& selected) {
  CLI::App* command =
      experts.add_subcommand("save", "Run texts through a model and write its expert profile");
  auto options = std::make_shared<SaveOptions>();
  options->paths.Add(*command, "Profile to write (required, or --output)",
                     "Checkpoint folder, also of Hugging Face's cache, or file (.gguf, "
                     "model.safetensors) (required)");
  command->add_option("-o,--output", options->paths.file, "Profile to write; the same as FILE");
  AddComputeOptions(*command, options->model);
  AddQuietOption(*command, options->model.quiet);
  AddProfilingOptions(*command, options->profiling);
  // What follows the file of --text is FILE or MODEL.
  command->get_option("--text")->allow_extra_args(false);
  command->add_flag("--hidden", options->hidden,
                    "Include the sampled router inputs in the profile");
  command->callback([options, &selected] {
    options->paths.Resolve(/*model_required=*/true);
    options->model.directory = options->paths.model;
    selected = [options] { return StatusToExit(Save(*options)); };
  });
}

// Adds files[1], files[2], ... and writes the sum to files[0].
absl::Status MergeFiles(const std::vector<std::string>& files) {
  MOESERVE_RETURN_IF_ERROR(CheckReplaceable(files[0]));
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
  auto output = std::make_shared<std::string>();
  command
      ->add_option("FILES", *files,
                   "Profile to write, then the profiles to add; with --output, these alone")
      ->required()
      ->expected(1, 10000);
  command->add_option("-o,--output", *output, "Profile to write");
  command->callback([files, output, &selected] {
    if (!output->empty()) files->insert(files->begin(), *output);
    if (files->size() < 2) throw CLI::RequiredError("A profile to add");
    selected = [files] { return StatusToExit(MergeFiles(*files)); };
  });
}

struct ShowOptions {
  // The model is a checkpoint whose tokenizer prints the tokens' texts; if there is none, token ids
  // are printed.
  ProfileAndModel paths;
  std::vector<std::string> ignored_keys;
  ProfileReportOptions report;
  bool json = false;
};

absl::Status ShowProfile(const ShowOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const ExpertProfile profile, ReadProfile(options.paths.file));
  std::shared_ptr<const Tokenizer> tokenizer;
  if (!options.paths.model.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(
        const Checkpoint checkpoint,
        LoadCheckpoint(options.paths.model, {.ignored_keys = options.ignored_keys}));
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
  options->paths.Add(*command, "Profile (required)",
                     "Checkpoint folder; its tokenizer shows tokens as text instead of ids");
  AddIgnoreConfig(*command, options->ignored_keys);
  AddReportOptions(*command, options->report);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &selected] {
    options->paths.Resolve(/*model_required=*/false);
    selected = [options] { return StatusToExit(ShowProfile(*options)); };
  });
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
  if (!std::filesystem::exists(path, ignored)) {
    return absl::NotFoundError(Concat(Printable(path, PATH_MAX),
                                      ": expected an expert profile or a model folder, found "
                                      "nothing; models are not downloaded"));
  }
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
  AddNumberOption(*command, "--top", options->top,
                  "Experts with the largest change of load to show per block", 0, 100000);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(PrintDiff(*options)); }; });
}

}  // namespace

void AddExpertsCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "experts", "Save, show, merge and compare expert profiles; place experts on ranks");
  command->require_subcommand(1);
  AddSave(*command, selected);
  AddShow(*command, selected);
  AddMerge(*command, selected);
  AddDiff(*command, selected);
  AddExpertsCurvesCommand(*command, selected);
  AddExpertsCompareCommand(*command, selected);
  AddExpertsPlaceCommand(*command, selected);
}

}  // namespace moeserve::server
