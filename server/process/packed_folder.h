// The default folders of packed weights and of chosen kernels.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace moeserve::server {

// Weights that take less than this load so quickly that they are not kept packed by default.
inline constexpr int64_t kLeastPackedBytes = int64_t{64} << 20;

// Returns the folder of `--packed-cache auto`: moeserve/packed in the cache folder of the service
// ($CACHE_DIRECTORY, which systemd sets), else of the user ($XDG_CACHE_HOME, else $HOME/.cache).
// Makes the folder, readable by this user alone, if it does not exist. nullopt if there is no such
// variable with an absolute path, or if the folder cannot be made or read.
std::optional<std::filesystem::path> DefaultPackedFolder();
// Returns the folder of `--cuda-tune-file auto` in the same way: moeserve/kernels.
std::optional<std::filesystem::path> DefaultKernelFolder();

}  // namespace moeserve::server
