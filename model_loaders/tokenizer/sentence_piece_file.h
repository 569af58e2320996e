// Reads SentencePiece's model files (tokenizer.model). A tokenizer of such a file gives the results
// of SentencePiece itself, not those of Hugging Face's library, which differ on a few texts. The
// file is untrusted.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/models/sentence_piece_model.h"
#include "engine/text/tokenizer/normalizers/sentence_piece_normalizer.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/tokenizer/tokenizer_config.h"

namespace moeserve {

// What a model file says, with the defaults of absent fields.
struct SentencePieceFile {
  SentencePieceConfig model;
  SentencePieceRules rules;
  std::string unknown_surface = " \u2047 ";
  std::string bos_piece = "<s>";
  std::string eos_piece = "</s>";
};

// Makes a tokenizer of the contents of a model file, as ParseSentencePieceModel() does.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeSentencePieceTokenizer(
    SentencePieceFile file, const TokenizerDetails& details);

// Reads a tokenizer from the bytes of a model file. Error messages begin with `file_name`.
//
// `details` says whether a text is enclosed in BOS and EOS; without these keys, that follows from
// the tokenizer class. Of its added tokens, those that the file has must agree with it. Control
// pieces such as <s> are recognised only in trusted parts of a text, because SentencePiece takes
// text that spells them for ordinary text. What is not implemented exactly is refused by name.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseSentencePieceModel(std::string_view data,
                                                                   std::string_view file_name,
                                                                   const TokenizerDetails& details);

// Like ParseSentencePieceModel(), with the ids that fairseq gives the pieces: <s>, <pad>, </s> and
// <unk> are 0 to 3, and the symbols of the dictionary follow. `dictionary` is the text of its
// dict.txt, which has a line for each symbol, with its count; without it, the symbols are the
// model's other pieces. Unless the configuration says otherwise, a text begins with <s>. With the
// tokenizer classes XLMRobertaTokenizer and CamembertTokenizer, it also ends with </s>, two texts
// are joined as RoBERTa does, and the last token is <mask>. CamembertTokenizer has its own first
// symbols: <pad> is 1, <unk> 3, <s> 5 and </s> 6.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseFairseqModel(
    std::string_view data, std::string_view file_name, std::optional<std::string_view> dictionary,
    const TokenizerDetails& details, std::string_view dictionary_name = "dict.txt");

// Like ParseSentencePieceModel(), with the ids of Marian's translators: `symbols` has the token of
// each id, of both languages. A text ends with </s>. It may contain tokens such as ">>fra<<", which
// name the language to translate to. Text is not prepared by Moses' rules for punctuation.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseMarianModel(std::string_view data,
                                                            std::string_view file_name,
                                                            const std::vector<std::string>& symbols,
                                                            const TokenizerDetails& details);

}  // namespace moeserve
