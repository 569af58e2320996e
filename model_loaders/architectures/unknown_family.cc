#include "model_loaders/architectures/unknown_family.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/huggingface/wrappers.h"
#include "model_loaders/files/object_reader.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kPartLightning =
    "linear attention whose decay is fixed for each head (lightning attention)";
constexpr std::string_view kPartMamba = "state spaces of the first kind (Mamba-1)";
constexpr std::string_view kPartShared = "state spaces, and layers that share their weights";
constexpr std::string_view kPartStreams = "several residual streams";
constexpr std::string_view kPartSparse =
    "attention to keys that an indexer chooses, with other parts";
constexpr std::string_view kPartImages = "inputs or layers beside those of a decoder of text";
constexpr std::string_view kReaderAlone = "";

// By name.
constexpr UnsupportedFamily kUnsupported[] = {
    {"arctic", "a dense layer beside the experts of each layer", "mixtral"},
    {"aria", kPartImages, "mixtral"},
    {"aria_text", kReaderAlone, "mixtral"},
    {"axk2", "norms with gates and attention to keys that an indexer chooses", "axk1"},
    {"bailing_moe", kReaderAlone, "bailing_moe_v2"},
    {"bailing_moe_linear", kPartLightning, "bailing_moe_v2"},
    {"bailing_moe_v2_5", kPartLightning, "bailing_moe_v2"},
    {"bamba", kReaderAlone, "granitemoehybrid"},
    {"beam", kReaderAlone, "exaone_moe"},
    {"dbrx", kReaderAlone, "mixtral"},
    {"deepseek", kReaderAlone, "deepseek_v2"},
    {"deepseek_ocr2", kPartImages, "deepseek_v2"},
    {"deepseek_ocr2_text", kReaderAlone, "deepseek_v2"},
    {"deepseek_v4", kPartStreams, "deepseek_v3"},
    {"deepseek_vl_v2", kPartImages, "deepseek_v2"},
    {"diffusion_gemma", "texts that are written in any order", "gemma3_text"},
    {"diffusion_gemma_text", "texts that are written in any order", "gemma3_text"},
    {"doge", "attention with masks that it computes", "qwen3_moe"},
    {"dots3_note", kPartSparse, "dots1"},
    {"dots3_note_text", kPartSparse, "dots1"},
    {"ernie4_5_moe_vl", "a config.json without text_config", "ernie4_5_vl_moe"},
    {"falcon_h1", "state spaces beside the attention of each layer", "granitemoehybrid"},
    {"falcon_mamba", kPartMamba, ""},
    {"gemma3n", kPartStreams, "gemma4_text"},
    {"gemma4_assistant", "layers that draft tokens for another model", "gemma4"},
    {"glm5_next", kPartStreams, "glm4_moe"},
    {"glm5_next_text", kPartStreams, "glm4_moe"},
    {"grok-1", kReaderAlone, "mixtral"},
    {"hy_v4", kPartStreams, "hy_v3"},
    {"hy_v4_vl", kPartStreams, "hy_v3"},
    {"hy_v4_vl_text", kPartStreams, "hy_v3"},
    {"inkling2", "biases of relative positions and convolutions in each layer", "mixtral"},
    {"inkling2_loop", "layers that run several times", "mixtral"},
    {"inkling2_loop_text", "layers that run several times", "mixtral"},
    {"inkling2_text", "biases of relative positions and convolutions in each layer", "mixtral"},
    {"inkling_mm_model", "biases of relative positions and convolutions in each layer", "mixtral"},
    {"inkling_text", "biases of relative positions and convolutions in each layer", "mixtral"},
    {"jamba", kPartMamba, "mixtral"},
    {"kimi_k3", "attention to the outputs of earlier layers", "kimi_linear"},
    {"kolibri1", kReaderAlone, "flint"},
    {"laguna", "gates of heads, and numbers of heads for each layer", "mellum"},
    {"lara_mini", "linear attention of another kind", "qwen3_moe"},
    {"mamba", kPartMamba, ""},
    {"mamba2", kReaderAlone, "nemotron_h"},
    {"minimax", kPartLightning, "minimax_m2"},
    {"minimax_m1", kPartLightning, "minimax_m2"},
    {"minimax_text_01", kPartLightning, "minimax_m2"},
    {"mistral_large4", kPartSparse, "deepseek_v3"},
    {"mistral_large4_text", kPartSparse, "deepseek_v3"},
    {"muse_spark", "gates of the residual stream", "granitemoe_swa"},
    {"muse_spark_text", "gates of the residual stream", "granitemoe_swa"},
    {"nemo_speechlm", kPartImages, "nemotron_h"},
    {"olmo_hybrid", kReaderAlone, "qwen3_next"},
    {"pangu_ultra_moe", kReaderAlone, "deepseek_v3"},
    {"phi4_multimodal", kPartImages, "phi3"},
    {"qwen3_omni_moe", kPartImages, "qwen3_vl_moe"},
    {"qwen3_omni_moe_text", kReaderAlone, "qwen3_vl_moe_text"},
    {"qwen3_omni_moe_thinker", kPartImages, "qwen3_vl_moe"},
    {"qwen4_exp", kPartStreams, "qwen3_moe"},
    {"qwen4_exp_text", kPartStreams, "qwen3_moe"},
    {"recurrent_gemma", "gated linear recurrences (RG-LRU)", "gemma"},
    {"rwkv", "recurrences of RWKV", ""},
    {"step3_text", kReaderAlone, "qwen3_moe"},
    {"unlimited_ocr", kPartImages, "deepseek_v2"},
    {"unlimited_ocr_text", kReaderAlone, "deepseek_v2"},
    {"xlstm", "recurrences of xLSTM", ""},
    {"zamba", kPartShared, ""},
    {"zamba2", kPartShared, ""},
    {"zaya", "convolutions in attention, and routers of several layers", "mixtral"},
};

