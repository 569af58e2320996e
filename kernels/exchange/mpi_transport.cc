#include "kernels/exchange/mpi_transport.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "base/error_text.h"
#include "kernels/exchange/mpi/mpi_object.h"

namespace moeserve {
namespace {

constexpr char kFileName[] = "libmoeserve_mpi.so";

}  // namespace

std::string MpiTransportPath() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return kFileName;
  // Beside the program in a build folder, in ../lib/moeserve when it is installed.
  const std::filesystem::path folder = program.parent_path();
  const std::filesystem::path beside = folder / kFileName;
  if (std::filesystem::exists(beside, error)) return beside;
  return (folder / ".." / "lib" / "moeserve" / kFileName).lexically_normal();
}

Result<std::unique_ptr<Transport>> OpenMpiTransport(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(
        Concat(path, ": not found; this program was built or installed without Open MPI"));
  }
  // The components that MPI opens itself look up its symbols, so they must be visible.
  void* const object = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (object == nullptr) return absl::FailedPreconditionError(dlerror());
  const auto version = reinterpret_cast<MpiTransportVersion*>(dlsym(object, kMpiVersionName));
  const auto create = reinterpret_cast<NewMpiTransport*>(dlsym(object, kNewMpiTransportName));
  if (version == nullptr || create == nullptr || version() != kTransportVersion) {
    return absl::FailedPreconditionError(
        Concat(path, ": belongs to another version of this program"));
  }
  const char* reason = nullptr;
  Transport* const transport = create(&reason);
  if (transport == nullptr) return absl::UnavailableError(Concat("MPI: ", reason));
  return std::unique_ptr<Transport>(transport);
}

}  // namespace moeserve
