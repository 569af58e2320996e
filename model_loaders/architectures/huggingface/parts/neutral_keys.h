// Keys of config.json that do not change a decoder's answers.
#pragma once

#include <string_view>

#include "nlohmann/json.hpp"

namespace moeserve::huggingface {

// What is known of a key that a family does not read.
enum class KeyEffect : uint8_t {
  kNone,     // the key, or its value, does not change the answers
  kChanges,  // another value of the key would not, this one may
  kUnknown   // nothing is known of the key
};

// `value` is that of the key; not null.
KeyEffect EffectOf(std::string_view key, const nlohmann::json& value);

// Returns the value with which the key has no effect, for messages about kChanges.
std::string_view HarmlessValue(std::string_view key);

}  // namespace moeserve::huggingface