const UnsupportedFamily* FindUnsupported(std::string_view type) {
  const auto* const found = std::ranges::find(kUnsupported, type, &UnsupportedFamily::model_type);
  return found == std::end(kUnsupported) ? nullptr : found;
}

// Returns the letters and digits of a name, in lower case.
std::string PlainName(std::string_view name) {
  std::string plain;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0) plain.push_back(static_cast<char>(std::tolower(byte)));
  }
  return plain;
}

// Returns how many letters have to be changed, added or removed.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// Returns the names that are read and least different from `type`, at most two; none if all are
// quite different.
std::vector<std::string_view> Nearest(std::string_view type, ArchitectureList known) {
  constexpr size_t kLongestName = 64, kMost = 2;
  const std::string plain = PlainName(type.substr(0, kLongestName));
  std::vector<std::pair<size_t, std::string_view>> names;
  const auto consider = [&](std::string_view name) {
    const std::string other = PlainName(name);
    const size_t distance = EditDistance(plain, other);
    if (2 * distance <= std::min(plain.size(), other.size())) {
      names.emplace_back(distance, name);
    }
  };
  for (const Architecture* family : known) consider(family->model_type);
  std::ranges::sort(names);
  std::vector<std::string_view> nearest;
  for (const auto& [distance, name] : names) {
    if (nearest.size() < kMost && distance <= names[0].first + 1) nearest.push_back(name);
  }
  return nearest;
}

std::string NearestText(std::string_view type, ArchitectureList known) {
  std::string text;
  for (const std::string_view name : Nearest(type, known)) {
    text += Concat(text.empty() ? "; nearest by name: " : " and ", Quoted(name));
  }
  return text;
}

// Returns what a model_type should be: the few names that are read, or how many there are.
std::string ExpectedType(ArchitectureList known) {
  constexpr size_t kShown = 4;
  if (known.size() <= kShown) return ModelTypes(known);
  return Concat("one of the ", known.size(),
                " model types in model_loaders/architectures/huggingface/README.md");
}

