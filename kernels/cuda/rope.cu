#include "kernels/base/check.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/launch.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;

// One row per thread block: its angles once, then all heads.
__global__ void __launch_bounds__(kThreads) RopeKernel(const RopeLaunch a) {
  const int row = blockIdx.x;
  if (a.valid_rows != nullptr && row >= *a.valid_rows) return;
  const int token = a.token_of_row == nullptr ? row : a.token_of_row[row];
  if (a.step.sequence[token] < 0) return;
  const int pairs = a.dimensions / 2;
  float* cosine = DynamicShared<float>();
  float* sine = cosine + pairs;
  const int position = a.step.position[token];
  for (int i = threadIdx.x; i < pairs; i += kThreads) {
    const double angle = position * pow(a.theta, -2.0 * i / a.dimensions);
    cosine[i] = static_cast<float>(cos(angle));
    sine[i] = static_cast<float>(sin(angle));
  }
  __syncthreads();
  float* rows = a.rows + row * a.stride;
#pragma unroll 4
  for (int n = threadIdx.x; n < a.heads * pairs; n += kThreads) {
    const int head = n / pairs, i = n % pairs;
    float* x = rows + head * a.head_dim + (a.interleaved ? 2 * i : i);
    float* y = x + (a.interleaved ? 1 : pairs);
    const float u = *x, v = *y;
    *x = u * cosine[i] - v * sine[i];
    *y = v * cosine[i] + u * sine[i];
  }
}

}  // namespace

void LaunchRope(const RopeLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(
      args.dimensions >= 0 && args.dimensions % 2 == 0 && args.dimensions <= args.head_dim,
      "rotary dimensions");
  if (args.dimensions == 0) return;
  Launch(RopeKernel,
         {.grid = dim3(args.num_rows),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<size_t>(args.dimensions) * sizeof(float),
          .stream = stream},
         args);
}

}  // namespace moeserve::cuda
