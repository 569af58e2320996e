// Copies of golden models with other settings.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace moeserve::testing {

// Copies the files of a model, and changes its config.json by a patch (RFC 7396).
void CopyPatched(const std::filesystem::path& folder, const std::string& patch,
                 const std::filesystem::path& to);

// Fills the tensors of model.safetensors in `folder` whose names end with `suffix` with zeros.
void ZeroTensors(const std::filesystem::path& folder, const std::string& suffix);

// Gives each tensor of model.safetensors in `folder` the name that `rename` returns for its own,
// and removes those for which that is "".
void RenameTensors(const std::filesystem::path& folder,
                   const std::function<std::string(const std::string&)>& rename);

}  // namespace moeserve::testing
