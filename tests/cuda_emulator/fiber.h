// Fibers: separate stacks between which one host thread switches.
#pragma once

#include <cstddef>

// MOESERVE_EMULATOR_UCONTEXT forces the portable, slower implementation.
#if defined(__x86_64__) && !defined(MOESERVE_EMULATOR_UCONTEXT)
#define MOESERVE_EMULATOR_ASSEMBLY 1
#else
#define MOESERVE_EMULATOR_ASSEMBLY 0
#include <ucontext.h>
#endif

namespace moeserve::emulator {

// A stack, and the point at which it was left. StackPool owns the stack.
struct FiberContext {
#if MOESERVE_EMULATOR_ASSEMBLY
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* stack = nullptr;  // lowest usable byte; set for the host's own stack by the first switch
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;    // AddressSanitizer's
  void* thread_state = nullptr;  // ThreadSanitizer's
};

// Creates a stack for `fiber`, with a guard page below it. The first switch to the fiber calls
// `entry`, which must never return. Stacks live as long as the process. `index` spreads the tops of
// stacks over the sets of the CPU's cache.
void CreateFiber(FiberContext* fiber, size_t index, void (*entry)());

// Leaves `from`, which must be running, and continues `to`. Returns when a fiber switches back to
// `from`.
void SwitchFiber(FiberContext* from, FiberContext* to);

// A fiber must call this first when it begins to run.
void FiberStarted();

}  // namespace moeserve::emulator
