// Banks whose experts' images lie anywhere in device memory, and come and go: the bits of banks
// with all images together.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/cuda/fused/fused_expert.h"
#include "tests/cuda/bank_formats.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::BankMemory;
using cuda::CudaLinearBank;
using cuda::DeviceMemory;
using cuda::LinearTile;
using Half = LinearBank::Half;

struct PlacedSizes {
  std::vector<int> in, out;
  bool gated = false, bias = false;
};

// Device memory full of 0xff, a NaN of all types, in which images lie apart.
class Scattered {
 public:
  explicit Scattered(int64_t bytes)
      : memory_(std::move(DeviceMemory::Allocate(static_cast<size_t>(bytes))).value()) {
    EXPECT_EQ(cudaMemset(memory_.data(), 0xff, memory_.bytes()), cudaSuccess);
    next_ = memory_.as<char>() + memory_.bytes();
  }

  // Copies an image to a place below all others; the gaps differ.
  const char* Add(std::span<const char> image) {
    const int64_t bytes = std::ssize(image);
    next_ -= (bytes + 127) / 128 * 128 + 128 * (1 + count_++ % 5);
    EXPECT_GE(next_, memory_.as<char>());
    EXPECT_EQ(cudaMemcpy(next_, image.data(), image.size(), cudaMemcpyHostToDevice), cudaSuccess);
    return next_;
  }
  // Makes an image useless.
  static void Poison(const char* image, int64_t bytes) {
    EXPECT_EQ(cudaMemset(const_cast<char*>(image), 0xff, static_cast<size_t>(bytes)), cudaSuccess);
  }

 private:
  DeviceMemory memory_;
  char* next_;
  int count_ = 0;
};

class PlacedExpertsTest : public ::testing::TestWithParam<BankFormat> {
 protected:
  static LinearBankShape ShapeOf(const PlacedSizes& sizes, const std::vector<bool>& here) {
    LinearBankShape shape = GetParam().shape;
    shape.in_features = sizes.in;
    shape.out_features = sizes.out;
    shape.gated = sizes.gated;
    shape.bias = sizes.bias;
    if (here.empty()) return shape;
    shape.layer_in_features = sizes.in;
    shape.layer_out_features = sizes.out;
    for (size_t e = 0; e < here.size(); ++e) {
      if (!here[e]) shape.out_features[e] = 0;
    }
    return shape;
  }

  // All main halves are loaded before the gates, so a bank in host memory opens images twice.
  static std::unique_ptr<CudaLinearBank> Bank(const PlacedSizes& sizes, BankMemory memory,
                                              const std::vector<bool>& here = {}) {
    auto bank = std::move(CudaLinearBank::Create(ShapeOf(sizes, here), memory)).value();
    for (const Half half : {Half::kMain, Half::kGate}) {
      if (half == Half::kGate && !sizes.gated) continue;
      for (int e = 0; e < bank->num_experts(); ++e) {
        if (!bank->shape().is_absent(e)) LoadHalf(*bank, e, half);
      }
    }
    EXPECT_TRUE(bank->holds_weights());
    if (memory == BankMemory::kHost) bank->FinishLoading();
    return bank;
  }

  // Compares the products of all kernels for rows of the experts that are `used`.
  static void CheckProducts(const PlacedSizes& sizes, const CudaLinearBank& expected_bank,
                            const CudaLinearBank& found_bank, const std::vector<bool>& used) {
    std::vector<std::vector<int>> routes(11);
    for (size_t r = 0; r < routes.size(); ++r) {
      for (size_t e = 0; e < used.size(); ++e) {
        if (used[e] && (r + e) % 3 != 0) routes[r].push_back(static_cast<int>(e));
      }
    }
    const DevicePlan plan(static_cast<int>(used.size()), routes, 0);
    const int in = *std::ranges::max_element(sizes.in);
    const int out = *std::ranges::max_element(sizes.out);
    Random random(77);
    const DeviceRows x(std::ssize(routes), in, RoundUp16(in), GetParam().rows,
                       random.Normals(std::ssize(routes) * in));
    DeviceRows expected(plan.plan.capacity, out, RoundUp16(out), DType::kF32);
    DeviceRows found(plan.plan.capacity, out, RoundUp16(out), DType::kF32);
    const auto args = [&](const CudaLinearBank& bank, const RowsView& y) {
      return LinearArgs{.bank = &bank,
                        .plan = &plan.plan,
                        .gather = true,
                        .input = x.view(),
                        .output = y,
                        .activation = sizes.gated ? ActivationKind::kSilu : ActivationKind::kNone,
                        .pad_output = true};
    };
    const std::vector<LinearTile> tiles = TilesOf(args(expected_bank, expected.view()));
    EXPECT_EQ(TilesOf(args(found_bank, found.view())), tiles);
    for (const LinearTile tile : tiles) {
      MultiplyBy(args(expected_bank, expected.view()), tile);
      MultiplyBy(args(found_bank, found.view()), tile);
      const RowsView a = expected.Fetch(), b = found.Fetch();
      for (int i = 0; i < plan.assignments(); ++i) {
        const int width = sizes.out[static_cast<size_t>(plan.expert[static_cast<size_t>(i)])];
        ASSERT_TRUE(SameBits(a, b, i, i, width))
            << "tile " << static_cast<int>(tile) << " row " << i;
      }
    }
  }

