#include "model_loaders/loader.h"

#include <algorithm>
#include <climits>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/message.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint_identity.h"
#include "model_loaders/fairseq_checkpoint.h"
#include "model_loaders/fairseq_files.h"
#include "model_loaders/files/file_kind.h"
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
  const std::string name = Printable(directory.string(), PATH_MAX);
  if (status.type() == fs::file_type::not_found) {
    return absl::NotFoundError(
        Concat(name, ": expected a model folder, a .gguf file or a .pt file, found nothing"));
  }
  if (error) {
    return absl::UnavailableError(Concat(name, ": cannot open: ", error.message()));
  }
  if (!fs::is_directory(status)) {
    // A more precise answer for archives and the like.
    MOESERVE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(directory));
    MOESERVE_RETURN_IF_ERROR(CheckFileKind(name, file->bytes().substr(0, kFileKindBytes)));
    return absl::InvalidArgumentError(
        Concat(name, ": expected a model folder, a .gguf file or a .pt file, found another file"));
  }
  return absl::OkStatus();
}

// Returns Checkpoint::notes. `ignored` are the names of stored tensors that the model does not
// need.
std::vector<std::string> NotesOf(const CheckpointConfig& config,
                                 const std::vector<std::string>& ignored) {
  std::vector<std::string> notes = config.decisions;
  if (!config.ignored_keys.empty()) {
    std::string keys;
    for (const std::string& key : config.ignored_keys) {
      keys.append(Concat(keys.empty() ? "" : ", ", key));
    }
    notes.push_back(
        Concat(config.key_place, ": these keys do not change the model's answers: ", keys));
  }
  for (const std::string& names : GroupedNames(ignored)) {
    notes.push_back(Concat("tensors that the model does not need: ", names));
  }
  return notes;
}

// Reads the texts of a folder and checks the weights. `place` is what was asked for: the folder or
// a file in it.
Result<Checkpoint> Assemble(const fs::path& directory, const fs::path& place,
                            std::string_view config_text,
                            std::unique_ptr<const CheckpointConfig> config,
                            Result<WeightFiles> files, const LoadOptions& options) {
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
  std::vector<std::string> ignored;
  MOESERVE_RETURN_IF_ERROR(CheckTensors(*config, *files, &ignored));
  checkpoint.notes = NotesOf(*config, ignored);
  checkpoint.warnings = files->warnings();
  checkpoint.identity = Identify(place, config_text, *files);
  checkpoint.spec = config->spec;
  auto weights = std::make_unique<FolderWeights>(*std::move(files), std::move(config));
  checkpoint.weight_bytes = weights->stored_bytes();
  checkpoint.weights = std::move(weights);
  return checkpoint;
}

Result<Checkpoint> Load(const fs::path& path, const LoadOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<fs::path> gguf, FindGguf(path));
  if (gguf.has_value()) return LoadGguf(*gguf, path, options);
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<FairseqFiles> fairseq, FindFairseq(path));
  if (fairseq.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(FairseqCheckpoint opened, OpenFairseq(*fairseq));
    return Assemble(fairseq->folder, path, opened.config_text, std::move(opened.config),
                    std::move(opened.files), options);
  }
  MOESERVE_RETURN_IF_ERROR(CheckDirectory(path));
  MOESERVE_ASSIGN_OR_RETURN(const std::string config_text,
                            ReadTextFile(path / kConfigFile, kMaxConfigBytes));
  Result<WeightFiles> files = WeightFiles::Open(path);
  StoredNames stored;
  if (files.ok()) {
    for (const WeightFiles::Location& tensor : files->tensors()) stored.insert(tensor.entry->name);
  }
  // An error in config.json is reported before one in the weights.
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<const CheckpointConfig> config,
                            ReadConfig(config_text, stored, options.architectures));
  return Assemble(path, path, config_text, std::move(config), std::move(files), options);
}

}  // namespace

Result<Checkpoint> LoadCheckpoint(const fs::path& path, const LoadOptions& options) {
  // Code of this project does not throw; the standard library throws when memory runs out.
  try {
    MOESERVE_ASSIGN_OR_RETURN(const ModelPath model, ResolveModelPath(path));
    MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Load(model.path, options));
    MOESERVE_RETURN_IF_ERROR(checkpoint.weights->Check());
    checkpoint.directory_name = model.name;
    return checkpoint;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory to read the checkpoint folder");
  } catch (const std::exception& error) {
    return absl::InternalError(Concat("reading the checkpoint folder: ", Printable(error.what())));
  }
}

}  // namespace moeserve
