#include "model_loaders/checkpoint/gguf_checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/text/tokenizer/utf8.h"
#include "model_loaders/architectures/gguf/gguf_config.h"
#include "model_loaders/architectures/gguf/gguf_keys.h"
#include "model_loaders/checkpoint/checkpoint_identity.h"
#include "model_loaders/checkpoint/checkpoint_notes.h"
#include "model_loaders/checkpoint/folder_weights.h"
#include "model_loaders/checkpoint/tensor_check.h"
#include "model_loaders/files/file_kind.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/weight_files.h"
#include "model_loaders/tokenizer/gguf_tokenizer.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kGgufExtension = ".gguf";
constexpr std::string_view kMetadata = "metadata";
constexpr int kMaxParts = 10'000;  // limits open files and mappings
constexpr size_t kPartEnd = std::string_view("-00001-of-00002.gguf").size();

// Returns the end of the name of a part; parts count from 1.
std::string PartEnd(int part, int parts) {
  char text[64];
  std::snprintf(text, sizeof(text), "-%05d-of-%05d.gguf", part, parts);
  return text;
}

// Returns whether a name is that of a part of a split file other than the first.
bool IsLaterPart(const std::string& name) {
  int part = 0;
  int parts = 0;
  if (name.size() < kPartEnd) return false;
  const std::string end = name.substr(name.size() - kPartEnd);
  return std::sscanf(end.c_str(), "-%5d-of-%5d.gguf", &part, &parts) == 2 && part > 1 &&
         end == PartEnd(part, parts);
}

// Opens `path` and, if its metadata says so, the other parts of a split file.
Result<WeightFiles> OpenParts(const fs::path& path, std::shared_ptr<const GgufFile> first) {
  const std::string prefix = Concat(Printable(first->file_name()), ": ", kMetadata);
  Problems problems;
  GgufKeys keys(*first, "", &problems);
  const int parts = keys.Int("split.count", 1);
  const int number = keys.Int("split.no", 0);
  const int tensors = keys.Int("split.tensors.count", 0);
  if (problems.empty() && (parts < 0 || parts > kMaxParts)) {
    keys.Fault("split.count", Concat("at most ", kMaxParts), std::to_string(parts));
  }
  if (problems.empty() && parts > 1 && number != 0) {
    keys.Fault("split.no", "0 (the first of the files)", std::to_string(number));
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(prefix));
  std::string name = first->file_name();
  std::vector<std::shared_ptr<const TensorFile>> files = {std::move(first)};
  if (parts <= 1) return WeightFiles::Of(std::move(name), std::move(files));

  if (!name.ends_with(PartEnd(1, parts))) {
    return absl::InvalidArgumentError(Concat(Printable(name), ": expected a name that ends with ",
                                             PartEnd(1, parts), ", because split.count is ", parts,
                                             ", found another one"));
  }
  const std::string stem = name.substr(0, name.size() - PartEnd(1, parts).size());
  for (int part = 2; part <= parts; ++part) {
    const std::filesystem::path next = path.parent_path() / (stem + PartEnd(part, parts));
    MOESERVE_RETURN_IF_ERROR(CheckInsideModel(path.parent_path(), next));
    MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const GgufFile> file, GgufFile::Open(next));
    GgufKeys own(*file, "", &problems);
    const auto check = [&](const char* key, int expected) {
      const int found = own.Int(key);
      if (problems.empty() && found != expected) {
        own.Fault(key, std::to_string(expected), std::to_string(found));
      }
    };
    check("split.no", part - 1);
    check("split.count", parts);
    MOESERVE_RETURN_IF_ERROR(
        problems.ToStatus(Concat(Printable(file->file_name()), ": ", kMetadata)));
    files.push_back(std::move(file));
  }
  MOESERVE_ASSIGN_OR_RETURN(WeightFiles weights, WeightFiles::Of(name, std::move(files)));
  if (static_cast<int64_t>(weights.tensors().size()) != tensors) {
    return absl::InvalidArgumentError(Concat(prefix, ": split.tensors.count: expected ",
                                             weights.tensors().size(),
                                             " (the tensors of all files), found ", tensors));
  }
  return weights;
}

// Reads the sampling defaults, which are those that generation_config.json has in a folder.
Result<GenerationDefaults> ReadDefaults(const GgufFile& file) {
  Problems problems;
  GgufKeys keys(file, "", &problems);
  GenerationDefaults defaults;
  const auto real = [&](const char* key, double least, double most) {
    std::optional<double> value;
    if (keys.Find(key) == nullptr) return value;
    value = keys.Real(key);
    if (problems.empty() && !(*value >= least && *value <= most)) {
      keys.Fault(key, "a number in the range of this setting", ShowGguf(*file.Find(key)));
    }
    return value;
  };
  defaults.temperature = real("general.sampling.temp", 0.0, 2.0);
  defaults.top_p = real("general.sampling.top_p", 0.0, 1.0 + 1e-6);
  if (defaults.top_p.has_value()) defaults.top_p = std::min(*defaults.top_p, 1.0);
  defaults.min_p = real("general.sampling.min_p", 0.0, 1.0);
  defaults.repetition_penalty =
      real("general.sampling.penalty_repeat", std::numeric_limits<double>::min(),
           std::numeric_limits<float>::max());
  defaults.top_k = keys.OptionalInt("general.sampling.top_k");
  if (defaults.top_k.value_or(0) < 0) defaults.top_k = 0;  // off
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(Concat(Printable(file.file_name()), ": ", kMetadata)));
  return defaults;
}

