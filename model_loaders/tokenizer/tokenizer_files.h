// The tokenizer files of a folder.
#pragma once

#include <filesystem>
#include <memory>

#include "base/status.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// The folder's tokenizer, every id of which lies in [0, vocab_size). Without tokenizer files:
// NotFound if `required`, else null. A folder whose only tokenizer is tokenizer.model
// (SentencePiece) is refused as Unimplemented.
Result<std::shared_ptr<const Tokenizer>> LoadTokenizer(const std::filesystem::path& directory,
                                                       int vocab_size, bool required);

}  // namespace moeserve
