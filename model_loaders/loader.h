// Opens a checkpoint folder: configuration, weights, tokenizer, generation defaults.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/tokenizer/tokenizer_json.h"

namespace moeserve {

// generation_config.json: defaults that replace the API's own.
struct GenerationDefaults {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
};

// Identifies a checkpoint and its state, for caches that outlive a run.
struct CheckpointIdentity {
  std::string place;  // absolute path of the folder
  // The text of config.json, and name, size and times of every weight file. Copied or touched files
  // are another state. A change that keeps all of these is not detected.
  std::string state;
};

struct Checkpoint {
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;       // memory-mapped; checked against the spec
  int64_t weight_bytes = 0;                    // of all tensors as stored
  std::shared_ptr<const Tokenizer> tokenizer;  // null: the folder has none
  TokenizerConfig tokenizer_config;            // empty without tokenizer_config.json
  GenerationDefaults generation;
  std::vector<TokenId> eos_token_ids;  // of config.json and generation_config.json together
  std::string directory_name;          // last path component: the default served name
  CheckpointIdentity identity;
};

struct LoadOptions {
  bool require_tokenizer = true;  // false: accepts a folder without tokenizer files
  ArchitectureList architectures = Architectures();  // the families to choose from
};

// Validates all files of the folder, names, shapes and types of tensors included, without reading
// tensor data. InvalidArgument or NotFound with file, key or tensor, expected, found, and the
// configuration key it follows from. Integers are checked when `weights` returns them, or by
// CheckQuantizedData() (quantized_tensors.h). Safe with hostile files. Throws nothing.
Result<Checkpoint> LoadCheckpoint(const std::filesystem::path& directory,
                                  const LoadOptions& options = {});

}  // namespace moeserve
