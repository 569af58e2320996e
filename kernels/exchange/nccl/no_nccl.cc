// This file is linked if CMake found no headers of NCCL.
#include "kernels/exchange/nccl/nccl_exchange.h"

namespace moeserve {

Result<std::unique_ptr<NcclLibrary>> OpenNccl() {
  return absl::UnimplementedError(
      "this build has no NCCL (neither nvcc nor nccl.h, or only one, was found when it was "
      "configured)");
}

}  // namespace moeserve
