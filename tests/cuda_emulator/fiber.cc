#include "tests/cuda_emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "base/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if MOESERVE_EMULATOR_ASSEMBLY
// Pushes the callee-saved registers on the current stack, stores its stack pointer in
// *from_stack_pointer, switches to the other stack, and pops the registers from it. The
// floating-point control words are equal in all fibers, so they are not saved.
extern "C" void MoeserveEmulatorSwitch(void** from_stack_pointer, void* to_stack_pointer);
asm(R"(
.text
.globl MoeserveEmulatorSwitch
.hidden MoeserveEmulatorSwitch
.type MoeserveEmulatorSwitch, @function
MoeserveEmulatorSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size MoeserveEmulatorSwitch, .-MoeserveEmulatorSwitch
)");
#endif

namespace moeserve::emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;
// The tops of the stacks are offset by different multiples of this many bytes. Otherwise, the
// stacks of all fibers would compete for the same cache sets.
constexpr size_t kColourStep = 832;
constexpr size_t kColourBytes = 32 << 10;

// The context that switched to the running fiber.
FiberContext* g_previous = nullptr;

void FinishSwitch([[maybe_unused]] FiberContext* self) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(self == nullptr ? nullptr : self->fake_stack, &bottom, &bytes);
  if (g_previous->stack == nullptr) {
    g_previous->stack = const_cast<void*>(bottom);
    g_previous->stack_bytes = bytes;
  }
#endif
}

}  // namespace

void CreateFiber(FiberContext* fiber, size_t index, void (*entry)()) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MOESERVE_CHECK(memory != MAP_FAILED, "no address space for the stack of an emulated thread");
  MOESERVE_CHECK(mprotect(memory, page, PROT_NONE) == 0, "guard page of a stack");
  fiber->stack = static_cast<char*>(memory) + page;
  fiber->stack_bytes = kStackBytes;
  char* top = static_cast<char*>(fiber->stack) + kStackBytes - (index * kColourStep) % kColourBytes;
#if defined(__SANITIZE_THREAD__)
  fiber->thread_state = __tsan_create_fiber(0);
#endif
#if MOESERVE_EMULATOR_ASSEMBLY
  // The initial stack has six registers, the return address `entry`, and a null return address for
  // `entry` itself. On entry of a function, the stack pointer is 8 bytes past a multiple of 16.
  void** slots = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63}) - 8;
  for (int i = 0; i < 8; ++i) slots[i] = nullptr;
  slots[6] = reinterpret_cast<void*>(entry);
  fiber->stack_pointer = slots;
#else
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size =
      static_cast<size_t>(top - static_cast<char*>(fiber->stack)) & ~size_t{63};
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
#endif
}

void SwitchFiber(FiberContext* from, FiberContext* to) {
  g_previous = from;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  if (from->thread_state == nullptr || from->stack == nullptr) {
    from->thread_state = __tsan_get_current_fiber();
  }
  __tsan_switch_to_fiber(to->thread_state, 0);
#endif
#if MOESERVE_EMULATOR_ASSEMBLY
  MoeserveEmulatorSwitch(&from->stack_pointer, to->stack_pointer);
#else
  swapcontext(&from->context, &to->context);
#endif
  FinishSwitch(from);
}

void FiberStarted() { FinishSwitch(nullptr); }

}  // namespace moeserve::emulator
