// generation_config.json and tokenizer_config.json.

#include "model_loaders/tokenizer/generation_config.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  const std::string_view text = testing::Text(data, size);
  constexpr int kVocabulary = 100;
  const auto generation = ParseGenerationConfig(text, kVocabulary);
  if (generation.ok()) {
    testing::CountAccepted();
    for (const TokenId id : generation->eos_token_ids) {
      MOESERVE_CHECK(id >= 0 && id < kVocabulary, "token ids are in the vocabulary");
    }
  }
  (void)ParseTokenizerConfig(text, "tokenizer_config.json");
  return 0;
}
