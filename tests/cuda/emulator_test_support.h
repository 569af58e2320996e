// All orders of execution, for tests on the emulated device.
#pragma once

#include <gtest/gtest.h>

#include "kernels/cuda/device/runtime.h"
#include "tests/cuda/device_array.h"

namespace moeserve::cuda {

// Calls `f` with several orders of threads and blocks.
template <typename F>
void InEveryOrder(F&& f) {
#if defined(MOESERVE_CUDA_EMULATION)
  const emulator::Order before = emulator::GetOrder();
  for (const emulator::Order order :
       {emulator::Order{emulator::Order::kForward, 0},
        emulator::Order{emulator::Order::kReverse, 0}, emulator::Order{emulator::Order::kRandom, 1},
        emulator::Order{emulator::Order::kEager, 0}}) {
    SCOPED_TRACE(::testing::Message()
                 << "order " << static_cast<int>(order.kind) << ", seed " << order.seed);
    emulator::SetOrder(order);
    f();
  }
  emulator::SetOrder(before);
#else
  f();
#endif
}

}  // namespace moeserve::cuda
