#include "model_loaders/checkpoint/fairseq_checkpoint.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/fairseq/fairseq_config.h"
#include "model_loaders/architectures/fairseq/options.h"
#include "model_loaders/files/file_kind.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/files/torch/torch_file.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kPrefix = "decoder.";
constexpr std::string_view kFairseqExperts = "experts.";

// The components of names that wrappers of distributed training add.
constexpr std::string_view kWrappers[] = {"module", "_fsdp_wrapped_module", "_fpw_module"};

std::string WithoutWrappers(std::string_view name) {
  std::string out;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    begin = end + 1;
    if (std::find(std::begin(kWrappers), std::end(kWrappers), part) != std::end(kWrappers)) {
      continue;
    }
    if (!out.empty()) out.push_back('.');
    out.append(part);
  }
  return out;
}

// Where the number of an expert is in a tensor's name.
struct ExpertNumber {
  size_t begin = 0;
  size_t digits = 0;
  int number = 0;
};

std::optional<ExpertNumber> FindExpert(std::string_view name) {
  const size_t at = name.find(Concat('.', kFairseqExperts));
  if (at == std::string_view::npos) return std::nullopt;
  ExpertNumber found{.begin = at + 1 + kFairseqExperts.size(), .digits = 0, .number = 0};
  const char* const first = name.data() + found.begin;
  const auto [end, error] = std::from_chars(first, name.data() + name.size(), found.number);
  found.digits = static_cast<size_t>(end - first);
  if (error != std::errc() || found.digits == 0 || end == name.data() + name.size() ||
      *end != '.' || found.number < 0 || (found.digits > 1 && *first == '0')) {
    return std::nullopt;
  }
  return found;
}

// The tensors of another file under other names.
class RenamedTensors final : public TensorFile {
 public:
  // `names` has the new name of each tensor of `file`.
  RenamedTensors(std::shared_ptr<const TensorFile> file, std::vector<std::string> names)
      : renamed_(std::move(file)) {
    file_name_ = renamed_->file_name();
    file_ = renamed_->mapped();
    entries_ = renamed_->tensors();
    for (size_t i = 0; i < entries_.size(); ++i) entries_[i].name = std::move(names[i]);
  }

  Result<TensorData> Read(const TensorEntry& entry) const override {
    return renamed_->Read(Original(entry));
  }
  Result<TensorData> ReadPart(const TensorEntry& entry, int64_t first,
                              int64_t count) const override {
    return renamed_->ReadPart(Original(entry), first, count);
  }
  uint64_t StoredBytes(const TensorEntry& entry) const override {
    return renamed_->StoredBytes(Original(entry));
  }

 private:
  const TensorEntry& Original(const TensorEntry& entry) const {
    return renamed_->tensors()[static_cast<size_t>(&entry - entries_.data())];
  }

  const std::shared_ptr<const TensorFile> renamed_;
};

// The weights and the options of one file.
struct OneFile {
  std::shared_ptr<const TorchStateDict> tensors;
  std::optional<FairseqOptions> options;  // nullopt if the file has only tensors
};

Result<OneFile> OpenOne(const std::filesystem::path& folder, const std::string& name) {
  const std::filesystem::path path = folder / name;
  MOESERVE_RETURN_IF_ERROR(CheckInsideModel(folder, path));
  MOESERVE_ASSIGN_OR_RETURN(const std::shared_ptr<const TorchFile> file, TorchFile::Open(path));
  const std::string prefix = Printable(file->file_name()) + ": ";
  const PickleValue& root = file->root();
  if (!root.Is(PickleKind::kDict)) {
    return absl::InvalidArgumentError(Concat(
        prefix, "expected a checkpoint of fairseq or a dict of tensors, found ", ShowPickle(root)));
  }
  OneFile result;
  // Everything else, such as the optimizer's state, is not needed.
  const PickleValue* const model = root.Get("model");
  if (model != nullptr) {
    Result<std::optional<FairseqOptions>> options = ReadFairseqOptions(root);
    if (!options.ok()) return Prefixed(prefix, options.status());
    result.options = *std::move(options);
  }
  MOESERVE_ASSIGN_OR_RETURN(result.tensors,
                            TorchStateDict::Make(*file, model != nullptr ? *model : root));
  return result;
}

// Returns the names that the tensors of a file have in the model.
std::vector<std::string> PlainNames(const TensorFile& file, std::string_view prefix) {
  std::vector<std::string> names;
  for (const TensorEntry& entry : file.tensors()) {
    names.push_back(std::string(prefix) + WithoutWrappers(entry.name));
  }
  return names;
}

