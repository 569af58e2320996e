// The tokenizer files of a folder.
#pragma once

#include <filesystem>
#include <memory>

#include "base/status.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// The folder's tokenizer, with all ids in [0, vocab_size). Without tokenizer files: NotFound if
// `required`, else null. Unimplemented if the only one is tokenizer.model (SentencePiece).
Result<std::shared_ptr<const Tokenizer>> LoadTokenizer(const std::filesystem::path& directory,
                                                       int vocab_size, bool required);

}  // namespace moeserve
