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

// The opposite. Every array is there, of the type and shape that the others imply, and every number
// in range, or InvalidArgument: array, expected, found.
Result<ExpertProfile> DecodeProfile(std::string_view bytes);

// Writes beside `path` and renames, so that a reader never sees half a file. Errors begin with the
// last component of the path.
absl::Status SaveProfile(const std::filesystem::path& path, const ExpertProfile& profile);
Result<ExpertProfile> LoadProfile(const std::filesystem::path& path);

// Writes a whole file in the same way. Into a device or a pipe it writes directly.
absl::Status WriteWholeFile(const std::filesystem::path& path, std::string_view bytes);

}  // namespace moeserve
