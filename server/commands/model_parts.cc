#include "server/commands/model_parts.h"

#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/weights/packed_cache.h"
#include "server/base/text_values.h"
#include "server/commands/ranks/rank_session.h"

namespace moeserve::server {
namespace {

// Checks that --draft-mtp can be what it says.
absl::Status CheckPredictions(const ModelOptionsText& options, int draft_tokens,
                              const ModelSpec& spec) {
  if (!options.draft_model.empty()) {
    return absl::InvalidArgumentError("--draft-mtp: expected no --draft-model beside it");
  }
  if (draft_tokens == 0) {
    return absl::InvalidArgumentError("--draft-mtp: expected --draft-tokens above 0, found 0");
  }
  if (spec.prediction != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--draft-mtp: expected a checkpoint with prediction layers that are read (\"Prediction "
      "layers\" "
      "in model_loaders/README.md), found none");
}

// What is known before weights are read.
struct OpenedModel {
  std::unique_ptr<Backend> backend;
  Checkpoint checkpoint;
  ModelOptions types;
  std::unique_ptr<ExpertFiles> expert_files;  // null: experts do not move
};

Result<std::unique_ptr<ExpertFiles>> OpenExpertFiles(const ModelOptionsText& options) {
  auto files = std::make_unique<ExpertFiles>();
  BackendOptions backend = options.backend();
  backend.threads = 1;
  MOESERVE_ASSIGN_OR_RETURN(files->backend, CreateBackend(backend));
  MOESERVE_ASSIGN_OR_RETURN(files->checkpoint,
                            LoadCheckpoint(options.directory, {.ignored_keys = options.ignored_keys,
                                                               .predictions = options.draft_mtp}));
  return files;
}

Result<OpenedModel> OpenModel(const ModelOptionsText& options, const EngineOptions& engine,
                              ProgressOutput progress, int64_t max_bytes) {
  OpenedModel out;
  MOESERVE_ASSIGN_OR_RETURN(out.backend, CreateBackend(options.backend()));
  MOESERVE_ASSIGN_OR_RETURN(
      out.checkpoint, LoadCheckpoint(options.directory, {.ignored_keys = options.ignored_keys,
                                                         .predictions = options.draft_mtp,
                                                         .content = options.session != nullptr}));
  PrintWarnings(out.checkpoint.warnings, progress);
  const ModelSpec& spec = out.checkpoint.spec;
  if (options.must_generate || !options.draft_model.empty() || options.draft_mtp) {
    MOESERVE_RETURN_IF_ERROR(CheckGenerating(spec));
  }
  if (options.draft_mtp) {
    MOESERVE_RETURN_IF_ERROR(CheckPredictions(options, engine.draft.max_tokens, spec));
  }
  // Weights that are loaded as they are stored take at least the bytes of the files. Those of
  // another type are checked when they are loaded.
  if (options.dtype == "auto") {
    MOESERVE_RETURN_IF_ERROR(CheckWeightBytes(out.checkpoint.weight_bytes, max_bytes));
  }
  MOESERVE_ASSIGN_OR_RETURN(out.types, ResolveDType(options, *out.checkpoint.weights));
  MOESERVE_ASSIGN_OR_RETURN(out.types.tiers, ResolveTiers(options, engine.kv_cache_bytes));
  const bool several = options.session != nullptr && options.session->ranks() > 1;
  if (several && options.ranks.rebalance_seconds > 0.0) {
    MOESERVE_ASSIGN_OR_RETURN(out.expert_files, OpenExpertFiles(options));
  }
  return out;
}

// Returns what ranks with equal results have in common.
StartFacts ModelFacts(const OpenedModel& opened) {
  const std::string device(opened.backend->name());
  // "cpu, avx2, 4 threads": the number of threads may differ.
  const std::string description(opened.backend->description());
  const size_t end = description.rfind(", ");
  const size_t begin = description.find(", ");
  std::string set = end == std::string::npos || begin == end
                        ? description
                        : description.substr(begin + 2, end - begin - 2);
  return {{"device", device},
          {std::string(kInstructionSetFact), std::move(set)},
          {"model files (a digest of config.json and of samples of all tensors)",
           opened.checkpoint.identity.content},
          {"compute type", std::string(Name(opened.types.compute))},
          {"weight type", std::string(Name(opened.types.quantization))}};
}

Result<std::unique_ptr<Model>> CreateModel(const ModelOptionsText& options, OpenedModel& opened,
                                           ProgressOutput progress) {
  Checkpoint& checkpoint = opened.checkpoint;
  std::unique_ptr<PackedCache> packed_cache;
  // Before anything can fail, because it needs all ranks.
  if (options.session != nullptr) {
    MOESERVE_RETURN_IF_ERROR(
        options.session->Place(checkpoint.spec, opened.types, std::move(opened.expert_files)));
  }
  MOESERVE_ASSIGN_OR_RETURN(packed_cache,
                            OpenPackedCache(options, checkpoint.identity, checkpoint.weight_bytes,
                                            *opened.backend, progress));
  // All ends count for structured output and for descriptions of the model, not only those that
  // config.json names.
  ModelSpec spec = checkpoint.spec;
  spec.eos_token_ids = checkpoint.eos_token_ids;
  MOESERVE_RETURN_IF_ERROR(ApplyPooling(options, spec));
  ReportedWeights weights(*checkpoint.weights, checkpoint.spec, checkpoint.weight_bytes, progress);
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<Model> model,
      Model::Create(spec, opened.types, weights, *opened.backend, packed_cache.get()));
  weights.Finish();
  if (packed_cache != nullptr) model->WriteInBackground(std::move(packed_cache));
  return model;
}

}  // namespace

absl::Status CheckWeightBytes(int64_t bytes, int64_t max_bytes) {
  if (bytes <= max_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      Concat("the weights need ", ShowBytes(bytes), ", expected at most ", ShowBytes(max_bytes)));
}

Result<ModelParts> LoadModelParts(const ModelOptionsText& options, const EngineOptions& engine,
                                  ProgressOutput progress, int64_t max_bytes) {
  RankSession* const session = options.session;
  Result<OpenedModel> opened = OpenModel(options, engine, progress, max_bytes);
  if (session != nullptr) {
    MOESERVE_RETURN_IF_ERROR(
        session->Agree(opened.status(), opened.ok() ? ModelFacts(*opened) : StartFacts()));
    MOESERVE_RETURN_IF_ERROR(session->ConnectDevices());
  }
  MOESERVE_RETURN_IF_ERROR(opened.status());
  Result<std::unique_ptr<Model>> model = CreateModel(options, *opened, progress);
  if (session != nullptr) {
    MOESERVE_RETURN_IF_ERROR(session->Agree(model.status()));
    session->BeginSteps();
  }
  MOESERVE_RETURN_IF_ERROR(model.status());
  return ModelParts{std::move(opened->backend), std::move(opened->checkpoint), opened->types,
                    *std::move(model)};
}

}  // namespace moeserve::server
