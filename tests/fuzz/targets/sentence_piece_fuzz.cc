// SentencePiece models. If the input contains the bytes "\n\n\n", the text behind them is fairseq's
// dictionary.

#include "model_loaders/tokenizer/sentence_piece_file.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  const std::string_view input = testing::Text(data, size);
  const size_t split = input.find("\n\n\n");
  const auto tokenizer = split == std::string_view::npos
                             ? ParseSentencePieceModel(input, "tokenizer.model", {})
                             : ParseFairseqModel(input.substr(0, split), "sentencepiece.bpe.model",
                                                 input.substr(split + 3), {});
  if (tokenizer.ok()) testing::UseTokenizer(**tokenizer);
  return 0;
}
