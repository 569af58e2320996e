// Reads token ids in configuration files: one integer or a list of integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error_text.h"
#include "nlohmann/json.hpp"

namespace moeserve {

inline constexpr std::string_view kTokenIdsExpected = "an integer or a list of integers";
inline constexpr size_t kMaxTokenIds = 1024;

// Checks only the types, because the valid range depends on the vocabulary.
std::vector<int32_t> ParseTokenIds(const nlohmann::json& json, const std::string& path,
                                   Problems* problems);

}  // namespace moeserve
