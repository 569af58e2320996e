// Opens models in GGUF files, which contain configuration, weights and tokenizer.
#pragma once

#include <filesystem>
#include <optional>

#include "base/status.h"
#include "model_loaders/checkpoint/loader.h"

namespace moeserve {

// Returns the GGUF file that `path` stands for: itself, if its name ends with ".gguf" and it is no
// folder; or the only such file, or the first part of the only split file, of a folder without
// other weights. nullopt if there is none. InvalidArgument if a folder has several.
Result<std::optional<std::filesystem::path>> FindGguf(const std::filesystem::path& path);

// Validates a GGUF file, and the other parts if it is split, without reading tensor data.
// InvalidArgument or NotFound with the file, the key or tensor, the expected and the found value.
// `place` is what was asked for: the file or its folder.
Result<Checkpoint> LoadGguf(const std::filesystem::path& file, const std::filesystem::path& place,
                            const LoadOptions& options);

}  // namespace moeserve
