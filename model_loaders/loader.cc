#include "model_loaders/loader.h"

#include <algorithm>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/message.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint_identity.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/folder_weights.h"
#include "model_loaders/gguf_checkpoint.h"
#include "model_loaders/model_path.h"
#include "model_loaders/tensor_check.h"
#include "model_loaders/tokenizer/generation_config.h"
#include "model_loaders/tokenizer/tokenizer_files.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr char kGeneration[] = "generation_config.json";
constexpr uint64_t kMaxConfigBytes = uint64_t{64} << 20;

absl::Status CheckDirectory(const fs::path& directory) {
  std::error_code error;
  const fs::file_status status = fs::status(directory, error);
  const std::string name = Printable(directory.string(), 300);
  if (status.type() == fs::file_type::not_found) {
    return absl::NotFoundError(
        Concat(name, ": expected a model folder or a .gguf file, found nothing"));
  }
  if (error) {
    return absl::UnavailableError(Concat(name, ": cannot open: ", error.message()));
  }
  if (!fs::is_directory(status)) {
    return absl::InvalidArgumentError(
        Concat(name, ": expected a model folder or a .gguf file, found another file"));
  }
  return absl::OkStatus();
}

Result<Checkpoint> Load(const fs::path& directory, const LoadOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<fs::path> gguf, FindGguf(directory));
  if (gguf.has_value()) return LoadGguf(*gguf, directory, options);
  MOESERVE_RETURN_IF_ERROR(CheckDirectory(directory));
  MOESERVE_ASSIGN_OR_RETURN(const std::string config_text,
                            ReadTextFile(directory / kConfigFile, kMaxConfigBytes));
  Result<WeightFiles> files = WeightFiles::Open(directory);
  StoredNames stored;
  if (files.ok()) {
    for (const WeightFiles::Location& tensor : files->tensors()) stored.insert(tensor.entry->name);
  }
  // An error in config.json is reported before one in the weights.
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<const CheckpointConfig> config,
                            ReadConfig(config_text, stored, options.architectures));
  const int vocab_size = config->spec.vocab_size;

  GenerationConfig generation;
  if (Exists(directory / kGeneration)) {
    MOESERVE_ASSIGN_OR_RETURN(const std::string text,
                              ReadTextFile(directory / kGeneration, kMaxConfigBytes));
    MOESERVE_ASSIGN_OR_RETURN(generation, ParseGenerationConfig(text, vocab_size));
  }

  Checkpoint checkpoint;
  checkpoint.generation = generation.defaults;
  for (const auto& ids : {config->spec.eos_token_ids, generation.eos_token_ids}) {
    for (const TokenId id : ids) {
      std::vector<TokenId>& all = checkpoint.eos_token_ids;
      if (std::find(all.begin(), all.end(), id) == all.end()) all.push_back(id);
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(checkpoint.tokenizer,
                            LoadTokenizer(directory, vocab_size, options.require_tokenizer));
  MOESERVE_ASSIGN_OR_RETURN(checkpoint.tokenizer_config, LoadTokenizerConfig(directory));
  if (!files.ok()) return files.status();
  MOESERVE_RETURN_IF_ERROR(CheckTensors(*config, *files));
  checkpoint.identity = Identify(directory, config_text, *files);
  checkpoint.spec = config->spec;
  auto weights = std::make_unique<FolderWeights>(*std::move(files), std::move(config));
  checkpoint.weight_bytes = weights->stored_bytes();
  checkpoint.weights = std::move(weights);
  return checkpoint;
}

}  // namespace

Result<Checkpoint> LoadCheckpoint(const fs::path& path, const LoadOptions& options) {
  // Code of this project does not throw; the standard library throws when memory runs out.
  try {
    MOESERVE_ASSIGN_OR_RETURN(const ModelPath model, ResolveModelPath(path));
    MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Load(model.path, options));
    checkpoint.directory_name = model.name;
    return checkpoint;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory to read the checkpoint folder");
  } catch (const std::exception& error) {
    return absl::InternalError(Concat("reading the checkpoint folder: ", Printable(error.what())));
  }
}

}  // namespace moeserve
