#include "model_loaders/architectures/registry.h"

#include <string>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/wrappers.h"
#include "model_loaders/architectures/unknown_family.h"

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
    &kAxk1Architecture,
    &kBailingHybridArchitecture,
    &kBailingMoeArchitecture,
    &kCohere2MoeArchitecture,
    &kDeepSeekV2Architecture,
    &kDeepSeekV32Architecture,
    &kDeepSeekV3Architecture,
    &kDots1Architecture,
    &kErnieArchitecture,
    &kErnieMoeArchitecture,
    &kErnieVlMoeTextArchitecture,
    &kExaoneMoeArchitecture,
    &kFlexOlmoArchitecture,
    &kFlintArchitecture,
    &kGemma2Architecture,
    &kGemma3Architecture,
    &kGemma4Architecture,
    &kGemmaArchitecture,
    &kGlm4MoeArchitecture,
    &kGlm4MoeLiteArchitecture,
    &kGlm4vMoeTextArchitecture,
    &kGlmMoeDsaArchitecture,
    &kGptOssArchitecture,
    &kGraniteArchitecture,
    &kGraniteMoeArchitecture,
    &kGraniteMoeHybridArchitecture,
    &kGraniteMoeSharedArchitecture,
    &kGraniteMoeSwaArchitecture,
    &kHunYuanMoeArchitecture,
    &kHyV3Architecture,
    &kJetMoeArchitecture,
    &kK2HorizonArchitecture,
    &kK2HorizonMovaArchitecture,
    &kKimiK2Architecture,
    &kKimiLinearArchitecture,
    &kLfm2Architecture,
    &kLfm2MoeArchitecture,
    &kLlama4Architecture,
    &kLlamaArchitecture,
    &kLongcatFlashArchitecture,
    &kMellumArchitecture,
    &kMimoV2FlashArchitecture,
    &kMiniMaxM2Architecture,
    &kMiniMaxM3TextArchitecture,
    &kMistral4Architecture,
    &kMistralArchitecture,
    &kMixtralArchitecture,
    &kNemotronHArchitecture,
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
    &kQwen3VlMoeTextArchitecture,
    &kSarvamMlaArchitecture,
    &kSarvamMoeArchitecture,
    &kSolarOpenArchitecture,
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

}  // namespace

ArchitectureList Architectures() { return kArchitectures; }

ConfigResult ReadConfig(std::string_view text, const StoredNames& stored,
                        ArchitectureList architectures, const std::vector<std::string>& ignored) {
  MOESERVE_ASSIGN_OR_RETURN(nlohmann::json config, ParseConfigJson(text));
  RemoveKeys(ignored, &config);
  if (config.is_object()) {
    for (const Architecture* architecture : architectures) {
      if (!architecture->Recognizes(config)) continue;
      return huggingface::IsTextType(architecture->model_type)
                 ? huggingface::ReadAlone(*architecture, config, stored)
                 : architecture->read(config, stored);
    }
  }
  if (const huggingface::Wrapper* const wrapper = huggingface::FindWrapper(config);
      wrapper != nullptr) {
    return huggingface::ReadWrapped(*wrapper, config, stored, architectures, UnknownText);
  }
  return UnknownFamily(config, architectures);
}

}  // namespace moeserve
