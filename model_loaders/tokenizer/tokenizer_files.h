// The tokenizer files of a folder.
#pragma once

#include <filesystem>
#include <memory>

#include "base/status.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/tokenizer/fairseq_dictionary.h"

namespace moeserve {

// Returns the folder's tokenizer, all of whose ids must be in [0, vocab_size). If the folder has no
// tokenizer files, returns NotFound if `required`, else null. `use` concerns fairseq's
// dictionaries.
Result<std::shared_ptr<const Tokenizer>> LoadTokenizer(const std::filesystem::path& directory,
                                                       int vocab_size, bool required,
                                                       const DictionaryUse& use = {});

}  // namespace moeserve