  // Sizes of images are multiples of blocks, so a bank with all together is a reference for them.
  static std::vector<char> ImageOf(const CudaLinearBank& bank, int e) {
    std::vector<char> image(static_cast<size_t>(bank.ImageBytes(e)));
    EXPECT_EQ(cudaMemcpy(image.data(), bank.weights() + bank.entry(e).weights, image.size(),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return image;
  }

  static void CheckMoves(const PlacedSizes& sizes) {
    const auto experts = static_cast<int>(sizes.out.size());
    const auto together = Bank(sizes, BankMemory::kTogether);
    const auto host = Bank(sizes, BankMemory::kHost);
    EXPECT_EQ(host->signature(), together->signature());
    int64_t all = 0;
    for (int e = 0; e < experts; ++e) all += host->ImageBytes(e) + 1024;
    Scattered memory(3 * all);
    std::vector<cuda::PlacedImage> images;
    for (int e = 0; e < experts; ++e) {
      const std::span<const char> image = host->host_image(e);
      const std::vector<char> expected = ImageOf(*together, e);
      ASSERT_EQ(image.size(), expected.size());
      ASSERT_EQ(std::memcmp(image.data(), expected.data(), image.size()), 0) << "expert " << e;
      EXPECT_FALSE(host->is_placed(e));
      images.push_back({e, memory.Add(image)});
    }
    std::vector<bool> used(static_cast<size_t>(experts), true);
    ASSERT_TRUE(host->Place(images, nullptr).ok());
    CheckProducts(sizes, *together, *host, used);

    // One moves, one goes.
    const int moved = experts - 1;
    const cuda::PlacedImage elsewhere{moved, memory.Add(host->host_image(moved))};
    ASSERT_TRUE(host->Place({&elsewhere, 1}, nullptr).ok());
    Scattered::Poison(images[static_cast<size_t>(moved)].image, host->ImageBytes(moved));
    const cuda::PlacedImage none{0, nullptr};
    ASSERT_TRUE(host->Place({&none, 1}, nullptr).ok());
    Scattered::Poison(images[0].image, host->ImageBytes(0));
    EXPECT_FALSE(host->is_placed(0));
    EXPECT_TRUE(host->is_placed(moved));
    used[0] = false;
    CheckProducts(sizes, *together, *host, used);

    // It comes back, to the place of another one.
    const cuda::PlacedImage back[] = {{0, memory.Add(host->host_image(0))}};
    ASSERT_TRUE(host->Place(back, nullptr).ok());
    used[0] = true;
    CheckProducts(sizes, *together, *host, used);
  }
};

TEST_P(PlacedExpertsTest, ProductsHaveTheBitsOfImagesTogether) {
  CheckMoves({{96}, {40, 130, 24, 70}, true, true});
  CheckMoves({{64}, {33, 33, 33}, false, false});
}

// In bf16, such sums have slices.
TEST_P(PlacedExpertsTest, LongSums) { CheckMoves({{1600}, {24, 24}, false, true}); }

// As when ranks exchange experts: an expert that was absent gets the image, biases and scales that
// a bank with this expert alone has loaded, and another one goes.
TEST_P(PlacedExpertsTest, ExpertsMoveBetweenBanks) {
  const PlacedSizes sizes{{96}, {40, 130, 24, 70}, true, true};
  const auto together = Bank(sizes, BankMemory::kTogether);
  const auto bank = Bank(sizes, BankMemory::kSeparate, {true, true, false, false});
  CheckProducts(sizes, *together, *bank, {true, true, false, false});
  auto stream = cuda::Stream::Create();
  ASSERT_TRUE(stream.ok());
  EXPECT_FALSE(bank->CanTake());
  bank->MoveOn(stream->get());
  EXPECT_FALSE(bank->TakesFrom(*together));
  const int64_t before = bank->bytes();
  for (const int expert : {2, 3}) {
    std::vector<bool> here(4, false);
    here[static_cast<size_t>(expert)] = true;
    const auto loaded = Bank(sizes, BankMemory::kSeparate, here);
    ASSERT_TRUE(bank->TakesFrom(*loaded));
    bank->TakeExperts(*loaded);
    EXPECT_TRUE(bank->is_placed(expert));
    EXPECT_EQ(bank->shape().out_features[expert], sizes.out[expert]);
    ASSERT_TRUE(stream->Synchronize().ok());
  }
  const std::shared_ptr<const void> dropped = bank->DropExpert(1);
  ASSERT_NE(dropped, nullptr);
  EXPECT_EQ(bank->DropExpert(1), nullptr);
  EXPECT_EQ(bank->shape().out_features[1], 0);
  EXPECT_FALSE(bank->is_placed(1));
  EXPECT_EQ(bank->bytes(),
            before + bank->ImageBytes(2) + bank->ImageBytes(3) - bank->ImageBytes(1));
  ASSERT_TRUE(stream->Synchronize().ok());
  Scattered::Poison(static_cast<const cuda::DeviceMemory*>(dropped.get())->as<char>(),
                    bank->ImageBytes(1));
  CheckProducts(sizes, *together, *bank, {true, false, true, true});
}

using PlacedFusedExpertsTest = PlacedExpertsTest;

TEST_P(PlacedFusedExpertsTest, FusedExpertsReadScatteredImages) {
  const PlacedSizes up{{64}, {48, 80, 16}, true, false},
      down{{48, 80, 16}, {64, 64, 64}, false, false};
  const auto up_all = Bank(up, BankMemory::kTogether), up_placed = Bank(up, BankMemory::kHost);
  const auto down_all = Bank(down, BankMemory::kTogether);
  const auto down_placed = Bank(down, BankMemory::kHost);
  ASSERT_TRUE(cuda::FusedExpertFits(*up_all, *down_all));
  ASSERT_TRUE(cuda::FusedExpertFits(*up_placed, *down_placed));
  Scattered memory(1 << 20);
  for (CudaLinearBank* bank : {up_placed.get(), down_placed.get()}) {
    for (int e = 0; e < 3; ++e) {
      const cuda::PlacedImage image{e, memory.Add(bank->host_image(e))};
      ASSERT_TRUE(bank->Place({&image, 1}, nullptr).ok());
    }
  }
  const DevicePlan plan(3, {{0, 1}, {0, 2}, {2, 1}}, 0);
  Random random(3);
  const DeviceRows x(3, 64, 64, DType::kBF16, random.Normals(3 * 64));
  for (const cuda::FusedTile tile : {cuda::FusedTile::kMma, cuda::FusedTile::kWarpgroup}) {
    DeviceRows a(6, 64, 64, DType::kF32), b(6, 64, 64, DType::kF32);
    const auto run = [&](const CudaLinearBank& first, const CudaLinearBank& second, DeviceRows& y) {
      cuda::LaunchFusedExpert({.up = &first,
                               .down = &second,
                               .plan = &plan.plan,
                               .gather = true,
                               .input = x.view(),
                               .output = y.view(),
                               .activation = ActivationKind::kSilu},
                              tile, nullptr);
      return y.Fetch();
    };
    const RowsView expected = run(*up_all, *down_all, a);
    const RowsView found = run(*up_placed, *down_placed, b);
    for (int i = 0; i < 6; ++i) ASSERT_TRUE(SameBits(expected, found, i, i, 64));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PlacedExpertsTest, ::testing::ValuesIn(BankFormats()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Formats, PlacedFusedExpertsTest, ::testing::Values(BankFormats()[1]),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
