// Expert profiles as files: the safetensors container with the arrays that
// engine/statistics/README.md documents.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/statistics/expert_profile.h"

namespace moeserve {

// The bytes of a profile file.
std::string EncodeProfile(const ExpertProfile& profile);

// Reads the bytes of a profile file. InvalidArgument (array, expected, found) if an array is
// missing, if its type or shape disagrees with the others, or if a number is out of range.
Result<ExpertProfile> DecodeProfile(std::string_view bytes);

// Writes a temporary file beside `path` and renames it, so that readers never see a partial file.
// Errors begin with the last component of the path.
absl::Status SaveProfile(const std::filesystem::path& path, const ExpertProfile& profile);
Result<ExpertProfile> LoadProfile(const std::filesystem::path& path);

// Writes a whole file in the same way; to a device or a pipe, directly.
absl::Status WriteWholeFile(const std::filesystem::path& path, std::string_view bytes);

}  // namespace moeserve
