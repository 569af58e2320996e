// Packs FP8 numbers and their scales into blocks of the image.

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_image.h"

namespace moeserve::cuda {
namespace {

constexpr int kFp8PackThreads = 128;

// Each block packs one row; a thread packs two adjacent numbers at a time.
__global__ void PackFp8Kernel(internal::PackFp8Args a) {
  const int thread = static_cast<int>(threadIdx.x);
  const int r = static_cast<int>(blockIdx.x);
  const int row = ImageRow(a.gated, a.gate_half, a.first_row + r);
  const uint8_t* const source = a.source + static_cast<int64_t>(r) * a.in_features;
  for (int k = thread * 2; k < a.in_features; k += kFp8PackThreads * 2) {
    const uint32_t first = source[k];
    const uint32_t second = k + 1 < a.in_features ? source[k + 1] : 0u;
    if ((first & 0x7f) == 0x7f || (second & 0x7f) == 0x7f) *a.misfit = 1;
    // The other bits of the word belong to another row.
    atomicOr(reinterpret_cast<unsigned*>(a.image + Fp8WordOffset(a.k_blocks, row, k)),
             Fp8WordBits(row, k, first) | Fp8WordBits(row, k + 1, second));
  }
  const int groups = (a.in_features + kFp8ScaleInputs - 1) / kFp8ScaleInputs;
  for (int g = thread; g < groups; g += kFp8PackThreads) {
    *reinterpret_cast<float*>(a.image + Fp8ScaleOffset(a.k_blocks, row, g)) =
        a.scales[static_cast<int64_t>(r) * groups + g];
  }
}

}  // namespace

namespace internal {

void LaunchPackFp8(const PackFp8Args& args, cudaStream_t stream) {
  Launch(PackFp8Kernel, {dim3(static_cast<unsigned>(args.rows)), dim3(kFp8PackThreads), 0, stream},
         args);
}

}  // namespace internal
}  // namespace moeserve::cuda
