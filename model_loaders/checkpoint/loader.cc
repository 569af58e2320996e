#include "model_loaders/checkpoint/loader.h"

#include <algorithm>
#include <climits>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/checkpoint_identity.h"
#include "model_loaders/checkpoint/checkpoint_notes.h"
#include "model_loaders/checkpoint/fairseq_checkpoint.h"
#include "model_loaders/checkpoint/fairseq_files.h"
#include "model_loaders/checkpoint/folder_weights.h"
#include "model_loaders/checkpoint/gguf_checkpoint.h"
#include "model_loaders/checkpoint/model_path.h"
#include "model_loaders/checkpoint/tensor_check.h"
#include "model_loaders/files/file_kind.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/tokenizer/generation_config.h"
#include "model_loaders/tokenizer/tokenizer_files.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr char kGenerationConfig[] = "generation_config.json";

absl::Status CheckDirectory(const fs::path& directory) {
  std::error_code error;
  const fs::file_status status = fs::status(directory, error);
  const std::string name = Printable(directory.string(), PATH_MAX);
  if (status.type() == fs::file_type::not_found) {
    return absl::NotFoundError(
        Concat(name,
               ": expected a model folder, a .gguf file or a .pt file, found nothing; models "
               "are not downloaded: give a path on this machine"));
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

// Names up to eight models in the folder, for an error: "", or "; its folders a, b are models".
std::string ModelsInside(const fs::path& directory) {
  constexpr size_t kMostNames = 8;
  constexpr int kMostEntries = 1000;
  std::vector<std::string> names;
  std::error_code error;
  int seen = 0;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (++seen > kMostEntries) break;
    if (Exists(entry->path() / kConfigFile)) names.push_back(entry->path().filename().string());
  }
  if (names.empty()) return "";
  std::sort(names.begin(), names.end());
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kMostNames); ++i) {
    list += Concat(i > 0 ? ", " : "", Printable(names[i], 64));
  }
  if (names.size() > kMostNames) list += ", ...";
  return Concat("; its folder", names.size() > 1 ? "s " : " ", list,
                names.size() > 1 ? " are models" : " is a model");
}

// `directory` is a folder. NotFound if it has no config.json.
absl::Status CheckConfigExists(const fs::path& directory) {
  std::error_code ignored;
  if (fs::symlink_status(directory / kConfigFile, ignored).type() != fs::file_type::not_found) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(Concat(Printable(directory.string(), PATH_MAX),
                                    ": expected a model folder, which has a ", kConfigFile,
                                    ", or a .gguf or .pt file, found a folder without them",
                                    ModelsInside(directory), "; models are not downloaded"));
}

// If the configuration says that the LM head is the embedding matrix but the files also store a
// head with other data, the head is that tensor, as in Hugging Face's library. Then replaces
// `config` and adds a sentence to `warnings`.
absl::Status LookAtTiedHead(const WeightFiles& files,
                            std::unique_ptr<const CheckpointConfig>* config,
                            std::vector<std::string>* warnings) {
  const ModelSpec& spec = (*config)->spec;
  if (!spec.tie_word_embeddings) return absl::OkStatus();
  std::unique_ptr<const CheckpointConfig> own = (*config)->WithOwnHead();
  if (own == nullptr) return absl::OkStatus();
  const std::vector<int64_t> shape = {spec.vocab_size, spec.hidden_size};
  const auto find = [&](const char* name) -> const WeightFiles::Location* {
    const std::optional<TensorPlace> place = own->Place({name, shape, ""});
    return place.has_value() ? files.Find(place->name) : nullptr;
  };
  const WeightFiles::Location* const head = find("head.weight");
  const WeightFiles::Location* const embedding = find("embed.weight");
  if (head == nullptr || embedding == nullptr) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(const bool same, SameData(*head, *embedding));
  if (same) return absl::OkStatus();
  warnings->push_back(Concat(
      (*config)->key_place, ": tie_word_embeddings is true, but the files have ",
      "another LM head than the embedding matrix: ", Quoted(head->entry->name), " is the LM head"));
  *config = std::move(own);
  return absl::OkStatus();
}

// Adds the end of text of tokenizer_config.json to those of the other files.
void AddEndOfText(int vocab_size, Checkpoint* checkpoint) {
  const std::optional<std::string>& token = checkpoint->tokenizer_config.eos_token;
  if (checkpoint->tokenizer == nullptr || !token.has_value()) return;
  const std::optional<TokenId> id = checkpoint->tokenizer->TokenToId(*token);
  if (!id.has_value() || *id >= vocab_size) return;
  std::vector<TokenId>& all = checkpoint->eos_token_ids;
  if (std::find(all.begin(), all.end(), *id) == all.end()) all.push_back(*id);
}

