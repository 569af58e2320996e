// What an exchange that reads the memory of a device asks the device.
#pragma once

#include "base/status.h"

namespace moeserve {

// Returns whether all work that was queued on a stream (cudaStream_t) has ended; Internal if the
// device has failed. Does not wait. Any thread may call it.
using StreamQuery = Result<bool> (*)(void* stream);

}  // namespace moeserve
