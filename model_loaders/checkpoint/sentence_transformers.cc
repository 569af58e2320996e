#include "model_loaders/checkpoint/sentence_transformers.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string_view>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/checkpoint/tensor_check.h"
#include "model_loaders/files/file_kind.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr JsonLimits kModuleLimits = {
    .max_bytes = size_t{16} << 20, .max_depth = 16, .max_values = size_t{1} << 18};
constexpr size_t kMaxModules = 64;
constexpr size_t kMaxPrompts = 1024;

// Returns the JSON of a file in the folder; null if there is none.
Result<Json> ReadJson(const fs::path& folder, const std::string& name) {
  const fs::path path = folder / name;
  if (!Exists(path)) return Json();
  MOESERVE_RETURN_IF_ERROR(CheckInsideModel(folder, path));
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kModuleLimits.max_bytes));
  Result<Json> json = ParseStrictJson(text, kModuleLimits);
  if (!json.ok()) return Prefixed(Concat(name, ": "), json.status());
  return json;
}

absl::Status ModuleFault(std::string_view file, std::string_view key, std::string_view expected,
                         std::string_view found) {
  return absl::InvalidArgumentError(
      Concat(file, ": ", key, ": expected ", expected, ", found ", found));
}

// Returns whether `path` names a folder directly inside another one.
bool IsFolderName(std::string_view path) {
  return !path.empty() && path.size() <= 128 && path[0] != '.' &&
         std::ranges::all_of(path, [](char c) {
           return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' ||
                  c == '.';
         });
}

Result<PoolingKind> ReadPooling(const Json& json, const std::string& file) {
  constexpr std::pair<std::string_view, PoolingKind> kModes[] = {
      {"cls_token", PoolingKind::kFirst},  {"cls", PoolingKind::kFirst},
      {"mean_tokens", PoolingKind::kMean}, {"mean", PoolingKind::kMean},
      {"max_tokens", PoolingKind::kMax},   {"max", PoolingKind::kMax},
      {"lasttoken", PoolingKind::kLast}};
  if (!json.is_object()) return ModuleFault(file, "the file", "an object", ShowJson(json));
  std::vector<std::string> modes;
  constexpr std::string_view kPrefix = "pooling_mode_";
  for (const auto& [key, value] : json.items()) {
    if (key.starts_with(kPrefix) && value == true) modes.push_back(key.substr(kPrefix.size()));
    if (key == "pooling_mode" && value.is_string()) modes.push_back(value.get<std::string>());
    if (key == "include_prompt" && value != true) {
      return ModuleFault(file, key, "true", ShowJson(value));
    }
  }
  if (modes.size() == 1) {
    for (const auto& [name, kind] : kModes) {
      if (modes[0] == name) return kind;
    }
  }
  std::string found;
  for (const std::string& mode : modes) found += (found.empty() ? "" : ", ") + Printable(mode);
  return ModuleFault(file, "pooling_mode", "one of cls, mean, max and lasttoken",
                     found.empty() ? "none" : found);
}

Result<DenseSpec> ReadDense(const Json& json, const std::string& file, int in) {
  Problems problems;
  ObjectReader reader(json, "", &problems);
  DenseSpec dense;
  const int stated = reader.Int("in_features");
  dense.width = reader.Int("out_features");
  dense.bias = reader.Bool("bias", true);
  const Json* const function = reader.Optional("activation_function");
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(file));
  if (stated != in) {
    return ModuleFault(file, "in_features", std::to_string(in), std::to_string(stated));
  }
  if (dense.width < 1 || dense.width > kMaxWidth) {
    return ModuleFault(file, "out_features", Concat("an integer in [1, ", kMaxWidth, ']'),
                       std::to_string(dense.width));
  }
  const std::string name =
      function != nullptr && function->is_string() ? function->get<std::string>() : "Tanh";
  if (name.ends_with("Tanh")) {
    dense.activation = ActivationKind::kTanh;
  } else if (!name.ends_with("Identity")) {
    return ModuleFault(file, "activation_function", "Identity or Tanh", Printable(name));
  }
  return dense;
}

// The weights of a model and of the dense modules behind it.
class WeightsWithModules final : public WeightSource {
 public:
  struct Module {
    std::string folder;
    WeightFiles files;
  };

