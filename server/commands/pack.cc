#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/model/model.h"
#include "engine/weights/packed_cache.h"
#include "kernels/registry.h"
#include "server/base/text_values.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/progress/load_progress.h"

namespace moeserve::server {
namespace {

struct PackArguments {
  ModelOptionsText model;
  std::string folder;
};

absl::Status Pack(const PackArguments& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                            CreateBackend(options.model.backend()));
  MOESERVE_ASSIGN_OR_RETURN(
      Checkpoint checkpoint,
      LoadCheckpoint(options.model.directory, {.require_tokenizer = false,
                                               .ignored_keys = options.model.ignored_keys,
                                               .predictions = options.model.draft_mtp}));
  PrintWarnings(checkpoint.warnings);
  MOESERVE_ASSIGN_OR_RETURN(const ModelOptions types,
                            ResolveDType(options.model, *checkpoint.weights));
  // A model can be loaded without the files, so the cache only warns. Here they are the result.
  std::string problem;
  PackedCacheOptions packed;
  packed.folder = options.folder;
  packed.place = checkpoint.identity.place;
  packed.state = checkpoint.identity.state;
  packed.warn = [&problem](const std::string& message) {
    if (problem.empty()) problem = message;
  };
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<PackedCache> cache,
                            PackedCache::Open(std::move(packed), *backend));
  ReportedWeights weights(*checkpoint.weights, checkpoint.spec, checkpoint.weight_bytes,
                          options.model.progress(), "packing");
  ModelSpec spec = checkpoint.spec;
  spec.eos_token_ids = checkpoint.eos_token_ids;
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                            Model::Create(spec, types, weights, *backend, cache.get()));
  weights.Finish();
  if (!problem.empty()) return absl::UnavailableError(problem);
  std::printf("%s: %d files written, %d found; the model's weights take %s\n",
              Printable(options.folder, 300).c_str(), cache->stored(), cache->found(),
              ShowBytes(model->weight_bytes()).c_str());
  return absl::OkStatus();
}

}  // namespace

void AddPackCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "pack", "Write the weights in the CPU backend's layout to a folder, for --packed-cache");
  auto options = std::make_shared<PackArguments>();
  AddModelDirectory(*command, options->model);
  command->add_option("FOLDER", options->folder, "Folder for the files; created if missing")
      ->required();
  AddDTypeOption(*command, options->model);
  AddIgnoreConfig(*command, options->model.ignored_keys);
  AddQuietOption(*command, options->model.quiet);
  command->add_flag("--draft-mtp", options->model.draft_mtp,
                    "Also pack the checkpoint's own prediction layers");
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(Pack(*options)); }; });
}

}  // namespace moeserve::server
