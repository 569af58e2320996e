// A model that is loaded, before an engine runs it.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "engine/model/model.h"
#include "kernels/backend.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/commands/model_options.h"
#include "server/commands/progress/load_progress.h"

namespace moeserve::server {

// The backend is declared first, so that it is destroyed after the model.
struct ModelParts {
  std::unique_ptr<Backend> backend;
  Checkpoint checkpoint;
  ModelOptions types;
  std::unique_ptr<Model> model;
};

// Loads a checkpoint. With ModelOptionsText::session, all ranks load it, each its part, and either
// all of them succeed or all return the same error. `draft_tokens` is DraftOptions::max_tokens.
// ResourceExhausted if the files have more than `max_bytes` of weights.
Result<ModelParts> LoadModelParts(const ModelOptionsText& options, int draft_tokens,
                                  ProgressOutput progress, int64_t max_bytes);

// Returns ResourceExhausted if the weights take more than `max_bytes`.
absl::Status CheckWeightBytes(int64_t bytes, int64_t max_bytes);

}  // namespace moeserve::server