// Reads the texts of a folder and checks the weights. `place` is what was asked for: the folder or
// a file in it.
Result<Checkpoint> Assemble(const fs::path& directory, const fs::path& place,
                            std::string_view config_text,
                            std::unique_ptr<const CheckpointConfig> config,
                            Result<WeightFiles> files, const LoadOptions& options) {
  const int vocab_size = config->spec.vocab_size;
  GenerationConfig generation;
  if (Exists(directory / kGenerationConfig)) {
    MOESERVE_ASSIGN_OR_RETURN(const std::string text,
                              ReadTextFile(directory / kGenerationConfig, kMaxConfigFileBytes));
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
  MOESERVE_ASSIGN_OR_RETURN(TokenizerConfig tokenizer_config, LoadTokenizerConfig(directory));
  if (!config->source_language.empty() && !config->target_language.empty()) {
    tokenizer_config.src_lang = config->source_language;
    tokenizer_config.tgt_lang = config->target_language;
  }
  MOESERVE_ASSIGN_OR_RETURN(checkpoint.tokenizer,
                            LoadTokenizer(directory, vocab_size, options.require_tokenizer,
                                          DictionaryUseOf(config->spec, tokenizer_config)));
  checkpoint.tokenizer_config = std::move(tokenizer_config);
  AddEndOfText(vocab_size, &checkpoint);
  if (!files.ok()) return files.status();
  checkpoint.warnings = files->warnings();
  MOESERVE_RETURN_IF_ERROR(LookAtTiedHead(*files, &config, &checkpoint.warnings));
  SetContextReason(*config, &checkpoint);
  std::vector<std::string> ignored;
  MOESERVE_RETURN_IF_ERROR(CheckTensors(*config, *files, &ignored));
  checkpoint.notes = CheckpointNotes(*config, ignored, options);
  checkpoint.identity = Identify(place, IdentityText(config_text, options), *files);
  if (options.content) {
    MOESERVE_ASSIGN_OR_RETURN(checkpoint.identity.content,
                              ContentDigest(IdentityText(config_text, options), *files));
  }
  checkpoint.spec = config->spec;
  auto weights = std::make_unique<FolderWeights>(*std::move(files), std::move(config));
  checkpoint.weight_bytes = weights->stored_bytes();
  checkpoint.weights = std::move(weights);
  MOESERVE_ASSIGN_OR_RETURN(
      checkpoint.text_settings,
      ApplySentenceTransformers(directory, checkpoint.spec, checkpoint.weights));
  return checkpoint;
}

Result<Checkpoint> LoadFolder(const fs::path& path, const LoadOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<fs::path> gguf, FindGguf(path));
  if (gguf.has_value()) return LoadGguf(*gguf, path, options);
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<FairseqFiles> fairseq, FindFairseq(path));
  if (fairseq.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(FairseqCheckpoint opened,
                              OpenFairseq(*fairseq, options.ignored_keys));
    return Assemble(fairseq->folder, path, opened.config_text, std::move(opened.config),
                    std::move(opened.files), options);
  }
  MOESERVE_RETURN_IF_ERROR(CheckDirectory(path));
  MOESERVE_RETURN_IF_ERROR(CheckConfigExists(path));
  MOESERVE_ASSIGN_OR_RETURN(const std::string config_text,
                            ReadTextFile(path / kConfigFile, kMaxConfigFileBytes));
  Result<WeightFiles> files = WeightFiles::Open(path);
  StoredNames stored;
  stored.predictions = options.predictions;
  if (files.ok()) {
    for (const WeightFiles::Location& tensor : files->tensors()) {
      const TensorEntry& entry = *tensor.entry;
      stored.names.insert(entry.name);
      if (entry.shape.size() == 3) stored.stacks.emplace(entry.name, entry.shape);
    }
  }
  // An error in config.json is reported before one in the weights.
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<const CheckpointConfig> config,
      ReadConfig(config_text, stored, options.architectures, options.ignored_keys));
  return Assemble(path, path, config_text, std::move(config), std::move(files), options);
}

}  // namespace

DictionaryUse DictionaryUseOf(const ModelSpec& spec, const TokenizerConfig& config) {
  DictionaryUse use;
  if (spec.kind == ModelKind::kEncoder) use.texts = DictionaryUse::Texts::kMasked;
  if (spec.encoder != nullptr) use.texts = DictionaryUse::Texts::kTranslated;
  use.source = config.src_lang.value_or("");
  use.target = config.tgt_lang.value_or("");
  use.source_limit = PromptVocabulary(spec);
  return use;
}

Result<Checkpoint> LoadCheckpoint(const fs::path& path, const LoadOptions& options) {
  // Code of this project does not throw; the standard library throws when memory runs out.
  try {
    MOESERVE_ASSIGN_OR_RETURN(const ModelPath model, ResolveModelPath(path));
    MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint, LoadFolder(model.path, options));
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
