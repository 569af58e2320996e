// The formats of weights of the CUDA backend, for tests that run all of their products.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/cuda/quantized/linear_fp8.h"
#include "kernels/cuda/quantized/linear_grouped.h"
#include "kernels/cuda/quantized/linear_int4.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/cuda/quantized/linear_mxfp4.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {

struct BankFormat {
  std::string name;
  LinearBankShape shape = {};  // without sizes
  DType rows = DType::kBF16;
};
inline void PrintTo(const BankFormat& c, std::ostream* out) { *out << c.name; }

inline std::vector<BankFormat> BankFormats() {
  LinearBankShape bf16;
  bf16.weight_dtype = DType::kBF16;
  std::vector<BankFormat> cases = {{"f32", {}, DType::kF32}, {"bf16", bf16}};
  cases.push_back({"mxfp4", bf16});
  cases.back().shape.mxfp4 = true;
  cases.push_back({"fp8", bf16});
  cases.back().shape.fp8 = true;
  for (const Quantization type : {Quantization::kInt8Channel, Quantization::kInt8,
                                  Quantization::kInt4, Quantization::kInt4K}) {
    std::string name(Name(type));
    std::ranges::replace(name, '-', '_');
    cases.push_back({name, bf16});
    cases.back().shape.quantization = type;
  }
  return cases;
}

// Loads a half of an expert, whose numbers depend on the expert and the half alone.
inline void LoadHalf(cuda::CudaLinearBank& bank, int e, LinearBank::Half half) {
  const int64_t in = bank.shape().in_features_of(e), out = bank.shape().out_features[e];
  if (out == 0) return;
  Random random(static_cast<uint64_t>(e * 2 + (half == LinearBank::Half::kGate)));
  if (bank.shape().bias) {
    bank.LoadBias(e, half, 0, MakeTensor(random.Normals(out), {out}));
  }
  if (bank.is_fp8()) {
    std::vector<uint8_t> codes;
    for (int64_t i = 0; i < in * out; ++i) {
      codes.push_back(static_cast<uint8_t>(random.Below(2) * 128 + random.Below(80)));
    }
    Fp8Matrix matrix;
    matrix.rows = out;
    matrix.columns = matrix.row_stride = in;
    matrix.values = codes.data();
    for (int64_t i = 0; i < out * matrix.groups(); ++i) {
      matrix.scales.push_back(0.25f + 0.01f * static_cast<float>(random.Below(50)));
    }
    return bank.LoadFp8(e, half, 0, matrix);
  }
  std::vector<float> values = random.Normals(in * out);
  if (bank.is_mxfp4()) {
    constexpr float kNumbers[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (float& v : values) v = (v < 0 ? -1.0f : 1.0f) * kNumbers[random.Below(8)];
  }
  bank.LoadWeight(
      e, half, 0,
      MakeTensor(values, {out, in}, bank.has_integers() ? DType::kF32 : bank.shape().weight_dtype));
}

// Returns the kernels that multiply by the bank, all with the same bits.
inline std::vector<cuda::LinearTile> TilesOf(const LinearArgs& args) {
  const auto& bank = static_cast<const cuda::CudaLinearBank&>(*args.bank);
  std::vector<cuda::LinearTile> tiles;
  if (bank.is_int8()) {
    tiles = cuda::Int8TilesThatFit(args);
  } else if (bank.is_int4()) {
    tiles = cuda::Int4TilesThatFit();
  } else if (bank.is_grouped()) {
    tiles = cuda::GroupedTilesThatFit();
  } else if (bank.is_mxfp4()) {
    tiles = cuda::Mxfp4TilesThatFit(args);
  } else if (bank.is_fp8()) {
    tiles = cuda::Fp8TilesThatFit(args);
  } else {
    tiles = cuda::LinearTilesThatFit(args);
  }
  tiles.push_back(cuda::LinearTile::kAuto);
  return tiles;
}

inline void MultiplyBy(const LinearArgs& args, cuda::LinearTile tile) {
  const auto& bank = static_cast<const cuda::CudaLinearBank&>(*args.bank);
  if (bank.has_integers()) {
    cuda::Int8Rows rounded;
    ASSERT_TRUE(rounded.Reserve(args).ok());
    if (bank.is_int8()) {
      cuda::LaunchLinearInt8(args, tile, rounded, nullptr);
    } else if (bank.is_int4()) {
      cuda::LaunchLinearInt4(args, tile, rounded, nullptr);
    } else {
      cuda::LaunchLinearGrouped(args, tile, rounded, nullptr);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  } else if (bank.is_fp8()) {
    cuda::LaunchLinearFp8(args, tile, nullptr);
  } else if (bank.is_mxfp4()) {
    cuda::LaunchLinearMxfp4(args, tile, nullptr);
  } else {
    cuda::LaunchLinear(args, tile, nullptr);
  }
}

}  // namespace moeserve::testing
