// Times the expert products of layers of known models on a CUDA device, and measures the device's
// copy bandwidth for comparison.
//
//   cuda_linear_bench [TEXT [int8]]     measures only layers whose name contains TEXT; with int8,
//                                       the weights are of type int8-channel
//
// Prints one line per measurement: layer, tokens, kernel, median microseconds, bytes of weights
// read per second, and floating-point operations per second. The last lines of a layer report
// whether the results of all kernels are bit-identical.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/fused/fused_expert.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::LinearTile;

constexpr int kRounds = 20;

void Require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Returns the median time of one call in microseconds.
double Microseconds(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin));
  Require(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) call();
  std::vector<float> times;
  for (int i = 0; i < kRounds; ++i) {
    Require(cudaEventRecord(begin));
    call();
    Require(cudaEventRecord(end));
    Require(cudaEventSynchronize(end));
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(milliseconds);
  }
  Require(cudaEventDestroy(begin));
  Require(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return 1e3 * times[kRounds / 2];
}

// Fills device memory with random bf16 values of about +-1/32.
void Randomise(void* device, int64_t bytes) {
  static const std::vector<Bf16> noise = [] {
    Random random(1);
    std::vector<Bf16> v(size_t{1} << 22);
    for (Bf16& b : v) b = Bf16FromF32(static_cast<float>(random.Uniform() - 0.5) / 16);
    return v;
  }();
  const auto size = static_cast<int64_t>(noise.size() * sizeof(Bf16));
  for (int64_t at = 0; at < bytes; at += size) {
    Require(cudaMemcpy(static_cast<char*>(device) + at, noise.data(),
                       static_cast<size_t>(std::min(size, bytes - at)), cudaMemcpyHostToDevice));
  }
}

cuda::DeviceMemory Reserve(int64_t bytes) {
  auto memory = std::move(cuda::DeviceMemory::Allocate(static_cast<size_t>(bytes))).value();
  Randomise(memory.data(), bytes);
  return memory;
}

std::unique_ptr<cuda::CudaLinearBank> RandomBank(LinearBankShape shape) {
  auto bank = std::move(cuda::CudaLinearBank::Create(std::move(shape))).value();
  std::vector<float> scales;
  for (int e = 0; bank->is_int8() && e < bank->num_experts(); ++e) {
    scales.resize(scales.size() + static_cast<size_t>(bank->entry(e).row_blocks) * 64, 1e-3f);
  }
  const size_t scale_bytes = scales.size() * sizeof(float);
  Randomise(const_cast<char*>(bank->weights()), bank->bytes() - static_cast<int64_t>(scale_bytes));
  if (!scales.empty()) {
    Require(cudaMemcpy(const_cast<float*>(bank->scales()), scales.data(), scale_bytes,
                       cudaMemcpyHostToDevice));
  }
  return bank;
}

// Launches a product with bf16 or int8-channel weights.
void Multiply(const LinearArgs& args, LinearTile tile) {
  if (!static_cast<const cuda::CudaLinearBank&>(*args.bank).is_int8()) {
    return cuda::LaunchLinear(args, tile, nullptr);
  }
  static cuda::Int8Rows rows;
  if (rows.MustGrow(args)) {
    Require(cudaDeviceSynchronize());
    if (!rows.Reserve(args).ok()) Require(cudaErrorMemoryAllocation);
  }
  cuda::LaunchLinearInt8(args, tile, rows, nullptr);
}

bool Fits(const LinearArgs& args, LinearTile tile) {
  const bool int8 = static_cast<const cuda::CudaLinearBank&>(*args.bank).is_int8();
  const std::vector<LinearTile> tiles =
      int8 ? cuda::Int8TilesThatFit(args) : cuda::LinearTilesThatFit(args);
  return tile == LinearTile::kAuto || std::find(tiles.begin(), tiles.end(), tile) != tiles.end();
}

struct Layer {
  std::string name;
  int model;
  std::vector<int> widths;
  int k;
  bool gated;
  int heads;  // sub-tokens per token
};

bool SameBytes(const cuda::DeviceMemory& a, const cuda::DeviceMemory& b, size_t bytes) {
  std::vector<char> x(bytes), y(bytes);
  Require(cudaMemcpy(x.data(), a.data(), bytes, cudaMemcpyDeviceToHost));
  Require(cudaMemcpy(y.data(), b.data(), bytes, cudaMemcpyDeviceToHost));
  return x == y;
}

