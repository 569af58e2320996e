// Copies of golden models with other settings.
#pragma once

#include <filesystem>
#include <string>

namespace moeserve::testing {

// Copies the files of a model, and changes its config.json by a patch (RFC 7396).
void CopyPatched(const std::filesystem::path& folder, const std::string& patch,
                 const std::filesystem::path& to);

// Fills the tensors of model.safetensors in `folder` whose names end with `suffix` with zeros.
void ZeroTensors(const std::filesystem::path& folder, const std::string& suffix);

}  // namespace moeserve::testing
