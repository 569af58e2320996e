// The products and epilogues of a consumer warp of linear_stream.cu. The epilogues are also those
// of linear_int8_stream.cu.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/activation.cuh"
#include "kernels/cuda/linear/fp8_widen.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"
#include "kernels/cuda/linear/mxfp4_widen.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kRowBytes = kImageBlock * 2;  // bytes of 64 inputs
constexpr int kStripRows = 16;              // packed rows of a warp
constexpr int kSteps = kImageBlock / 16;    // instructions per 64 inputs

// How a strip of 16 packed rows x 64 inputs is stored, and how a lane loads its operands.
struct Bf16Strips {
  static constexpr bool kScaled = false;
  static constexpr int kStripBytes = kStripRows * kRowBytes;
  static constexpr int kBlockBytes = kImageBlock * kRowBytes;
  __device__ static void Load(const char* strip, uint32_t (&weights)[kSteps][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      LoadMatrix4(weights[k16],
                  strip + lane % 16 * kRowBytes + ((k16 * 2 + lane / 16) ^ (lane & 7)) * 16);
    }
  }
};
struct Mxfp4Strips {
  static constexpr bool kScaled = false;
  static constexpr int kStripBytes = kMxfp4StripBytes;
  static constexpr int kBlockBytes = kMxfp4BlockBytes;
  __device__ static void Load(const char* strip, uint32_t (&weights)[kSteps][4]) {
    Mxfp4Lane lane;
    lane.Load(strip);
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) lane.Widen(k16, weights[k16]);
  }
};

// kScaled: two adjacent blocks share scales, half of which are in each of them.
struct Fp8Strips {
  static constexpr bool kScaled = true;
  static constexpr int kStripBytes = kFp8StripBytes;
  static constexpr int kBlockBytes = kFp8BlockBytes;
  __device__ static void Load(const char* strip, uint32_t (&weights)[kSteps][4]) {
#pragma unroll
    for (int half = 0; half < kSteps / 2; ++half) {
      Fp8Lane lane;
      lane.Load(strip, half);
      lane.Widen(0, weights[half * 2]);
      lane.Widen(1, weights[half * 2 + 1]);
    }
  }
};

// The epilogues that have a kernel of their own; kAny handles all settings.
enum class Epilogue : uint8_t { kNone, kGatedSilu, kGelu, kAny };

inline Epilogue StreamEpilogueOf(const LinearParams& p) {
  if (p.gated) {
    return IsPlain(p.activation) && p.activation.kind == ActivationKind::kSilu
               ? Epilogue::kGatedSilu
               : Epilogue::kAny;
  }
  if (p.activation.kind == ActivationKind::kNone) return Epilogue::kNone;
  return p.activation.kind == ActivationKind::kGelu ? Epilogue::kGelu : Epilogue::kAny;
}

// The parts of a stage are 64 inputs each. In a bank with one slice per sum, all consumers compute
// both parts of a stage, which are adjacent; otherwise, each part is that of one slice.
struct StreamLayout {
  int parts;  // per stage
  int stages;
  int slices;  // the largest number of slices of a sum
};

template <typename StripsArg, int kStripsArg, int kNTilesArg, bool kSlicedArg>
struct StreamShape {
  using Strips = StripsArg;
  static constexpr int kStrips = kStripsArg;
  static constexpr int kNTiles = kNTilesArg;  // instructions per strip along the rows
  static constexpr bool kSliced = kSlicedArg;
  static constexpr int kTileRows = kNTiles * 8;
  static constexpr int kTileImageRows = kStrips * kStripRows;
  static constexpr int kWeightBytes = kStrips * Strips::kStripBytes;
  static constexpr int kPartBytes = kWeightBytes + kTileRows * kRowBytes;
  static constexpr int kSumsBytes = kNTiles * 4 * 32 * static_cast<int>(sizeof(float));
  static constexpr int kMostParts = !kSliced ? 2 : kStrips == 1 ? 8 : 5;
  static constexpr int kMostThreads = 32 * (1 + kStrips * (kSliced ? kMostParts : 1));
};

// The operands of the products of 16 packed rows and 64 inputs.
template <int kNTiles>
struct Fragments {
  uint32_t weights[kSteps][4];
  uint32_t rows[kSteps][kNTiles][2];
  float scale;  // of the lane in this block, if there is one
};

