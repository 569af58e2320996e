// The tokenizer and the chat template in the metadata of a GGUF file, which is untrusted.
#pragma once

#include <memory>

#include "base/status.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/tokenizer/tokenizer_config.h"

namespace moeserve {

// Reads tokenizers of the models "llama" and "t5" (SentencePiece's BPE and Unigram), "gpt2"
// (byte-level BPE) and "bert" (WordPiece, without case and accents, because a file does not say how
// a text is prepared), whose results are those of SentencePiece and of Hugging Face's library for
// the same vocabulary. Returns
// null if the file has no tokenizer. InvalidArgument, with the file, the key, the expected and the
// found value, for a damaged tokenizer, another model, or a pre-tokenizer whose pattern this
// program does not know.
Result<std::unique_ptr<Tokenizer>> ReadGgufTokenizer(const GgufFile& file);

// Reads what a folder would have in tokenizer_config.json: the chat templates, the texts of special
// tokens and whether a text is enclosed in them. Same errors as ReadGgufTokenizer().
Result<TokenizerConfig> ReadGgufTokenizerConfig(const GgufFile& file);

}  // namespace moeserve