constexpr struct {
  LinearTile tile;
  const char* name;
} kKernels[] = {{LinearTile::kAuto, "auto"},
                {LinearTile::kRows8, "rows 8"},
                {LinearTile::kRows16, "rows 16"},
                {LinearTile::kRows32, "rows 32"},
                {LinearTile::kRows64, "rows 64"},
                {LinearTile::kRows128, "rows 128"},
                {LinearTile::kStream8x16, "stream 8x16"},
                {LinearTile::kStream8x64, "stream 8x64"},
                {LinearTile::kStream32x16, "stream 32x16"},
                {LinearTile::kStream32x64, "stream 32x64"},
                {LinearTile::kWarpgroup128, "wgmma 128"},
                {LinearTile::kWarpgroup192, "wgmma 192"},
                {LinearTile::kWarpgroup256, "wgmma 256"},
                {LinearTile::kWarpgroup192x192, "wgmma 192x192"},
                {LinearTile::kStationary, "stationary"},
                {LinearTile::kWarpgroup256Pair, "wgmma 128x256, pairs"},
                {LinearTile::kWarpgroup192x192Pair, "wgmma 192x192, pairs"}};

void Measure(const Layer& layer, int tokens, Quantization type) {
  const int width = layer.model / layer.heads;
  const int rows = tokens * layer.heads;
  const int experts = static_cast<int>(layer.widths.size());
  Random random(static_cast<uint64_t>(tokens));
  std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
  for (auto& r : routes) {
    while (static_cast<int>(r.size()) < layer.k) {
      const int e = random.Below(experts);
      if (std::find(r.begin(), r.end(), e) == r.end()) r.push_back(e);
    }
  }
  const DevicePlan plan(experts, routes, 0);
  const int64_t assignments = plan.assignments();
  const int halves = layer.gated ? 2 : 1;
  const auto up = RandomBank({{width}, layer.widths, layer.gated, false, DType::kBF16, type});
  const auto down = RandomBank({layer.widths, std::vector<int>(layer.widths.size(), width), false,
                                false, DType::kBF16, type});
  const int widest = *std::max_element(layer.widths.begin(), layer.widths.end());
  const int64_t hidden_stride = (widest + 15) / 16 * 16;
  const cuda::DeviceMemory input = Reserve(int64_t{rows} * width * 2);
  const cuda::DeviceMemory hidden = Reserve(assignments * hidden_stride * 2);
  const cuda::DeviceMemory results = Reserve(assignments * width * 2);
  const cuda::DeviceMemory other = Reserve(assignments * width * 2);
  const RowsView x{input.data(), DType::kBF16, rows, width, width};
  const RowsView h{hidden.data(), DType::kBF16, assignments, widest, hidden_stride};
  const RowsView y{results.data(), DType::kBF16, assignments, width, width};
  RowsView z = y;
  z.data = other.data();

  double weight_bytes[2] = {0, 0}, operations[2] = {0, 0};
  for (int e = 0; e < experts; ++e) {
    const double n = plan.offsets[e + 1] - plan.offsets[e];
    const double size = static_cast<double>(width) * layer.widths[e];
    const double bytes = type == Quantization::kNone ? 2.0 : 1.0;  // of a weight
    if (n > 0) weight_bytes[0] += bytes * halves * size;
    if (n > 0) weight_bytes[1] += bytes * size;
    operations[0] += 2.0 * n * halves * size;
    operations[1] += 2.0 * n * size;
  }
  const LinearArgs up_args{.bank = up.get(),
                           .plan = &plan.plan,
                           .gather = true,
                           .input = x,
                           .output = h,
                           .activation = ActivationKind::kSilu,
                           .pad_output = true};
  const LinearArgs down_args{.bank = down.get(), .plan = &plan.plan, .input = h, .output = y};
  const auto run_up = [&](LinearTile tile) { Multiply(up_args, tile); };
  const auto run_down = [&](LinearTile tile, const RowsView& to) {
    LinearArgs args = down_args;
    args.output = to;
    Multiply(args, tile);
  };
  const auto print = [&](const char* kernel, const char* part, double us, int first, int last) {
    double bytes = 0, flop = 0;
    for (int i = first; i <= last; ++i) {
      bytes += weight_bytes[i];
      flop += operations[i];
    }
    std::printf("%-16s T %5d  %-10s %-5s %9.1f us  %6.2f TB/s  %6.1f TFLOP/s\n", layer.name.c_str(),
                tokens, kernel, part, us, bytes / us * 1e-6, flop / us * 1e-6);
    std::fflush(stdout);
  };
  const double rows_per_expert = static_cast<double>(assignments) / experts;
  for (const auto& kernel : kKernels) {
    // Skip tiles that are much smaller or larger than the number of rows.
    const int tile_rows = 4 << static_cast<int>(kernel.tile);
    if (kernel.tile >= LinearTile::kRows8 && kernel.tile <= LinearTile::kRows128 &&
        (tile_rows * 8 < rows_per_expert || tile_rows > 16 * rows_per_expert + 16)) {
      continue;
    }
    if (kernel.tile >= LinearTile::kWarpgroup && rows_per_expert < 16) continue;
    const bool streams =
        kernel.tile >= LinearTile::kStream8x16 && kernel.tile <= LinearTile::kStream32x64;
    if (streams && rows_per_expert > 64) continue;
    if (!Fits(up_args, kernel.tile) || !Fits(down_args, kernel.tile)) continue;
    print(kernel.name, "up", Microseconds([&] { run_up(kernel.tile); }), 0, 0);
    print(kernel.name, "down", Microseconds([&] { run_down(kernel.tile, y); }), 1, 1);
  }
  if (cuda::FusedExpertFits(*up, *down)) {
    const cuda::FusedExpertArgs args{.up = up.get(),
                                     .down = down.get(),
                                     .plan = &plan.plan,
                                     .gather = true,
                                     .input = x,
                                     .output = z,
                                     .activation = ActivationKind::kSilu};
    // The last one is compared with the pair.
    for (const cuda::FusedTile tile : cuda::FusedTilesThatFit(args)) {
      const double us = Microseconds([&] { cuda::LaunchFusedExpert(args, tile, nullptr); });
      print(tile == cuda::FusedTile::kMma ? "fused mma" : "fused wg", "both", us, 0, 1);
    }
    run_up(LinearTile::kAuto);
    run_down(LinearTile::kAuto, y);
    std::printf("%-16s T %5d  fused and pair: %s bits\n", layer.name.c_str(), tokens,
                SameBytes(results, other, static_cast<size_t>(assignments) * width * 2)
                    ? "the same"
                    : "DIFFERENT");
  }
  run_up(LinearTile::kRows32);
  run_down(LinearTile::kRows128, y);
  run_down(LinearTile::kWarpgroup256, z);
  std::printf("%-16s T %5d  mma and wgmma: %s bits\n", layer.name.c_str(), tokens,
              SameBytes(results, other, static_cast<size_t>(assignments) * width * 2)
                  ? "the same"
                  : "DIFFERENT");
}

