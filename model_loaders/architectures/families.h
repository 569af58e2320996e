// All families. Each is defined in the file or folder of its name. registry.cc lists them.
#pragma once

#include "model_loaders/architectures/architecture.h"

namespace moeserve {

extern const Architecture kNativeArchitecture;
extern const Architecture kNativeEncoderArchitecture;
extern const Architecture kNativePairArchitecture;

// huggingface/
extern const Architecture kAfmoeArchitecture;
extern const Architecture kAxk1Architecture;
extern const Architecture kBailingHybridArchitecture;
extern const Architecture kBailingMoeArchitecture;
extern const Architecture kBartArchitecture;
extern const Architecture kBertArchitecture;
extern const Architecture kCamembertArchitecture;
extern const Architecture kCohere2MoeArchitecture;
extern const Architecture kDeepSeekV2Architecture;
extern const Architecture kDeepSeekV32Architecture;
extern const Architecture kDeepSeekV3Architecture;
extern const Architecture kDots1Architecture;
extern const Architecture kDynamicMoeArchitecture;
extern const Architecture kErnieArchitecture;
extern const Architecture kErnieMoeArchitecture;
extern const Architecture kErnieVlMoeTextArchitecture;
extern const Architecture kExaoneMoeArchitecture;
extern const Architecture kFlexOlmoArchitecture;
extern const Architecture kFlintArchitecture;
extern const Architecture kGemma2Architecture;
extern const Architecture kGemma3Architecture;
extern const Architecture kGemma4Architecture;
extern const Architecture kGemmaArchitecture;
extern const Architecture kGlm4MoeArchitecture;
extern const Architecture kGlm4MoeLiteArchitecture;
extern const Architecture kGlm4vMoeTextArchitecture;
extern const Architecture kGlmMoeDsaArchitecture;
extern const Architecture kGptOssArchitecture;
extern const Architecture kGraniteArchitecture;
extern const Architecture kGraniteMoeArchitecture;
extern const Architecture kGraniteMoeHybridArchitecture;
extern const Architecture kGraniteMoeSharedArchitecture;
extern const Architecture kGraniteMoeSwaArchitecture;
extern const Architecture kHunYuanMoeArchitecture;
extern const Architecture kHyV3Architecture;
extern const Architecture kJetMoeArchitecture;
extern const Architecture kK2HorizonArchitecture;
extern const Architecture kK2HorizonMovaArchitecture;
extern const Architecture kKimiK2Architecture;
extern const Architecture kKimiLinearArchitecture;
extern const Architecture kLfm2Architecture;
extern const Architecture kLfm2MoeArchitecture;
extern const Architecture kLlama4Architecture;
extern const Architecture kLlamaArchitecture;
extern const Architecture kLongcatFlashArchitecture;
extern const Architecture kM2m100Architecture;
extern const Architecture kMarianArchitecture;
extern const Architecture kMbartArchitecture;
extern const Architecture kMellumArchitecture;
extern const Architecture kMimoV2FlashArchitecture;
extern const Architecture kMiniMaxM2Architecture;
extern const Architecture kMiniMaxM3TextArchitecture;
extern const Architecture kMistral4Architecture;
extern const Architecture kMistralArchitecture;
extern const Architecture kMixtralArchitecture;
extern const Architecture kModernBertArchitecture;
extern const Architecture kMt5Architecture;
extern const Architecture kNemotronHArchitecture;
extern const Architecture kNllbMoeArchitecture;
extern const Architecture kNomicBertArchitecture;
extern const Architecture kOlmo2Architecture;
extern const Architecture kOlmo3Architecture;
extern const Architecture kOlmoeArchitecture;
extern const Architecture kPegasusArchitecture;
extern const Architecture kPhi3Architecture;
extern const Architecture kPhiMoeArchitecture;
extern const Architecture kPrivacyFilterArchitecture;
extern const Architecture kQwen2Architecture;
extern const Architecture kQwen2MoeArchitecture;
extern const Architecture kQwen3Architecture;
extern const Architecture kQwen35Architecture;
extern const Architecture kQwen35MoeArchitecture;
extern const Architecture kQwen3MoeArchitecture;
extern const Architecture kQwen3NextArchitecture;
extern const Architecture kQwen3VlMoeTextArchitecture;
extern const Architecture kRobertaArchitecture;
extern const Architecture kSarvamMlaArchitecture;
extern const Architecture kSarvamMoeArchitecture;
extern const Architecture kSolarOpenArchitecture;
extern const Architecture kStep3Architecture;
extern const Architecture kSwitchArchitecture;
extern const Architecture kT5Architecture;
extern const Architecture kUmt5Architecture;
extern const Architecture kXlmRobertaArchitecture;

}  // namespace moeserve
