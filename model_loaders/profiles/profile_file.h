// Files of expert profiles: safetensors files with the arrays that engine/statistics/README.md
// describes.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/statistics/expert_profile.h"

namespace moeserve {

// Returns the bytes of a profile file.
std::string EncodeProfile(const ExpertProfile& profile);

// Parses the bytes of a profile file. InvalidArgument, with array, expected and found value, if an
// array is missing, if its type or shape contradicts the other arrays, or if a number is out of
// range.
Result<ExpertProfile> DecodeProfile(std::string_view bytes);

// SaveProfile writes a temporary file next to `path` and renames it, so that readers never see a
// partial file. Error messages begin with the last component of the path.
absl::Status SaveProfile(const std::filesystem::path& path, const ExpertProfile& profile);
Result<ExpertProfile> LoadProfile(const std::filesystem::path& path);

// Writes a whole file as SaveProfile() does: by renaming a temporary file. Writes directly to
// `path` if that is a device or a pipe.
absl::Status WriteWholeFile(const std::filesystem::path& path, std::string_view bytes);

}  // namespace moeserve
