#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "engine/weights/place_experts.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/profiles/placement_file.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/report_options.h"
#include "server/commands/score/profile_texts.h"
#include "server/reports/placement_report.h"

namespace moeserve::server {
namespace {

struct PlaceArguments {
  std::string profile;
  std::string model;
  std::vector<std::string> ignored_keys;
  int ranks = 0;
  int copies_percent = 0;
  std::string output;
  bool json = false;
};

// Refuses to replace a file that is no placement.
absl::Status CheckOldPlacement(const std::string& file) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored) || std::filesystem::is_other(file, ignored)) {
    return absl::OkStatus();
  }
  MOESERVE_ASSIGN_OR_RETURN(const auto old, MappedFile::Open(file));
  const auto json = ParseStrictJson(old->bytes());
  if (old->bytes().empty() || (json.ok() && json->is_object() && json->contains("model_digest"))) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(
      Concat("a file that is no placement is not overwritten: ", Quoted(file)));
}

absl::Status Place(const PlaceArguments& arguments) {
  MOESERVE_ASSIGN_OR_RETURN(const ExpertProfile profile, ReadProfile(arguments.profile));
  MOESERVE_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                            LoadCheckpoint(arguments.model, {.require_tokenizer = false,
                                                             .ignored_keys = arguments.ignored_keys,
                                                             .predictions = true}));
  PlaceOptions options{.ranks = arguments.ranks, .copies_percent = arguments.copies_percent};
  const auto loads = LoadsOf(profile.stats, checkpoint.spec);
  if (!loads.ok()) return Prefixed(Concat(Quoted(arguments.profile), ": "), loads.status());
  options.loads = *loads;
  const ExpertPlacement placement = PlaceExperts(checkpoint.spec, options);
  const Quantization stored = checkpoint.weights->StoredQuantization();
  const ExpertSizes bytes =
      ExpertBytes(checkpoint.spec, stored, checkpoint.weights->DominantDType());
  PlacementReport report = ReportPlacement(placement, checkpoint.spec, profile.stats, bytes);
  report.copies_percent = arguments.copies_percent;
  if (!arguments.output.empty()) {
    MOESERVE_RETURN_IF_ERROR(CheckOldPlacement(arguments.output));
    MOESERVE_RETURN_IF_ERROR(
        SavePlacement(arguments.output, placement, checkpoint.spec, checkpoint.directory_name));
  }
  if (arguments.json) {
    PrintJson(PlacementJson(report));
  } else {
    std::fputs(PlacementTable(report).c_str(), stdout);
  }
  return absl::OkStatus();
}

}  // namespace

void AddExpertsPlaceCommand(CLI::App& experts, Command& selected) {
  CLI::App* command = experts.add_subcommand(
      "place",
      "Place the experts of a model on ranks by the loads of a profile, print the expected "
      "imbalance of each block and the bytes of each rank, and write the placement");
  auto options = std::make_shared<PlaceArguments>();
  command->add_option("PROFILE", options->profile, "Profile of the model")->required();
  command->add_option("-m,--model", options->model, "Checkpoint folder or file")->required();
  AddIgnoreConfig(*command, options->ignored_keys);
  command->add_option("--ranks", options->ranks, "Number of ranks")
      ->check(NumberRange(1, kMaxRanks))
      ->required();
  AddNumberOption(*command, "--expert-copies", options->copies_percent,
                  "Copies of the experts with the most load per copy, in percent of the experts of "
                  "a block; they take memory, and balance mainly steps of few rows",
                  0, kMostCopiesPercent);
  command->add_option("-o,--output", options->output,
                      "Placement to write (JSON); without it, nothing is written");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(Place(*options)); }; });
}

}  // namespace moeserve::server