// Returns "decoder." if the names lack it, as those of torchscale without fairseq do.
std::string_view MissingPrefix(const TensorFile& file) {
  for (const TensorEntry& entry : file.tensors()) {
    const std::string name = WithoutWrappers(entry.name);
    if (name.starts_with(kPrefix) || name.starts_with("encoder.")) return "";
  }
  return kPrefix;
}

// Returns how many experts of a layer the file of a process has.
Result<int> LocalExperts(std::string_view file, const std::vector<std::string>& names) {
  std::set<int> numbers;
  for (const std::string& name : names) {
    const std::optional<ExpertNumber> expert = FindExpert(name);
    if (expert.has_value()) numbers.insert(expert->number);
  }
  const auto count = static_cast<int>(numbers.size());
  if (count == 0) {
    return absl::InvalidArgumentError(
        Concat(Printable(file), ": expected the experts of a process, found no expert"));
  }
  if (*numbers.rbegin() != count - 1) {
    return absl::InvalidArgumentError(Concat(Printable(file),
                                             ": expected experts with the numbers ", "from 0 to ",
                                             count - 1, ", found ", *numbers.rbegin()));
  }
  return count;
}

// Gives the experts of process `rank` their numbers in the model.
void Renumber(int rank, int local, std::vector<std::string>* names) {
  for (std::string& name : *names) {
    const std::optional<ExpertNumber> expert = FindExpert(name);
    if (!expert.has_value()) continue;
    name.replace(expert->begin, expert->digits,
                 std::to_string(int64_t{rank} * local + expert->number));
  }
}

// Returns how many of the files of processes, of which there are `files`, contain the model. The
// first of them, `file`, has `local` experts of each layer.
Result<size_t> FilesToRead(const FairseqOptions& options, std::string_view file, size_t files,
                           int local) {
  constexpr std::string_view kKey = "moe_expert_count";
  const auto value = options.values.find(kKey);
  const bool given = value != options.values.end();
  const std::optional<int> experts = given ? IntFrom(*value) : std::nullopt;
  if (!experts.has_value() || *experts < 1 || *experts > kMaxExperts) {
    return absl::InvalidArgumentError(
        Concat(options.place, ": ", kKey, ": expected an integer in [1, ", kMaxExperts,
               "], because there are files of processes with experts, found ",
               given ? ShowJson(*value) : std::string("no such key")));
  }
  const auto fault = [&](std::string_view expected, std::string_view found) {
    return absl::InvalidArgumentError(Concat(Printable(file), ": expected ", expected, ", because ",
                                             kKey, " is ", *experts, " and this file has ", local,
                                             local == 1 ? " expert" : " experts",
                                             " of a layer, found ", found));
  };
  if (*experts % local != 0) {
    return fault("a number of experts that divides all experts", "another number");
  }
  const auto needed = static_cast<size_t>(*experts / local);
  const bool copies = local == 1 && files % needed == 0;  // more processes than experts
  if (files < needed || (files > needed && !copies)) {
    return fault(Concat(needed, needed == 1 ? " file" : " files", " of processes"),
                 std::to_string(files));
  }
  return needed;
}

// Replaces options by those of config.json, an object.
Result<FairseqOptions> Merge(std::optional<FairseqOptions> own, const Json& config) {
  MOESERVE_ASSIGN_OR_RETURN(Json given, FlattenOptions(config));
  given.erase("model_type");
  if (!own.has_value()) return FairseqOptions{std::move(given), kConfigFile, {}};
  for (const auto& [key, value] : config.items()) {
    if (!value.is_null() || own->values.erase(key) == 0) continue;
    own->decisions.push_back(Concat("option ", Printable(key), ": removed by ", kConfigFile));
  }
  for (const auto& [key, value] : given.items()) {
    const auto found = own->values.find(key);
    if (found != own->values.end() && *found == value) continue;
    own->decisions.push_back(Concat(
        "option ", Printable(key), ": ", ShowJson(value), " from ", kConfigFile, ", instead of ",
        found == own->values.end() ? std::string("none") : ShowJson(*found), " in ", own->place));
    own->values[key] = value;
  }
  return *std::move(own);
}

absl::Status NoOptions(std::string_view file) {
  return absl::NotFoundError(
      Concat(Printable(file),
             ": expected the options of the model (args or cfg), found only tensors. Write the ",
             "options into a file ", kConfigFile,
             " in the same folder: \"model_type\": \"torchscale\" and, as fairseq names them, "
             "decoder_layers, decoder_embed_dim, decoder_attention_heads, decoder_ffn_embed_dim, "
             "activation_fn, no_scale_embedding, no_token_positional_embeddings, "
             "decoder_learned_pos, max_target_positions, share_decoder_input_output_embed (of an "
             "encoder: encoder_layers and so on, max_source_positions); with "
             "experts, moe_freq and moe_expert_count, and moe_top1_expert (torchscale) or "
             "moe_top_k, mhmoe_heads_number and moe_ffn_dim (MH-MoE); all others that are not at "
             "their defaults"));
}

