// Fibers: stacks of their own that one host thread switches between.
#pragma once

#include <cstddef>

// MOESERVE_EMULATOR_UCONTEXT forces the portable and slower way.
#if defined(__x86_64__) && !defined(MOESERVE_EMULATOR_UCONTEXT)
#define MOESERVE_EMULATOR_ASSEMBLY 1
#else
#define MOESERVE_EMULATOR_ASSEMBLY 0
#include <ucontext.h>
#endif

namespace moeserve::emulator {

// A stack and where it was left. Owns nothing: the stack's owner is StackPool.
struct FiberContext {
#if MOESERVE_EMULATOR_ASSEMBLY
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* stack = nullptr;  // lowest usable byte; for the host's own stack known after a first switch
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;    // AddressSanitizer's
  void* thread_state = nullptr;  // ThreadSanitizer's
};

// Gives `fiber` a stack of its own, with a guard page below, that starts `entry` when it is first
// switched to; `entry` never returns. Stacks live as long as the process. `index` spreads the tops
// of stacks over the sets of the cache.
void CreateFiber(FiberContext* fiber, size_t index, void (*entry)());

// Leaves `from`, which must be running, and continues `to`. Returns when someone switches back.
void SwitchFiber(FiberContext* from, FiberContext* to);

// The first call that a fiber makes once it runs.
void FiberStarted();

}  // namespace moeserve::emulator
