#include "kernels/cpu/isa/isa.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moeserve::cpu {

namespace {

const KernelTable* registered_table = nullptr;

#if defined(__x86_64__)
// Returns whether the processor has AMX for bf16 and int8, and the kernel lets this process use it,
// which this function asks for.
bool UsesAmx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;
  if ((d & kBf16) == 0 || (d & kTiles) == 0 || (d & kInt8) == 0) return false;
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

void RegisterTable(const KernelTable* table) { registered_table = table; }

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
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  static const bool amx = bf16 && UsesAmx();
  if (amx) tables.push_back(&kAmxBf16Table);
  if (bf16) tables.push_back(&kAvx512Bf16Table);
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
  if (registered_table != nullptr && registered_table->name == name) return registered_table;
  return absl::InvalidArgumentError("instruction set '" + std::string(name) +
                                    "' is not available here; expected auto or one of " +
                                    supported);
}

}  // namespace moeserve::cpu