// Opens the files one after the other.
class Opener {
 public:
  Opener(const FairseqFiles& files, const std::vector<std::string>& ignored)
      : files_(files), ignored_(ignored) {}

  Result<FairseqCheckpoint> Open() {
    MOESERVE_ASSIGN_OR_RETURN(OneFile main, OpenOne(files_.folder, files_.main));
    const std::string_view prefix = MissingPrefix(*main.tensors);
    std::vector<std::shared_ptr<const TensorFile>> all;
    all.push_back(
        std::make_shared<RenamedTensors>(main.tensors, PlainNames(*main.tensors, prefix)));
    OneFile first;  // the file of the first process
    std::string_view with_options = files_.main;
    if (!files_.ranks.empty()) {
      MOESERVE_ASSIGN_OR_RETURN(first, OpenOne(files_.folder, files_.ranks[0]));
      if (first.options.has_value()) {
        main.options = std::move(first.options);
        with_options = files_.ranks[0];
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(FairseqOptions options, Options(std::move(main.options)));
    RemoveKeys(ignored_, &options.values);
    if (!files_.ranks.empty()) {
      MOESERVE_RETURN_IF_ERROR(AddProcesses(options, std::move(first), prefix, &all));
    }
    MOESERVE_ASSIGN_OR_RETURN(WeightFiles united, WeightFiles::Of(files_.main, std::move(all)));
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<const CheckpointConfig> config,
                              ReadFairseqConfig({with_options, options, united}));
    return FairseqCheckpoint{.files = std::move(united),
                             .config = std::move(config),
                             .config_text = std::move(config_text_)};
  }

 private:
  Result<FairseqOptions> Options(std::optional<FairseqOptions> own) {
    const std::filesystem::path path = files_.folder / kConfigFile;
    if (!Exists(path)) {
      if (!own.has_value()) return NoOptions(files_.main);
      return *std::move(own);
    }
    MOESERVE_ASSIGN_OR_RETURN(config_text_, ReadTextFile(path, kMaxConfigFileBytes));
    MOESERVE_ASSIGN_OR_RETURN(const Json config, ParseConfigJson(config_text_));
    if (!config.is_object() || !HasModelType(config, "torchscale")) {
      return absl::InvalidArgumentError(
          Concat(kConfigFile, ": model_type: expected \"torchscale\" beside a checkpoint of ",
                 "fairseq, found another value"));
    }
    Result<FairseqOptions> merged = Merge(std::move(own), config);
    if (!merged.ok()) return Prefixed(Concat(kConfigFile, ": "), merged.status());
    return merged;
  }

  // Adds the tensors of the files of processes, of which `first` is open.
  absl::Status AddProcesses(const FairseqOptions& options, OneFile first, std::string_view prefix,
                            std::vector<std::shared_ptr<const TensorFile>>* all) {
    std::vector<std::string> names = PlainNames(*first.tensors, prefix);
    MOESERVE_ASSIGN_OR_RETURN(const int local, LocalExperts(files_.ranks[0], names));
    MOESERVE_ASSIGN_OR_RETURN(const size_t needed,
                              FilesToRead(options, files_.ranks[0], files_.ranks.size(), local));
    for (size_t rank = 0; rank < needed; ++rank) {
      const std::string& file = files_.ranks[rank];
      if (rank > 0) {
        MOESERVE_ASSIGN_OR_RETURN(first, OpenOne(files_.folder, file));
        names = PlainNames(*first.tensors, prefix);
        MOESERVE_ASSIGN_OR_RETURN(const int found, LocalExperts(file, names));
        if (found != local) {
          return absl::InvalidArgumentError(
              Concat(Printable(file), ": expected ", local, local == 1 ? " expert" : " experts",
                     " of a layer, as in ", Printable(files_.ranks[0]), ", found ", found));
        }
      }
      Renumber(static_cast<int>(rank), local, &names);
      all->push_back(std::make_shared<RenamedTensors>(first.tensors, std::move(names)));
    }
    return absl::OkStatus();
  }

  const FairseqFiles& files_;
  const std::vector<std::string>& ignored_;
  std::string config_text_;
};

}  // namespace

Result<FairseqCheckpoint> OpenFairseq(const FairseqFiles& files,
                                      const std::vector<std::string>& ignored) {
  return Opener(files, ignored).Open();
}

}  // namespace moeserve
