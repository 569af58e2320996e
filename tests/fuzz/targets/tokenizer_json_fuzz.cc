// tokenizer.json.

#include "model_loaders/tokenizer/tokenizer_json.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  const auto tokenizer = ParseTokenizerJson(testing::Text(data, size), "tokenizer.json");
  if (tokenizer.ok()) testing::UseTokenizer(**tokenizer);
  return 0;
}
