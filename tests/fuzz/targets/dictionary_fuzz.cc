// Dictionaries of fairseq without a model of SentencePiece. If the input contains the bytes
// "\n\n\n", the text behind them has the codes of subword-nmt.

#include "model_loaders/tokenizer/fairseq_dictionary.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  const std::string_view input = testing::Text(data, size);
  const size_t split = input.find("\n\n\n");
  std::optional<std::string> codes;
  if (split != std::string_view::npos) codes = std::string(input.substr(split + 3));
  for (const auto texts : {DictionaryUse::Texts::kContinued, DictionaryUse::Texts::kMasked,
                           DictionaryUse::Texts::kTranslated}) {
    const auto tokenizer =
        MakeDictionaryTokenizer(input.substr(0, split), "dict.txt", codes, "bpe.codes", texts);
    if (tokenizer.ok()) testing::UseTokenizer(**tokenizer);
  }
  return 0;
}