// Measures the LM head: f32 rows and one wide matrix.
void MeasureHead(int vocabulary, int width) {
  const auto bank = RandomBank({{width}, {vocabulary}, false, false, DType::kBF16});
  for (const int rows : {1, 8, 16, 32, 64, 128}) {
    const cuda::DeviceMemory input = Reserve(int64_t{rows} * width * 4);
    const cuda::DeviceMemory output = Reserve(int64_t{rows} * vocabulary * 4);
    const RowsView x{input.data(), DType::kF32, rows, width, width};
    const RowsView y{output.data(), DType::kF32, rows, vocabulary, vocabulary};
    const double us = Microseconds(
        [&] { cuda::LaunchLinear({.bank = bank.get(), .input = x, .output = y}, nullptr); });
    std::printf("head %d x %d, %3d rows %9.1f us  %6.2f TB/s\n", vocabulary, width, rows, us,
                2.0 * vocabulary * width / us * 1e-6);
  }
}

void MeasureCopy() {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const cuda::DeviceMemory from = Reserve(kBytes);
  const cuda::DeviceMemory to = Reserve(kBytes);
  const double us = Microseconds([&] {
    Require(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, nullptr));
  });
  std::printf("copy bandwidth, read and written: %.2f TB/s\n", 2.0 * kBytes / us * 1e-6);
}

int Main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  const bool integers = argc > 2 && std::string(argv[2]) == "int8";
  const Quantization type = integers ? Quantization::kInt8Channel : Quantization::kNone;
  const std::vector<int> hmoe = {2304, 2816, 3328, 3840, 4352, 4864, 5376, 5888};
  const std::vector<Layer> layers = {
      {"mixtral", 4096, std::vector<int>(8, 14336), 2, true, 1},
      {"jetmoe", 2048, std::vector<int>(8, 5632), 2, true, 1},
      {"olmoe", 2048, std::vector<int>(64, 1024), 8, true, 1},
      {"hmoe", 1024, hmoe, 2, true, 1},
      {"hmoe-equal", 1024, std::vector<int>(8, 4096), 2, true, 1},
      {"mh-moe-64", 768, std::vector<int>(64, 3072), 2, false, 4},
      {"mh-moe-8", 768, std::vector<int>(8, 3072), 2, false, 4},
      {"mh-moe-gated-40", 768, std::vector<int>(40, 768), 2, true, 4}};
  MeasureCopy();
  if (!integers && std::string("head").find(only) != std::string::npos) {
    MeasureHead(32000, 4096);
    MeasureHead(50304, 2048);
  }
  for (const Layer& layer : layers) {
    if (layer.name.find(only) == std::string::npos) continue;
    for (const int tokens : {1, 16, 64, 256, 1024, 4096}) Measure(layer, tokens, type);
  }
  return 0;
}

}  // namespace
}  // namespace moeserve::testing

int main(int argc, char** argv) { return moeserve::testing::Main(argc, argv); }
