#include "model_loaders/architectures/registry.h"

#include <string>

#include "base/message.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/files/object_reader.h"

namespace moeserve {
namespace {

// One line per family. If two families could recognize the same config.json, the more specific one
// comes first.
constexpr const Architecture* kArchitectures[] = {
    &kNativeArchitecture,
    &kDynamicMoeArchitecture,  // before Llama, whose name it uses
    &kAfmoeArchitecture,
    &kBailingMoeArchitecture,
    &kDeepSeekV2Architecture,
    &kDeepSeekV3Architecture,
    &kDots1Architecture,
    &kErnieArchitecture,
    &kErnieMoeArchitecture,
    &kFlexOlmoArchitecture,
    &kGemma2Architecture,
    &kGemma3Architecture,
    &kGemmaArchitecture,
    &kGlm4MoeArchitecture,
    &kGptOssArchitecture,
    &kGraniteArchitecture,
    &kGraniteMoeArchitecture,
    &kGraniteMoeHybridArchitecture,
    &kGraniteMoeSharedArchitecture,
    &kHunYuanMoeArchitecture,
    &kJetMoeArchitecture,
    &kKimiK2Architecture,
    &kLlamaArchitecture,
    &kMiniMaxM2Architecture,
    &kMistralArchitecture,
    &kMixtralArchitecture,
    &kOlmo2Architecture,
    &kOlmo3Architecture,
    &kOlmoeArchitecture,
    &kPhi3Architecture,
    &kQwen2Architecture,
    &kQwen2MoeArchitecture,
    &kQwen3Architecture,
    &kQwen3MoeArchitecture,
};

absl::Status UnknownArchitecture(const nlohmann::json& config, ArchitectureList known) {
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

Result<std::unique_ptr<const CheckpointConfig>> ReadConfig(std::string_view text,
                                                           const StoredNames& stored,
                                                           ArchitectureList architectures) {
  MOESERVE_ASSIGN_OR_RETURN(const nlohmann::json config, ParseConfigJson(text));
  if (config.is_object()) {
    for (const Architecture* architecture : architectures) {
      if (architecture->recognizes(config)) return architecture->read(config, stored);
    }
  }
  return UnknownArchitecture(config, architectures);
}

}  // namespace moeserve