// Returns the type of blocks that takes the most bytes; "" if no tensor is stored in blocks.
std::string LargestBlockType(const WeightFiles& files) {
  std::map<std::string_view, uint64_t> bytes;
  for (const WeightFiles::Location& tensor : files.tensors()) {
    if (tensor.entry->converted_from.empty()) continue;
    bytes[tensor.entry->converted_from] += tensor.file->StoredBytes(*tensor.entry);
  }
  const auto largest = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return largest == bytes.end() ? "" : std::string(largest->first);
}

absl::Status ReadTokenizer(const GgufFile& file, const LoadOptions& options,
                           Checkpoint* checkpoint) {
  const std::string name = Printable(file.file_name());
  MOESERVE_ASSIGN_OR_RETURN(checkpoint->tokenizer_config, ReadGgufTokenizerConfig(file));
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer, ReadGgufTokenizer(file));
  if (tokenizer == nullptr) {
    if (!options.require_tokenizer) return absl::OkStatus();
    return absl::NotFoundError(
        Concat(name, ": metadata: tokenizer.ggml.model: expected a tokenizer, found none"));
  }
  const int vocab_size = checkpoint->spec.vocab_size;
  // A model may have more embedding rows than its tokenizer has tokens (padding), but not fewer.
  if (tokenizer->vocab_size() > vocab_size) {
    return absl::InvalidArgumentError(
        Concat(name, ": metadata: tokenizer.ggml.tokens: expected token ids in [0, ",
               vocab_size - 1, "], found ids up to ", tokenizer->vocab_size() - 1,
               " (token_embd.weight has ", vocab_size, " rows)"));
  }
  checkpoint->tokenizer = std::move(tokenizer);
  return absl::OkStatus();
}

}  // namespace

Result<std::optional<fs::path>> FindGguf(const fs::path& path) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type != fs::file_type::directory) {
    const bool found = type != fs::file_type::not_found && path.extension() == kGgufExtension;
    return found ? std::optional(path) : std::nullopt;
  }
  if (WeightFiles::Exist(path)) return std::optional<fs::path>();
  std::vector<std::string> names;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.ends_with(kGgufExtension) && !IsLaterPart(name)) names.push_back(std::move(name));
  }
  if (names.empty()) return std::optional<fs::path>();
  if (names.size() == 1) return std::optional(path / names[0]);
  std::sort(names.begin(), names.end());
  return absl::InvalidArgumentError(Concat("expected one .gguf file in the folder, found ",
                                           names.size(), " of them (", Printable(names[0]), ", ",
                                           Printable(names[1]), names.size() > 2 ? ", ..." : "",
                                           "); name one of them instead of the folder"));
}

Result<Checkpoint> LoadGguf(const fs::path& path, const fs::path& place,
                            const LoadOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::shared_ptr<const GgufFile> file, GgufFile::Open(path));
  MOESERVE_ASSIGN_OR_RETURN(WeightFiles files, OpenParts(path, file));
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<const CheckpointConfig> config,
      ReadGgufConfig(*file, files, options.ignored_keys, options.predictions));
  for (const std::string& label : config->spec.head.labels) {
    if (IsValidUtf8(label)) continue;
    return absl::InvalidArgumentError(Concat(Printable(file->file_name()), ": ", kMetadata,
                                             ": classifier.output_labels: expected UTF-8, found ",
                                             Quoted(label)));
  }
  Checkpoint checkpoint;
  SetContextReason(*config, &checkpoint);
  checkpoint.spec = config->spec;
  checkpoint.eos_token_ids = config->spec.eos_token_ids;
  MOESERVE_ASSIGN_OR_RETURN(checkpoint.generation, ReadDefaults(*file));
  MOESERVE_RETURN_IF_ERROR(ReadTokenizer(*file, options, &checkpoint));
  std::vector<std::string> ignored;
  MOESERVE_RETURN_IF_ERROR(CheckTensors(*config, files, &ignored));
  checkpoint.notes = CheckpointNotes(*config, ignored, options);
  checkpoint.block_type = LargestBlockType(files);
  checkpoint.identity = Identify(place, IdentityText("", options), files);
  if (options.content) {
    MOESERVE_ASSIGN_OR_RETURN(checkpoint.identity.content,
                              ContentDigest(IdentityText("", options), files));
  }
  auto weights = std::make_unique<FolderWeights>(std::move(files), std::move(config));
  checkpoint.weight_bytes = weights->stored_bytes();
  checkpoint.weights = std::move(weights);
  return checkpoint;
}

}  // namespace moeserve
