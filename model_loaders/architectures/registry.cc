#include "model_loaders/architectures/registry.h"

#include <string>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/files/object_reader.h"

namespace moeserve {
namespace {

// One line per family. If two families could recognize the same config.json, the more specific one
// comes first.
constexpr const Architecture* kArchitectures[] = {
    &kNativeArchitecture,
    &kNativeEncoderArchitecture,
    &kNativePairArchitecture,
    &kDynamicMoeArchitecture,  // before Llama, whose name it uses
    &kAfmoeArchitecture,
    &kBailingMoeArchitecture,
    &kCohere2MoeArchitecture,
    &kDeepSeekV2Architecture,
    &kDeepSeekV3Architecture,
    &kDots1Architecture,
    &kErnieArchitecture,
    &kErnieMoeArchitecture,
    &kFlexOlmoArchitecture,
    &kGemma2Architecture,
    &kGemma3Architecture,
    &kGemma4Architecture,
    &kGemmaArchitecture,
    &kGlm4MoeArchitecture,
    &kGptOssArchitecture,
    &kGraniteArchitecture,
    &kGraniteMoeArchitecture,
    &kGraniteMoeHybridArchitecture,
    &kGraniteMoeSharedArchitecture,
    &kHunYuanMoeArchitecture,
    &kJetMoeArchitecture,
    &kK2HorizonArchitecture,
    &kK2HorizonMovaArchitecture,
    &kKimiK2Architecture,
    &kLfm2Architecture,
    &kLfm2MoeArchitecture,
    &kLlama4Architecture,
    &kLlamaArchitecture,
    &kLongcatFlashArchitecture,
    &kMimoV2FlashArchitecture,
    &kMiniMaxM2Architecture,
    &kMistral4Architecture,
    &kMistralArchitecture,
    &kMixtralArchitecture,
    &kOlmo2Architecture,
    &kOlmo3Architecture,
    &kOlmoeArchitecture,
    &kPhi3Architecture,
    &kPhiMoeArchitecture,
    &kQwen2Architecture,
    &kQwen2MoeArchitecture,
    &kQwen3Architecture,
    &kQwen35Architecture,
    &kQwen35MoeArchitecture,
    &kQwen3MoeArchitecture,
    &kQwen3NextArchitecture,
    &kStep3Architecture,
    &kBertArchitecture,
    &kCamembertArchitecture,
    &kModernBertArchitecture,
    &kNomicBertArchitecture,
    &kPrivacyFilterArchitecture,
    &kRobertaArchitecture,
    &kXlmRobertaArchitecture,
    &kBartArchitecture,
    &kM2m100Architecture,
    &kMarianArchitecture,
    &kMbartArchitecture,
    &kMt5Architecture,
    &kNllbMoeArchitecture,
    &kPegasusArchitecture,
    &kSwitchArchitecture,
    &kT5Architecture,
    &kUmt5Architecture,
};

// Families with parts that the engine does not compute.
struct UnsupportedFamily {
  std::string_view model_type;
  std::string_view part;
};
constexpr std::string_view kLinearAttention = "linear attention";
constexpr std::string_view kStateSpace = "state-space layers";
constexpr UnsupportedFamily kUnsupported[] = {
    {"bamba", kStateSpace},
    {"falcon_h1", kStateSpace},
    {"falcon_mamba", kStateSpace},
    {"jamba", kStateSpace},
    {"kimi_linear", kLinearAttention},
    {"mamba", kStateSpace},
    {"mamba2", kStateSpace},
    {"minimax", kLinearAttention},
    {"minimax_text_01", kLinearAttention},
    {"nemotron_h", kStateSpace},
    {"qwen3_5_moe", kLinearAttention},
    {"recurrent_gemma", kLinearAttention},
    {"rwkv", kLinearAttention},
    {"zamba", kStateSpace},
    {"zamba2", kStateSpace},
};

absl::Status UnknownArchitecture(const nlohmann::json& config, ArchitectureList known) {
  for (const UnsupportedFamily& family : kUnsupported) {
    if (!HasModelType(config, family.model_type)) continue;
    return absl::InvalidArgumentError(
        Concat(kConfigFile, ": model_type: expected a decoder of attention and feed-forward ",
               "layers, found ", Quoted(family.model_type), ", whose models have ", family.part,
               "; this server does not compute that"));
  }
  const std::string expected = ModelTypes(known);
  Problems problems;
  ObjectReader reader(config, "", &problems);
  if (const auto* found = reader.Required("model_type", expected); found != nullptr) {
    reader.Fault("model_type", expected, ShowJson(*found));
  }
  return problems.ToStatus(kConfigFile);
}

}  // namespace

ArchitectureList Architectures() { return kArchitectures; }

std::string ModelTypes(ArchitectureList architectures) {
  std::string types;
  for (size_t i = 0; i < architectures.size(); ++i) {
    if (i > 0) types.append(i + 1 == architectures.size() ? " or " : ", ");
    types.append(Quoted(architectures[i]->model_type));
  }
  return types;
}

ConfigResult ReadConfig(std::string_view text, const StoredNames& stored,
                        ArchitectureList architectures, const std::vector<std::string>& ignored) {
  MOESERVE_ASSIGN_OR_RETURN(nlohmann::json config, ParseConfigJson(text));
  RemoveKeys(ignored, &config);
  if (config.is_object()) {
    for (const Architecture* architecture : architectures) {
      if (architecture->Recognizes(config)) return architecture->read(config, stored);
    }
  }
  return UnknownArchitecture(config, architectures);
}

}  // namespace moeserve
