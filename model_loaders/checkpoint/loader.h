// Opens a checkpoint, which is a folder, a GGUF file or files of fairseq: configuration, weights,
// tokenizer, generation defaults.
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
#include "model_loaders/checkpoint/sentence_transformers.h"
#include "model_loaders/tokenizer/fairseq_dictionary.h"
#include "model_loaders/tokenizer/generation_config.h"
#include "model_loaders/tokenizer/tokenizer_config.h"

namespace moeserve {

// Identifies a checkpoint and its state, for caches that are kept between runs.
struct CheckpointIdentity {
  std::string place;  // absolute path of the folder or file
  // The text of config.json, if there is one, and name, size and times of every weight file. If
  // files are copied or touched, the state changes. A modification that keeps size and times is not
  // detected.
  std::string state;
  // With LoadOptions::content: a digest, in hexadecimal digits, of config.json and of names, types,
  // shapes and samples of all tensors. It is the same for copies at other places.
  std::string content = {};
};

struct Checkpoint {
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;  // memory-mapped; checked against `spec`
  int64_t weight_bytes = 0;               // bytes of all tensors in the files
  // The type of blocks with the most bytes, such as "Q4_K", if files store weights in blocks.
  std::string block_type;
  std::shared_ptr<const Tokenizer> tokenizer;  // null if the folder has no tokenizer
  TokenizerConfig tokenizer_config;            // empty without tokenizer_config.json
  GenerationDefaults generation;
  TextSettings text_settings;  // empty without files of sentence-transformers
  // CheckpointConfig::context_reason, which `warnings` also contains.
  std::string context_reason = {};
  // From config.json, generation_config.json and tokenizer_config.json.
  std::vector<TokenId> eos_token_ids;
  std::string directory_name;  // the default served name (ModelPath::name)
  CheckpointIdentity identity;
  // CheckpointConfig::decisions, then what the files contain that the model does not need: one
  // sentence each, for reports.
  std::vector<std::string> notes;
  // WeightFiles::warnings(), and what is computed otherwise than the configuration says.
  std::vector<std::string> warnings;
};

struct LoadOptions {
  bool require_tokenizer = true;  // false accepts a folder without tokenizer files
  ArchitectureList architectures = Architectures();  // the known families
  // Keys of the configuration (config.json, the options of fairseq, the metadata of a GGUF file)
  // that are read as if they were not there. RemoveKeys() explains paths of keys.
  std::vector<std::string> ignored_keys = {};
  // Whether ModelSpec::prediction is set if the files have such layers. Otherwise their tensors are
  // among those that the model does not need.
  bool predictions = false;
  // Whether CheckpointIdentity::content is set, for which a page of every tensor is read.
  bool content = false;
};

// Returns how a model uses the dictionaries of fairseq in its folder, if there are any.
DictionaryUse DictionaryUseOf(const ModelSpec& spec, const TokenizerConfig& config);

// `path` is a folder, also one of Hugging Face's cache, or a file (ResolveModelPath()). Validates
// all files of the folder, including names, shapes and types of the tensors, without reading tensor
// data. InvalidArgument or NotFound with the file, the key or tensor, the expected and the found
// value, and the configuration key that determines the expected value. Integers are checked only
// when `weights` returns them, or by CheckQuantizedData() (quantized_tensors.h). Safe for hostile
// files. Throws nothing.
Result<Checkpoint> LoadCheckpoint(const std::filesystem::path& path,
                                  const LoadOptions& options = {});

}  // namespace moeserve
