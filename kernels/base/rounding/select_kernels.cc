#include "kernels/base/rounding/select_kernels.h"

namespace moeserve::rounding {

std::vector<const RoundingKernels*> SupportedKernels() {
  std::vector<const RoundingKernels*> kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512) kernels.push_back(&kAvx512Kernels);
  if (avx2) kernels.push_back(&kAvx2Kernels);
#endif
  kernels.push_back(&kPlainKernels);
  return kernels;
}

const RoundingKernels& SelectedKernels() {
  static const RoundingKernels& selected = *SupportedKernels().front();
  return selected;
}

}  // namespace moeserve::rounding