template <typename S>
__device__ __forceinline__ void LoadFragments(Fragments<S::kNTiles>& f, const char* part, int strip,
                                              int n_tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  S::Strips::Load(part + strip * S::Strips::kStripBytes, f.weights);
  if constexpr (S::Strips::kScaled) {
    f.scale = Fp8Lane::Scale(part + strip * S::Strips::kStripBytes);
  }
  const char* const rows = part + S::kWeightBytes;
  if constexpr (S::kNTiles == 1) {
#pragma unroll
    for (int k32 = 0; k32 < kSteps / 2; ++k32) {
      uint32_t both[4];
      LoadMatrix4(both, rows + lane % 8 * kRowBytes + ((k32 * 4 + lane / 8) ^ (lane & 7)) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) f.rows[k32 * 2 + i / 2][0][i % 2] = both[i];
    }
  } else {
    const char* const row = rows + (lane % 8 + lane / 16 * 8) * kRowBytes;
#pragma unroll
    for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
      if (pair * 2 >= n_tiles) break;
#pragma unroll
      for (int k16 = 0; k16 < kSteps; ++k16) {
        uint32_t both[4];
        LoadMatrix4(both,
                    row + pair * 16 * kRowBytes + ((k16 * 2 + lane / 8 % 2) ^ (lane & 7)) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) f.rows[k16][pair * 2 + i / 2][i % 2] = both[i];
      }
    }
  }
}

template <int kNTiles>
__device__ __forceinline__ void Multiply(float (&sums)[kNTiles][4], const Fragments<kNTiles>& f,
                                         int n_tiles) {
  if constexpr (kNTiles == 1) {
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) MmaBf16(sums[0], f.weights[k16], f.rows[k16][0]);
  } else {
#pragma unroll
    for (int pair = 0; pair < kNTiles / 2; ++pair) {
      if (pair * 2 >= n_tiles) break;
#pragma unroll
      for (int k16 = 0; k16 < kSteps; ++k16) {
        MmaBf16(sums[pair * 2], f.weights[k16], f.rows[k16][pair * 2]);
        MmaBf16(sums[pair * 2 + 1], f.weights[k16], f.rows[k16][pair * 2 + 1]);
      }
    }
  }
}

[[maybe_unused]] __device__ __forceinline__ void StoreOutput(const LinearParams& p, char* row,
                                                             int column, float value) {
  if (p.output_bf16) {
    reinterpret_cast<uint16_t*>(row)[column] = static_cast<uint16_t>(PackBf16(value, 0.0f));
  } else {
    reinterpret_cast<float*>(row)[column] = value;
  }
}

// Computes the outputs of a warp from its sums, with the bits of StoreLinearTile(). `range` begins
// at the warp's strip.
template <Epilogue kEpilogue, int kNTiles>
__device__ __forceinline__ void StoreStrip(const LinearParams& p, const LinearBankEntry& entry,
                                           const LinearTileRange& range,
                                           const float (&sums)[kNTiles][4]) {
  constexpr bool kAny = kEpilogue == Epilogue::kAny;
  const bool gated = kAny ? p.gated : kEpilogue == Epilogue::kGatedSilu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int limit = p.pad_output ? (entry.out_features + 15) / 16 * 16 : entry.out_features;
  const int column = (gated ? range.image_row / 2 : range.image_row) + lane / 4;
  float bias[2] = {};
  if (p.bias != nullptr) {
    const float* const b = p.bias + entry.bias + range.image_row + lane / 4;
    bias[0] = b[0];
    bias[1] = b[8];
  }
#pragma unroll
  for (int nt = 0; nt < kNTiles; ++nt) {
    if (nt * 8 >= range.rows) break;
    // low: this lane's first output of two adjacent rows; high: its second output, or the up half.
    float low[2] = {sums[nt][0] + bias[0], sums[nt][1] + bias[0]};
    float high[2] = {sums[nt][2] + bias[1], sums[nt][3] + bias[1]};
    if constexpr (kEpilogue == Epilogue::kGatedSilu) {
      ActivateEach<ActivationKind::kSilu>(p.output_bf16, low);
      low[0] *= high[0];
      low[1] *= high[1];
    } else if constexpr (kEpilogue == Epilogue::kGelu) {
      Activate(ActivationKind::kGelu, p.output_bf16, low);
      Activate(ActivationKind::kGelu, p.output_bf16, high);
    } else if constexpr (kAny) {
      if (gated) {
        ActivateGated(p.activation, p.output_bf16, low, high);
      } else {
        Activate(p.activation.kind, p.output_bf16, low);
        Activate(p.activation.kind, p.output_bf16, high);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = nt * 8 + lane % 4 * 2 + i;
      if (r >= range.rows) continue;
      char* const row = LinearOutputRow(p, range, range.row + r);
      if (column < limit) StoreOutput(p, row, column, column < entry.out_features ? low[i] : 0.0f);
      if (!gated && column + 8 < limit) {
        StoreOutput(p, row, column + 8, column + 8 < entry.out_features ? high[i] : 0.0f);
      }
    }
  }
}

}  // namespace
}  // namespace moeserve::cuda
