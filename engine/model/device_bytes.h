// What the weights of a model need on a device, before they are loaded.
#pragma once

#include <cstdint>
#include <utility>

#include "engine/spec/spec.h"
#include "kernels/base/dtype.h"

namespace moeserve {

struct ModelOptions;

// Returns about how many bytes the experts of this rank and all other weights need on a device,
// which stores the matrices of experts in blocks. For experts, rather too many. `stored` is the
// type of most tensors of the files.
std::pair<int64_t, int64_t> DeviceWeightBytes(const ModelSpec& spec, const ModelOptions& options,
                                              DType stored);

}  // namespace moeserve
