// Work of other libraries on streams of the emulated device. Has no names of CUDA, so that a source
// file can use it beside the real headers.
#pragma once

#include <functional>

namespace moeserve::emulator {

// Queues work on a stream of the emulated runtime (cudaStream_t; null: the default stream). The
// stream runs nothing that follows until `ready` returns true and `work` has run. Meanwhile the
// other host threads can use the runtime, and cudaStreamQuery() returns cudaErrorNotReady. Neither
// function may call the runtime. Returns false if the handle is no stream or is capturing.
bool EnqueueWhenReady(void* stream, std::function<bool()> ready, std::function<void()> work);

}  // namespace moeserve::emulator
