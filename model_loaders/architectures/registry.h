// The families of checkpoint folders that this program reads.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"

namespace moeserve {

// Returns all families. The first one that recognizes a config.json reads it.
ArchitectureList Architectures();

// Reads the text of a config.json, which belongs to a family in the list or to a wrapper of one
// (huggingface/wrappers.h). `stored` describes the folder's tensors. If neither recognizes the
// text, the error is that of UnknownFamily(). The keys `ignored` are removed before (RemoveKeys()).
// Error messages begin with "config.json: ".
Result<std::unique_ptr<const CheckpointConfig>> ReadConfig(
    std::string_view text, const StoredNames& stored,
    ArchitectureList architectures = Architectures(), const std::vector<std::string>& ignored = {});

}  // namespace moeserve