  WeightsWithModules(std::unique_ptr<WeightSource> model, std::vector<Module> modules)
      : model_(std::move(model)), modules_(std::move(modules)) {}

  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override {
    constexpr std::string_view kPrefix = "pooling.dense.";
    if (!name.starts_with(kPrefix)) return model_->Get(name, shape);
    const std::string_view rest = name.substr(kPrefix.size());
    const size_t dot = rest.find('.');
    size_t index = modules_.size();
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
    if (error != std::errc() || dot == rest.npos || end != rest.data() + dot ||
        index >= modules_.size()) {
      return absl::InternalError(Concat("there is no dense module for ", Quoted(name)));
    }
    const Module& module = modules_[index];
    const std::string stored = Concat("linear", rest.substr(dot));
    const WeightFiles::Location* const found = module.files.Find(stored);
    if (found == nullptr) {
      return ModuleFault(module.folder, stored, "a tensor", "none");
    }
    if (found->entry->shape != shape) {
      return ModuleFault(module.folder, stored, ShapeText(shape), ShapeText(found->entry->shape));
    }
    const std::optional<DType> type = WeightType(found->entry->type);
    if (!type.has_value()) {
      return ModuleFault(module.folder, stored, "floating-point numbers", Name(found->entry->type));
    }
    MOESERVE_ASSIGN_OR_RETURN(TensorData data, found->file->Read(*found->entry));
    return HostTensor{
        .data = data.bytes.data(), .dtype = *type, .shape = shape, .owner = data.owner};
  }

  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override {
    return model_->GetQuantized(name, shape, type);
  }
  Result<std::vector<int32_t>> GetIds(std::string_view name,
                                      const std::vector<int64_t>& shape) override {
    return model_->GetIds(name, shape);
  }
  Quantization StoredQuantization() const override { return model_->StoredQuantization(); }
  absl::Status Check() const override {
    for (const Module& module : modules_) {
      for (const std::shared_ptr<const TensorFile>& file : module.files.files()) {
        MOESERVE_RETURN_IF_ERROR(file->mapped()->Check());
      }
    }
    return model_->Check();
  }
  DType DominantDType() const override { return model_->DominantDType(); }

 private:
  const std::unique_ptr<WeightSource> model_;
  const std::vector<Module> modules_;
};

// Reads the modules behind the model. Returns the weights of the dense ones.
Result<std::vector<WeightsWithModules::Module>> ReadModules(const fs::path& folder,
                                                            const Json& modules, ModelSpec& spec) {
  constexpr const char* kFile = "modules.json";
  if (!modules.is_array() || modules.size() > kMaxModules) {
    return ModuleFault(kFile, "the file", Concat("a list of at most ", kMaxModules, " modules"),
                       ShowJson(modules));
  }
  std::vector<WeightsWithModules::Module> dense;
  PoolingSpec pooling;
  bool pools = false;
  int width = spec.hidden_size;
  for (const Json& module : modules) {
    Problems problems;
    ObjectReader reader(module, Concat("[", &module - &modules[0], ']'), &problems);
    const Json* const type = reader.Required("type", "a text");
    const Json* const path = reader.Required("path", "a text");
    MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kFile));
    const std::string name = type->is_string() ? type->get<std::string>() : "";
    const std::string place = path->is_string() ? path->get<std::string>() : "/";
    if (name.ends_with(".Transformer")) continue;
    if (name.ends_with(".Normalize")) {
      pooling.normalize = true;
      continue;
    }
    const bool is_pooling = name.ends_with(".Pooling");
    if (!is_pooling && !name.ends_with(".Dense")) {
      return ModuleFault(kFile, reader.PathOf("type"), "Transformer, Pooling, Dense or Normalize",
                         ShowJson(*type));
    }
    if (!IsFolderName(place)) {
      return ModuleFault(kFile, reader.PathOf("path"), "a folder of the model", ShowJson(*path));
    }
    const std::string config = place + "/config.json";
    MOESERVE_ASSIGN_OR_RETURN(const Json json, ReadJson(folder, config));
    if (is_pooling) {
      MOESERVE_ASSIGN_OR_RETURN(pooling.kind, ReadPooling(json, config));
      pools = true;
      continue;
    }
    MOESERVE_ASSIGN_OR_RETURN(pooling.dense.emplace_back(), ReadDense(json, config, width));
    width = pooling.dense.back().width;
    MOESERVE_RETURN_IF_ERROR(CheckInsideModel(folder, folder / place));
    MOESERVE_ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::Open(folder / place));
    dense.push_back({place, std::move(files)});
  }
  if (pools) spec.pooling = std::move(pooling);
  return dense;
}

// Reads config_sentence_transformers.json.
absl::Status ReadPrompts(const Json& json, TextSettings& settings) {
  constexpr std::string_view kFile = "config_sentence_transformers.json";
  if (!json.is_object()) return absl::OkStatus();
  if (const auto prompts = json.find("prompts"); prompts != json.end() && prompts->is_object()) {
    if (prompts->size() > kMaxPrompts) {
      return ModuleFault(kFile, "prompts", Concat("at most ", kMaxPrompts),
                         std::to_string(prompts->size()));
    }
    for (const auto& [name, text] : prompts->items()) {
      if (!text.is_string()) {
        return ModuleFault(kFile, Concat("prompts.", Printable(name)), "a text", ShowJson(text));
      }
      settings.prompts.emplace_back(name, text.get<std::string>());
    }
  }
  const auto name = json.find("default_prompt_name");
  if (name == json.end() || name->is_null()) return absl::OkStatus();
  const bool known = name->is_string() && std::ranges::any_of(settings.prompts, [&](const auto& p) {
                       return p.first == name->get_ref<const std::string&>();
                     });
  if (!known) return ModuleFault(kFile, "default_prompt_name", "one of prompts", ShowJson(*name));
  settings.default_prompt = name->get<std::string>();
  return absl::OkStatus();
}

