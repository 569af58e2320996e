// Reads vocabularies that are not a whole description of a tokenizer: tiktoken's files, vocab.json
// with merges.txt, and BERT's vocab.txt. tokenizer_config.json says the rest. The files are
// untrusted.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/tokenizer/tokenizer_config.h"

namespace moeserve {

// Returns whether the data begins as a tiktoken file does: with a line of base64 and a number.
bool LooksLikeTiktoken(std::string_view data);

// Reads a tokenizer from the text of a tiktoken file: a line for each token with its bytes in
// base64 and its id. The pattern that cuts a text into pieces must be in `details`, and so must the
// special tokens. Error messages begin with `file_name`.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTiktoken(std::string_view data,
                                                         std::string_view file_name,
                                                         const TokenizerDetails& details);

// Reads a tokenizer from the texts of vocab.json and merges.txt. The tokenizer class in `given`
// must be GPT2Tokenizer, Qwen2Tokenizer, RobertaTokenizer or BartTokenizer. The special tokens of
// the last two, which work alike, are called <s>, </s>, <unk>, <pad> and <mask> if `given` has no
// names.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseVocabAndMerges(std::string_view vocab,
                                                               std::string_view merges,
                                                               const TokenizerDetails& given);

// Makes BERT's tokenizer of a WordPiece vocabulary. `details` says how a text is prepared and which
// tokens are special; without names, they are called [UNK], [CLS], [SEP], [PAD] and [MASK].
// InvalidArgument for an invalid vocabulary or one without [UNK], [CLS] or [SEP].
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeBertTokenizer(
    std::vector<std::pair<std::string, TokenId>> vocab, TokenizerDetails details);

// Reads BERT's tokenizer from the text of vocab.txt, which has a token in each line. The tokenizer
// class in `details`, if it has one, must be one that works as BERT's.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseBertVocabulary(std::string_view text,
                                                               const TokenizerDetails& details);

// Reads a vocabulary from the text of a JSON object with the id of each token. Returns the tokens
// in the order of their ids. InvalidArgument unless these are the numbers from 0 on.
absl::StatusOr<std::vector<std::string>> ParseVocabJson(std::string_view text,
                                                        const std::string& file_name);

// Rewrites a pattern of tiktoken, which is written for Rust's regular expressions, to mean the same
// in Ruby's syntax: there, $ matches at each line end and x{1,3}+ is not possessive.
// InvalidArgument for what cannot be rewritten.
absl::StatusOr<std::string> RubyPattern(std::string_view pattern);

}  // namespace moeserve
