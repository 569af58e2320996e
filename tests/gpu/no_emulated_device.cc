// Takes the place of the emulated device in programs for a GPU. Tests refer to it, and it is large.
#include "kernels/registry.h"

namespace moeserve::cuda_emulated {

Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions&) {
  return absl::UnimplementedError("device cuda_emulated: this program is for GPUs");
}

}  // namespace moeserve::cuda_emulated
