#include "kernels/registry.h"

#include <map>

#include "base/control_group.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/isa/isa.h"
#include "kernels/cuda/device/device.h"

namespace moeserve {
namespace {

struct RegisteredDevice {
  BackendFactory factory;
  StreamQuery query;
};

std::map<std::string, RegisteredDevice>& RegisteredDevices() {
  static auto* const devices = new std::map<std::string, RegisteredDevice>;
  return *devices;
}

}  // namespace

void RegisterDevice(const std::string& name, BackendFactory factory, StreamQuery query) {
  RegisteredDevices()[name] = {.factory = factory, .query = query};
}

StreamQuery StreamQueryOf(const std::string& device) {
  const auto registered = RegisteredDevices().find(device);
  if (registered != RegisteredDevices().end()) return registered->second.query;
  return device == "cuda" ? cuda::StreamIsIdle : nullptr;
}

Result<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options) {
  if (options.cuda_dense != "own" && options.cuda_dense != "cublaslt") {
    return absl::InvalidArgumentError("cuda-dense '" + options.cuda_dense +
                                      "': expected own or cublaslt");
  }
  if (options.device == "cpu" && options.cuda_dense != "own") {
    return absl::InvalidArgumentError("cuda-dense " + options.cuda_dense +
                                      ": expected device cuda, found cpu");
  }
  const auto registered = RegisteredDevices().find(options.device);
  if (registered != RegisteredDevices().end()) return registered->second.factory(options);
  if (options.device == "cuda") return cuda::CreateDevice(options);
  if (options.device != "cpu") {
    return absl::InvalidArgumentError("device '" + options.device + "': expected cpu or cuda");
  }
  if (options.threads < 0 || options.threads > 1024) {
    return absl::InvalidArgumentError("threads: expected 0 to 1024, found " +
                                      std::to_string(options.threads));
  }
  MOESERVE_ASSIGN_OR_RETURN(const cpu::KernelTable* table, cpu::SelectTable(options.cpu_isa));
  const int threads = options.threads == 0 ? AvailableCores() : options.threads;
  return std::unique_ptr<Backend>(std::make_unique<cpu::CpuBackend>(table, threads));
}

}  // namespace moeserve