// Reads the sizes to which vectors may be cut.
absl::Status ReadDimensions(const Json& config, TextSettings& settings) {
  constexpr const char* kKey = "matryoshka_dimensions";
  if (!config.is_object() || !config.contains(kKey) || config[kKey].is_null()) {
    return absl::OkStatus();
  }
  const auto fault = [](const Json& found) {
    return ModuleFault("config.json", kKey, "a list of at most 64 integers above 0",
                       ShowJson(found));
  };
  const Json& list = config[kKey];
  if (!list.is_array() || list.size() > 64) return fault(list);
  for (const Json& item : list) {
    const std::optional<int> size = IntFrom(item);
    if (size.value_or(0) < 1) return fault(item);
    settings.dimensions.push_back(*size);
  }
  return absl::OkStatus();
}

// Reads viterbi_calibration.json: {"operating_points": {"default": {"biases": {KEY: number}}}}.
absl::Status ReadTransitions(const Json& json, TransitionBiases& out) {
  constexpr std::string_view kFile = "viterbi_calibration.json";
  constexpr std::string_view kPath = "operating_points.default.biases";
  constexpr std::string_view kPrefix = "transition_bias_";
  if (json.is_null()) return absl::OkStatus();
  const Json* biases = &json;
  for (const char* key : {"operating_points", "default", "biases"}) {
    if (!biases->is_object() || !biases->contains(key)) {
      return ModuleFault(kFile, kPath, "an object", "none");
    }
    biases = &(*biases)[key];
  }
  if (!biases->is_object()) return ModuleFault(kFile, kPath, "an object", ShowJson(*biases));
  const std::pair<std::string_view, double*> known[] = {
      {"background_stay", &out.background_stay},
      {"background_to_start", &out.background_to_start},
      {"end_to_background", &out.end_to_background},
      {"end_to_start", &out.end_to_start},
      {"inside_to_continue", &out.inside_to_continue},
      {"inside_to_end", &out.inside_to_end}};
  for (const auto& [key, value] : biases->items()) {
    std::string_view name = key;
    if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
    const auto* const found =
        std::ranges::find(known, name, &std::pair<std::string_view, double*>::first);
    if (found == std::end(known)) {
      return ModuleFault(kFile, Concat(kPath, '.', Printable(key)), "a known transition",
                         "another");
    }
    if (!value.is_number()) {
      return ModuleFault(kFile, Concat(kPath, '.', key), "a number", ShowJson(value));
    }
    *found->second = value.get<double>();
  }
  return absl::OkStatus();
}

}  // namespace

Result<TextSettings> ApplySentenceTransformers(const fs::path& folder, ModelSpec& spec,
                                               std::unique_ptr<WeightSource>& weights) {
  TextSettings settings;
  MOESERVE_ASSIGN_OR_RETURN(const Json limits, ReadJson(folder, "sentence_bert_config.json"));
  if (limits.is_object()) {
    if (const auto most = limits.find("max_seq_length"); most != limits.end()) {
      settings.max_tokens = IntFrom(*most);
      if (!most->is_null() && settings.max_tokens.value_or(0) < 1) {
        return ModuleFault("sentence_bert_config.json", "max_seq_length", "an integer above 0",
                           ShowJson(*most));
      }
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(const Json prompts,
                            ReadJson(folder, "config_sentence_transformers.json"));
  MOESERVE_RETURN_IF_ERROR(ReadPrompts(prompts, settings));
  MOESERVE_ASSIGN_OR_RETURN(const Json config, ReadJson(folder, "config.json"));
  MOESERVE_RETURN_IF_ERROR(ReadDimensions(config, settings));
  MOESERVE_ASSIGN_OR_RETURN(const Json calibration, ReadJson(folder, "viterbi_calibration.json"));
  MOESERVE_RETURN_IF_ERROR(ReadTransitions(calibration, settings.transitions));
  MOESERVE_ASSIGN_OR_RETURN(const Json modules, ReadJson(folder, "modules.json"));
  if (modules.is_null() || spec.head.kind == HeadKind::kSequenceClassification) return settings;
  MOESERVE_ASSIGN_OR_RETURN(std::vector<WeightsWithModules::Module> dense,
                            ReadModules(folder, modules, spec));
  MOESERVE_RETURN_IF_ERROR(Validate(spec));
  if (!dense.empty()) {
    weights = std::make_unique<WeightsWithModules>(std::move(weights), std::move(dense));
  }
  return settings;
}

}  // namespace moeserve
