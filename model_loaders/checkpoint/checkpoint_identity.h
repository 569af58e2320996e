// Identifies a checkpoint by its name, its place and the state of its files.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// Returns the last component of the absolute path: "model" for "/srv/model", for "/srv/model/", and
// for "." in that folder.
std::string LastComponent(const std::filesystem::path& path);

// `place` is the folder or file that was asked for; `config` the text of config.json, empty if the
// weight files contain the configuration.
CheckpointIdentity Identify(const std::filesystem::path& place, std::string_view config,
                            const WeightFiles& files);

// Returns CheckpointIdentity::content. Errors are those of TensorFile::ReadPart().
Result<std::string> ContentDigest(std::string_view config, const WeightFiles& files);

}  // namespace moeserve
