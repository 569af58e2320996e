#include "kernels/cuda/tuning/tuning_key.h"

#include <elf.h>
#include <link.h>

#include <cstring>

#include "absl/strings/escaping.h"
#include "base/error_text.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/launch.h"

namespace moeserve::cuda {
namespace {

// Returns the build id that the linker wrote into the program, a hash of its contents, as
// hexadecimal digits; "none" if there is none.
std::string BuildId() {
  std::string id = "none";
  const auto visit = [](dl_phdr_info* info, size_t, void* result) {
    // The first object is the program.
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr)& header = info->dlpi_phdr[i];
      if (header.p_type != PT_NOTE) continue;
      const char* at = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
      const char* const end = at + header.p_memsz;
      const auto aligned = [](size_t bytes) { return (bytes + 3) / 4 * 4; };
      while (static_cast<size_t>(end - at) >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) note;
        std::memcpy(&note, at, sizeof(note));
        const char* const name = at + sizeof(note);
        const size_t size = aligned(note.n_namesz) + aligned(note.n_descsz);
        if (static_cast<size_t>(end - name) < size) break;
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
            std::memcmp(name, "GNU", 4) == 0) {
          *static_cast<std::string*>(result) = absl::BytesToHexString(
              absl::string_view(name + aligned(note.n_namesz), note.n_descsz));
          return 1;
        }
        at = name + size;
      }
    }
    return 1;
  };
  dl_iterate_phdr(visit, &id);
  return id;
}

}  // namespace

Result<std::string> TuningKey() {
  cudaDeviceProp properties{};
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaDriverGetVersion(&driver));
  return Concat("build ", BuildId(), ", ", Printable(properties.name), ", ",
                properties.multiProcessorCount, " multiprocessors, second-level cache of ",
                DeviceAttribute(cudaDevAttrL2CacheSize), " bytes, driver ", driver, ", overlap ",
                internal::HasGridDependencies() ? 1 : 0);
}

}  // namespace moeserve::cuda
