#include "model_loaders/write/convert_folder.h"

#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/native/describe.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/checkpoint/gguf_checkpoint.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/model_path.h"
#include "model_loaders/tokenizer/tokenizer_files.h"
#include "model_loaders/write/new_folder.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

// Returns the folder with the source's text files; nullopt if its one file contains all of them.
Result<std::optional<fs::path>> FolderOfTexts(const fs::path& source) {
  MOESERVE_ASSIGN_OR_RETURN(const ModelPath model, ResolveModelPath(source));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<fs::path> gguf, FindGguf(model.path));
  if (gguf.has_value()) return std::optional<fs::path>();
  std::error_code error;
  if (fs::is_directory(model.path, error)) return std::optional(model.path);
  return std::optional(fs::absolute(model.path, error).parent_path());
}

void Add(std::vector<std::string>& all, std::vector<std::string> more) {
  for (std::string& name : more) all.push_back(std::move(name));
}

bool IsGiven(const GivenTokenizer& given) {
  return !given.tokenizer.empty() || !given.dictionary.empty();
}

// Writes everything that concerns the tokenizer and sets the members of `result` about it.
absl::Status WriteTexts(const Checkpoint& checkpoint, const std::optional<fs::path>& texts,
                        const GivenTokenizer& given, const fs::path& to, ConvertedFolder* result) {
  const bool is_given = IsGiven(given);
  std::vector<std::string>& names = result->other_files;
  if (is_given) {
    MOESERVE_ASSIGN_OR_RETURN(names, CopyGivenTokenizer(given, to));
  } else if (texts.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(names, CopyTokenizer(*texts, to));
  }
  if (texts.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(FileNames copied, CopyTextSettings(*texts, to));
    Add(names, std::move(copied));
    MOESERVE_ASSIGN_OR_RETURN(FileNames languages, WriteLanguages(checkpoint.tokenizer_config, to));
    Add(names, std::move(languages));
  } else {
    MOESERVE_ASSIGN_OR_RETURN(FileNames written, WriteTextSettings(checkpoint, to));
    Add(names, std::move(written));
  }
  result->has_tokenizer = is_given || (texts.has_value() && checkpoint.tokenizer != nullptr);
  result->tokenizer_stays = !result->has_tokenizer && checkpoint.tokenizer != nullptr;
  // A tokenizer that does not fit the model is found here, before the weights are written.
  return LoadTokenizer(to, checkpoint.spec.vocab_size, result->has_tokenizer,
                       DictionaryUseOf(checkpoint.spec, checkpoint.tokenizer_config))
      .status();
}

auto Fields(const GenerationDefaults& d) {
  return std::tie(d.temperature, d.top_p, d.top_k, d.min_p, d.repetition_penalty);
}

// Returns Internal if the new folder is not read as the model that it was written from.
// `copied_tokenizer`: the new folder has the tokenizer files of the source.
absl::Status CheckEqual(const Checkpoint& source, const Checkpoint& written,
                        bool copied_tokenizer) {
  const auto fault = [](std::string_view what) {
    return absl::InternalError(
        Concat("the new folder has other ", what, " than the source, so it was not kept"));
  };
  if (NativeConfigJson(source.spec) != NativeConfigJson(written.spec)) return fault("settings");
  // The end of text that tokenizer_config.json names has the id of the tokenizer.
  const bool same_ids = copied_tokenizer || written.tokenizer == nullptr;
  if (same_ids && source.eos_token_ids != written.eos_token_ids) return fault("end-of-text ids");
  if (Fields(source.generation) != Fields(written.generation)) {
    return fault("generation defaults");
  }
  if (copied_tokenizer && source.tokenizer->vocab_size() != written.tokenizer->vocab_size()) {
    return fault("tokens");
  }
  return absl::OkStatus();
}

Result<ConvertedFolder> Convert(const fs::path& source, const fs::path& destination,
                                const ConvertOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                            LoadCheckpoint(source, {.require_tokenizer = false,
                                                    .ignored_keys = options.ignored_keys,
                                                    .predictions = true}));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<fs::path> texts, FolderOfTexts(source));
  ConvertedFolder result;
  result.architecture = DescribeModel(checkpoint.spec);
  result.notes = checkpoint.notes;
  result.notes.insert(result.notes.end(), checkpoint.warnings.begin(), checkpoint.warnings.end());
  result.source_bytes = checkpoint.weight_bytes;
  result.source_dtype = checkpoint.weights->DominantDType();
  const Quantization quantization = options.type == ConvertType::kStored
                                        ? checkpoint.weights->StoredQuantization()
                                        : Quantization::kNone;

  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<UnfinishedFolder> folder,
                            UnfinishedFolder::Create(destination));
  const fs::path& to = folder->path();
  MOESERVE_RETURN_IF_ERROR(WriteNewFile(
      to / kConfigFile, NativeConfigJson(checkpoint.spec, quantization).dump(2) + "\n"));
  MOESERVE_RETURN_IF_ERROR(WriteTexts(checkpoint, texts, options.tokenizer, to, &result));
  auto weights = WriteWeights(checkpoint.spec, *checkpoint.weights, options.type,
                              options.shard_bytes, to, options.progress);
  MOESERVE_RETURN_IF_ERROR(checkpoint.weights->Check());  // explains errors of tensors
  MOESERVE_ASSIGN_OR_RETURN(result.weights, std::move(weights));

  const Result<Checkpoint> written =
      LoadCheckpoint(to, {.require_tokenizer = result.has_tokenizer, .predictions = true});
  if (!written.ok()) return Prefixed("reading the new folder back: ", written.status());
  MOESERVE_RETURN_IF_ERROR(
      CheckEqual(checkpoint, *written, result.has_tokenizer && !IsGiven(options.tokenizer)));
  result.dtype = written->weights->DominantDType();
  MOESERVE_RETURN_IF_ERROR(folder->Finish());
  return result;
}

}  // namespace

Result<ConvertedFolder> ConvertFolder(const fs::path& source, const fs::path& destination,
                                      const ConvertOptions& options) {
  // Code of this project does not throw; the standard library throws when memory runs out.
  try {
    return Convert(source, destination, options);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory to write the folder");
  } catch (const std::exception& error) {
    return absl::InternalError(Concat("writing the folder: ", Printable(error.what())));
  }
}

}  // namespace moeserve
