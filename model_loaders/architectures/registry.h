// The families of checkpoint folders that this program reads.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"

namespace moeserve {

struct Architecture;
class CheckpointConfig;

using ArchitectureList = std::span<const Architecture* const>;

// All of them. The first that recognises a config.json reads it.
ArchitectureList Architectures();

// Reads the text of a config.json. If no family of the list recognises it, InvalidArgument names
// the model_type that was found and those that are known. Messages begin with "config.json: ".
Result<std::unique_ptr<const CheckpointConfig>> ReadConfig(
    std::string_view text, ArchitectureList architectures = Architectures());

}  // namespace moeserve