const Architecture* FindKnown(std::string_view type, ArchitectureList known) {
  const auto found =
      std::ranges::find_if(known, [&](const Architecture* a) { return a->model_type == type; });
  return found == known.end() ? nullptr : *found;
}

// Returns the end of the message about a known family: what is missing, and what is near.
std::string WhatIsMissing(const UnsupportedFamily& family, ArchitectureList known) {
  std::string text =
      family.part.empty()
          ? ", a known family whose files this server has no reader for"
          : Concat(", whose models have ", family.part, "; this server does not compute that");
  if (FindKnown(family.nearest, known) != nullptr ||
      std::ranges::any_of(huggingface::Wrappers(), [&](const huggingface::Wrapper& w) {
        return w.model_type == family.nearest;
      })) {
    text += Concat("; nearest that is read: ", Quoted(family.nearest));
  }
  return text;
}

// Returns the model_type of an object of a configuration; "" if it has none.
std::string_view TypeOf(const Json& config) {
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  if (!config.is_object() || type == config.end() || !type->is_string()) return "";
  return type->get_ref<const std::string&>();
}

// Returns what is known of the decoder in a wrapper of which nothing is known.
std::string DecoderPart(const Json& config, ArchitectureList known) {
  const auto text = config.find("text_config");
  if (text == config.end()) return "";
  const std::string_view type = TypeOf(*text);
  if (type.empty()) return "; its text_config has no model_type";
  const bool read = FindKnown(type, known) != nullptr;
  return Concat(
      "; its decoder of text is of the type ", Quoted(type), ", which this server ",
      read ? "reads: a folder with that part alone can be served" : "does not read either");
}

absl::Status NotRead(std::string_view key, std::string_view expected, std::string_view type,
                     std::string_view more) {
  return absl::InvalidArgumentError(
      Concat(kConfigFile, ": ", key, ": expected ", expected, ", found ", Quoted(type), more));
}

}  // namespace

std::span<const UnsupportedFamily> UnsupportedFamilies() { return kUnsupported; }

absl::Status UnknownFamily(const Json& config, ArchitectureList known) {
  const std::string expected = ExpectedType(known);
  const std::string_view type = TypeOf(config);
  if (type.empty()) {
    Problems problems;
    ObjectReader reader(config, "", &problems);
    if (const auto* found = reader.Required("model_type", expected); found != nullptr) {
      reader.Fault("model_type", expected, ShowJson(*found));
    }
    return problems.ToStatus(kConfigFile);
  }
  if (std::ranges::any_of(huggingface::Wrappers(), [&](const huggingface::Wrapper& w) {
        return w.model_type == type && !config.contains("text_config");
      })) {
    return absl::InvalidArgumentError(
        Concat(kConfigFile, ": text_config: expected an object with the decoder's keys, as ",
               Quoted(type), " has, found no such key"));
  }
  if (const UnsupportedFamily* const family = FindUnsupported(type); family != nullptr) {
    // Where only a reader is missing, the decoder may be of a type that has one.
    return NotRead("model_type", expected, type,
                   WhatIsMissing(*family, known) +
                       (family->part.empty() ? DecoderPart(config, known) : std::string()));
  }
  return NotRead("model_type", expected, type,
                 NearestText(type, known) + DecoderPart(config, known));
}

absl::Status UnknownText(std::string_view wrapper, const Json& text, ArchitectureList known) {
  const std::string_view type = TypeOf(text);
  const UnsupportedFamily* const family = FindUnsupported(type);
  return NotRead("text_config.model_type",
                 Concat("a decoder of ", Quoted(wrapper), " that this server reads"), type,
                 family == nullptr ? ", which it does not" : WhatIsMissing(*family, known));
}

}  // namespace moeserve
