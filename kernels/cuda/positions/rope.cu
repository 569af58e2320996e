#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/positions/rope.cuh"
#include "kernels/cuda/positions/rope.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAngleThreads = 64;  // sines in double precision are slow, so many small blocks share
                                   // the work

// Each thread computes the angle of one pair of dimensions for one token.
__global__ void __launch_bounds__(kAngleThreads) RopeAnglesKernel(const RopeAnglesLaunch a) {
  GridDependencyPass();
  const int i = static_cast<int>(blockIdx.y * kAngleThreads + threadIdx.x);
  if (i >= a.pairs) return;
  const int64_t token = blockIdx.x;
  const bool is_long = a.long_frequencies != nullptr && a.step.long_sequence[token] != 0;
  const double frequency = is_long ? a.long_frequencies[i] : a.frequencies[i];
  double magnitude = is_long ? a.long_magnitude : a.magnitude;
  if (a.xpos_rates != nullptr) magnitude *= exp(a.step.position[token] * a.xpos_rates[i]);
  const double angle = a.step.position[token] * frequency;
  a.angles[token * a.pairs + i] = make_float2(static_cast<float>(cos(angle) * magnitude),
                                              static_cast<float>(sin(angle) * magnitude));
}

// Each thread block rotates one row.
__global__ void __launch_bounds__(kThreads) RopeKernel(const RopeLaunch a) {
  GridDependencyPass();
  const int row = blockIdx.x;
  if (a.valid_rows != nullptr && row >= *a.valid_rows) return;
  const int token = a.token_of_row == nullptr ? row : a.token_of_row[row];
  if (a.step.sequence[token] < 0) return;
  const int pairs = a.dimensions / 2;
  const float2* angles = a.angles + int64_t{token} * pairs;
  float* rows = a.rows + row * a.stride + a.first;
#pragma unroll 4
  for (int n = threadIdx.x; n < a.heads * pairs; n += kThreads) {
    const int head = n / pairs, i = n % pairs;
    float* x = rows + head * a.head_dim + (a.interleaved ? 2 * i : i);
    float* y = x + (a.interleaved ? 1 : a.distance);
    Turn(*x, *y, angles[i]);
  }
}

// Each thread block scales one row.
__global__ void __launch_bounds__(kThreads)
    PositionScaleKernel(const StepView step, const PositionScale scale, float* rows, int64_t cols,
                        int64_t stride) {
  GridDependencyPass();
  const int64_t token = blockIdx.x;
  if (step.sequence[token] < 0) return;
  const auto factor = static_cast<float>(scale.Of(step.position[token]));
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) rows[token * stride + i] *= factor;
}

}  // namespace

void LaunchPositionScale(const StepView& step, const PositionScale& scale, float* rows,
                         int64_t cols, int64_t stride, cudaStream_t stream) {
  Launch(PositionScaleKernel,
         {.grid = dim3(static_cast<unsigned>(step.tokens)),
          .block = dim3(kThreads),
          .stream = stream,
          .overlaps_predecessor = true},
         step, scale, rows, cols, stride);
}

void LaunchRopeAngles(const RopeAnglesLaunch& args, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((args.pairs + kAngleThreads - 1) / kAngleThreads);
  Launch(RopeAnglesKernel,
         {.grid = dim3(static_cast<unsigned>(args.step.tokens), blocks),
          .block = dim3(kAngleThreads),
          .stream = stream,
          .overlaps_predecessor = true},
         args);
}

void LaunchRope(const RopeLaunch& args, cudaStream_t stream) {
  const int pairs = args.dimensions / 2;
  RopeLaunch a = args;
  if (a.distance == 0) a.distance = pairs;
  MOESERVE_CHECK(args.dimensions >= 0 && args.dimensions % 2 == 0 && a.distance >= pairs &&
                     a.first + a.distance + pairs <= a.head_dim,
                 "rotary dimensions");
  if (args.dimensions == 0) return;
  Launch(RopeKernel,
         {.grid = dim3(args.num_rows),
          .block = dim3(kThreads),
          .stream = stream,
          .overlaps_predecessor = true},
         a);
}

}  // namespace moeserve::cuda
