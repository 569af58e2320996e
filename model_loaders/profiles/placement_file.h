// Files that say which ranks hold which experts, as JSON; README.md has an example.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/weights/expert_placement.h"

namespace moeserve {

// Returns the text of a file with the placement of `model`. `name` is for people.
std::string EncodePlacement(const ExpertPlacement& placement, const ModelSpec& model,
                            std::string_view name);

// Returns the placement that the text describes. InvalidArgument, with the place, what was expected
// and what was found, if it is no such file, is for another model or another number of ranks, if a
// block is missing or occurs twice, if an expert with matrices has no holder, one without matrices
// has any, or a holder is no rank. Experts of prediction layers of which the text says nothing are
// placed as ExpertPlacement::Balanced() does.
Result<ExpertPlacement> DecodePlacement(std::string_view text, const ModelSpec& model, int ranks);

// Like the functions above. SavePlacement() writes a temporary file and renames it. Messages begin
// with the last component of the path.
absl::Status SavePlacement(const std::filesystem::path& path, const ExpertPlacement& placement,
                           const ModelSpec& model, std::string_view name);
Result<ExpertPlacement> LoadPlacement(const std::filesystem::path& path, const ModelSpec& model,
                                      int ranks);

}  // namespace moeserve
