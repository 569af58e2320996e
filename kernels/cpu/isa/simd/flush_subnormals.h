// How x86 processors treat subnormal numbers.
#pragma once

namespace moeserve::cpu::MOESERVE_ISA {

// While it lives, this thread's vector instructions read and write subnormal numbers as zeros.
class FlushSubnormals {
 public:
  FlushSubnormals() {
    asm volatile("stmxcsr %0" : "=m"(before_));
    Set(before_ | 0x8040u);  // FTZ and DAZ
  }
  ~FlushSubnormals() { Set(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  // Nothing that is loaded or stored may move across the change.
  static void Set(uint32_t mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
  uint32_t before_;
};

}  // namespace moeserve::cpu::MOESERVE_ISA
