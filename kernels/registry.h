// Creates backends by name. Code outside of kernels/ reaches the concrete backends only through
// this header.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/backend_options.h"
#include "kernels/exchange/stream_query.h"

namespace moeserve {

// Registers a further device under a name; under "cuda", it replaces the CUDA device. `query` asks
// one with streams, null is for those without. Must be called before any backend is created.
void RegisterDevice(const std::string& name, BackendFactory factory, StreamQuery query = nullptr);

// Returns what asks a device about its streams; null if it has none or does not exist.
StreamQuery StreamQueryOf(const std::string& device);

// InvalidArgument: a name is unknown, `threads` is outside of [0, 1024], or cuda_dense is not "own"
// on a CPU. Unavailable: there is no usable CUDA device or no cuBLASLt; the message states the
// cause in one line.
Result<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options);

}  // namespace moeserve
