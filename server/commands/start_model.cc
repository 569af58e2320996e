#include "server/commands/start_model.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "engine/model/model.h"
#include "engine/validate_request.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/routing.h"
#include "server/base/text_values.h"
#include "server/commands/model_parts.h"
#include "server/commands/ranks/rank_session.h"

namespace moeserve::server {
namespace {

// Loads the model of --draft-model; returns null without that option. Its tokens must be those of
// `tokenizer`.
Result<std::unique_ptr<Model>> LoadDraftModel(const ModelOptionsText& options, int draft_tokens,
                                              const Tokenizer& tokenizer, Backend& backend,
                                              ProgressOutput progress) {
  if (options.draft_model.empty()) return std::unique_ptr<Model>();
  const auto load = [&]() -> Result<std::unique_ptr<Model>> {
    MOESERVE_ASSIGN_OR_RETURN(
        Checkpoint checkpoint,
        LoadCheckpoint(options.draft_model, {.ignored_keys = options.ignored_keys}));
    PrintWarnings(checkpoint.warnings, progress);
    if (!Computes(checkpoint.spec, nullptr)) {
      return absl::InvalidArgumentError(
          Concat("expected a model that generates, found one for ", TasksOf(checkpoint.spec)));
    }
    const int tokens = std::max(tokenizer.vocab_size(), checkpoint.tokenizer->vocab_size());
    for (TokenId id = 0; id < tokens; ++id) {
      const std::string_view expected = tokenizer.TokenString(id);
      const std::string_view found = checkpoint.tokenizer->TokenString(id);
      if (expected == found) continue;
      return absl::InvalidArgumentError(
          Concat("expected the tokenizer of the model, in which token ", id, " is ",
                 Quoted(expected), ", found ", Quoted(found)));
    }
    MOESERVE_ASSIGN_OR_RETURN(const ModelOptions types, ResolveDType(options, *checkpoint.weights));
    ReportedWeights weights(*checkpoint.weights, checkpoint.spec, checkpoint.weight_bytes, progress,
                            "loading the draft model");
    auto model = Model::Create(checkpoint.spec, types, weights, backend);
    if (model.ok()) weights.Finish();
    return model;
  };
  if (draft_tokens == 0) {
    return absl::InvalidArgumentError("--draft-model: expected --draft-tokens above 0, found 0");
  }
  auto model = load();
  if (!model.ok()) return Prefixed("--draft-model: ", model.status());
  return model;
}

// Returns LoadedWeights::temperatures.
Result<std::vector<std::optional<double>>> RouterTemperatures(const ModelSpec& spec,
                                                              WeightSource& weights) {
  std::vector<std::optional<double>> out;
  for (const BlockSpec& block : spec.blocks) {
    if (block.routing() == nullptr) continue;
    out.emplace_back();
    const ScoreSpec& score = block.routing()->score;
    if (score.kind != ScoreKind::kCosine || score.temperature == TemperatureKind::kNone) continue;
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor stored,
                              weights.Get(block.name() + ".router.temperature", {1}));
    const double resolved = ResolvedTemperature(score.temperature, ElementAsF32(stored, 0));
    out.back() = score.temperature == TemperatureKind::kDivide ? resolved : 1.0 / resolved;
  }
  return out;
}

}  // namespace

Result<RunningModel> StartModel(
    const ModelOptionsText& options, const EngineOptions& engine,
    const std::function<absl::Status(const LoadedWeights&, EngineOptions&)>& adjust,
    std::optional<ProgressOutput> output, int64_t max_bytes) {
  const ProgressOutput progress = output.value_or(options.progress());
  RunningModel out;  // the first variable, because its backend must outlive the models
  MOESERVE_ASSIGN_OR_RETURN(ModelParts parts, LoadModelParts(options, engine, progress, max_bytes));
  Checkpoint& checkpoint = parts.checkpoint;
  std::unique_ptr<Model> model = std::move(parts.model);
  const ModelOptions& model_options = parts.types;
  out.backend = std::move(parts.backend);
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Model> draft_model,
                            LoadDraftModel(options, engine.draft.max_tokens, *checkpoint.tokenizer,
                                           *out.backend, progress));
  // weight_bytes() includes the draft model.
  MOESERVE_RETURN_IF_ERROR(CheckWeightBytes(model->weight_bytes(), max_bytes));
  out.defaults = checkpoint.generation;
  out.types = model_options;
  out.tokenizer_config = std::move(checkpoint.tokenizer_config);
  out.text_settings = std::move(checkpoint.text_settings);
  out.directory_name = checkpoint.directory_name;
  std::string compute(Name(model_options.compute));
  const Quantization stored = checkpoint.weights->StoredQuantization();
  if (model_options.quantization != Quantization::kNone) {
    compute += Concat(" with ", Name(model_options.quantization));
  }
  // Report a difference from the stored type: either the weights are rounded a second time, or they
  // are widened and take more memory.
  if (stored != Quantization::kNone && stored != model_options.quantization) {
    compute += Concat(" (stored as ", Name(stored), ')');
  }
  out.description = Concat("backend ", out.backend->description(), ", compute ", compute,
                           ", weights ", ShowBytes(model->weight_bytes()));
  EngineOptions adjusted = engine;
  adjusted.try_model = true;
  adjusted.context_reason = checkpoint.context_reason;
  if (max_bytes != std::numeric_limits<int64_t>::max()) {
    adjusted.max_kv_cache_bytes = std::max<int64_t>(max_bytes - model->weight_bytes(), 1);
  }
  MOESERVE_ASSIGN_OR_RETURN(adjusted.kv_cache_type,
                            ResolveKvCacheType(options.kv_cache_dtype, out.types.compute));
  if (adjust) {
    MOESERVE_ASSIGN_OR_RETURN(auto temperatures,
                              RouterTemperatures(model->spec(), *checkpoint.weights));
    std::vector<std::optional<double>> source;
    if (const ModelSpec* encoder = model->spec().encoder.get(); encoder != nullptr) {
      MOESERVE_ASSIGN_OR_RETURN(source, RouterTemperatures(*encoder, *checkpoint.weights));
    }
    MOESERVE_RETURN_IF_ERROR(
        adjust({model->spec(), std::move(temperatures), std::move(source)}, adjusted));
  }
  MOESERVE_ASSIGN_OR_RETURN(
      out.engine, Engine::Create(adjusted, std::move(model), checkpoint.tokenizer,
                                 std::move(checkpoint.eos_token_ids), std::move(draft_model)));
  if (options.session != nullptr) {
    const std::string warning = options.session->Lead(out.engine);
    if (!warning.empty()) PrintWarnings({warning}, progress);
  }
  PrintWarnings(out.backend->warnings(), progress);
  return out;
}

}  // namespace moeserve::server
