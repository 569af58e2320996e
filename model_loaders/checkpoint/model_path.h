// The path of a model as a user gives it.
#pragma once

#include <filesystem>
#include <string>

#include "base/status.h"

namespace moeserve {

struct ModelPath {
  std::filesystem::path path;  // a checkpoint folder, or a file that contains a whole model
  std::string name;            // the default served name
};

// Returns the folder or file that `given` stands for:
//  - a folder of Hugging Face's cache ("models--org--name", with snapshots/ inside): the snapshot
//    that refs/main names, or the only one; its name is the model's;
//  - model.safetensors, pytorch_model.bin, one of their index files, or config.json: its folder;
//  - any other path: itself, whether it exists or not.
// InvalidArgument if a cache folder has no snapshot or several without refs/main, or if a file with
// another name and the suffix .safetensors or .bin is given.
Result<ModelPath> ResolveModelPath(const std::filesystem::path& given);

}  // namespace moeserve
