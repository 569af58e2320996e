#include "kernels/cpu/isa/isa.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace moeserve::cpu {

std::vector<const KernelTable*> SupportedTables() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) tables.push_back(&kAvx512Bf16Table);
  if (vnni) tables.push_back(&kAvx512VnniTable);
  if (avx512) tables.push_back(&kAvx512Table);
  if (avx2) tables.push_back(&kAvx2Table);
#elif defined(__aarch64__)
  constexpr unsigned long kDotProducts = 1ul << 20;   // HWCAP_ASIMDDP
  constexpr unsigned long kInt8Matrices = 1ul << 13;  // HWCAP2_I8MM
  constexpr unsigned long kBf16 = 1ul << 14;          // HWCAP2_BF16
  const bool dot = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  const unsigned long more = getauxval(AT_HWCAP2);
  const bool matrices = dot && (more & kInt8Matrices) != 0;
  if (matrices && (more & kBf16) != 0) tables.push_back(&kNeonBf16Table);
  if (matrices) tables.push_back(&kNeonI8mmTable);
  if (dot) tables.push_back(&kNeonDotTable);
  tables.push_back(&kNeonTable);
#endif
  tables.push_back(&kPlainTable);
  return tables;
}

bool PrefetchesToL1() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("amd");
#else
  return true;
#endif
}

Result<const KernelTable*> SelectTable(std::string_view name) {
  const std::vector<const KernelTable*> tables = SupportedTables();
  if (name == "auto") return tables.front();
  std::string supported;
  for (const KernelTable* t : tables) {
    if (t->name == name) return t;
    supported += supported.empty() ? t->name : std::string(", ") + t->name;
  }
  return absl::InvalidArgumentError("instruction set '" + std::string(name) +
                                    "' is not available here; expected auto or one of " +
                                    supported);
}

}  // namespace moeserve::cpu
