// Vocabularies of tiktoken, or vocab.json and merges.txt with the bytes "\n\n\n" between them.

#include "model_loaders/tokenizer/vocab_files.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  const std::string_view input = testing::Text(data, size);
  TokenizerDetails details;
  details.pattern = R"(\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+)";
  // Both formats need parts of tokenizer_config.json.
  details.added_tokens = {{.id = 300, .content = "<s>", .special = true}};
  details.config.tokenizer_class = size % 2 == 0 ? "GPT2Tokenizer" : "Qwen2Tokenizer";
  const size_t split = input.find("\n\n\n");
  const auto tokenizer =
      split == std::string_view::npos
          ? ParseTiktoken(input, "qwen.tiktoken", details)
          : ParseVocabAndMerges(input.substr(0, split), input.substr(split + 3), details);
  if (tokenizer.ok()) testing::UseTokenizer(**tokenizer);
  return 0;
}
