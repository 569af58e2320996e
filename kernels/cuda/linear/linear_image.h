// Addresses within the packed weights of linear_bank.h, for host and device.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// Returns the packed row of row `row` of the gate or up half.
MOESERVE_HOST_DEVICE inline int ImageRow(bool gated, bool gate_half, int row) {
  if (!gated) return row;
  return row / 8 * 16 + (gate_half ? 0 : 8) + row % 8;
}

// Returns the byte offset of element (packed row, k) from the start of a matrix whose elements take
// `element_bytes` (2 or 4).
MOESERVE_HOST_DEVICE inline int64_t ImageOffset(int k_blocks, int row, int k, int element_bytes) {
  const int64_t block = static_cast<int64_t>(row / kImageBlock) * k_blocks + k / kImageBlock;
  const int in_row = row % kImageBlock;
  const int byte = k % kImageBlock * element_bytes;
  const int piece = byte / 16 ^ (in_row & 7);
  return (block * kImageBlock + in_row) * kImageBlock * element_bytes + piece * 16 + byte % 16;
}

// Returns the byte offset of integer (packed row, k) from the start of a matrix of int8-channel. A
// block of such a matrix has 64 packed rows of 128 inputs.
MOESERVE_HOST_DEVICE inline int64_t Int8ImageOffset(int k_blocks, int row, int k) {
  const int64_t block = static_cast<int64_t>(row / kImageBlock) * k_blocks + k / kInt8BlockInputs;
  const int in_row = row % kImageBlock;
  const int byte = k % kInt8BlockInputs;
  const int piece = byte / 16 ^ (in_row & 7);
  return (block * kImageBlock + in_row) * kInt8BlockInputs + piece * 16 + byte % 16;
}

// Weights of type int4-k (QuantizedMatrix). For each block of 64 packed rows, a matrix has a strip:
// first the factors m of its rows, in blocks of 1,024 inputs, then its integers and their factors
// s, in blocks of 128 inputs. Both kinds of blocks consist of four tiles of 16 packed rows, in
// which the integers are where a lane of mma.sync m16n8k32 needs them:
// - A tile of factors m has 8 bytes for each lane: the factors of 32 groups of 32 inputs.
// - A tile of integers has two times 16 bytes for each lane, with 64 inputs each: 8 bytes for each
//   32 inputs. Then follow two bytes for each row with the factors s of four groups, those of rows
//   r and r + 8 side by side.
// The 8 bytes of a lane are four integers of each of rows r (first) and r + 8; in each byte, the
// low four bits belong to inputs (or groups) i, the high ones to i + 16. Integers of missing
// inputs, and their factors, are 0.
inline constexpr int kInt4TileRows = 16;
inline constexpr int kInt4TileBytes = 1024 + 32;
inline constexpr int kInt4BlockBytes = kImageBlock / kInt4TileRows * kInt4TileBytes;
inline constexpr int kInt4MinimaInputs = 1024;
inline constexpr int kInt4MinimaTileBytes = 256;
inline constexpr int kInt4MinimaBlockBytes = kImageBlock / kInt4TileRows * kInt4MinimaTileBytes;

// Returns the number of blocks of factors m for `k_blocks` blocks of integers.
MOESERVE_HOST_DEVICE inline int Int4MinimaBlocks(int k_blocks) {
  constexpr int kBlocks = kInt4MinimaInputs / kInt8BlockInputs;
  return (k_blocks + kBlocks - 1) / kBlocks;
}
MOESERVE_HOST_DEVICE inline int64_t Int4StripBytes(int k_blocks) {
  return int64_t{Int4MinimaBlocks(k_blocks)} * kInt4MinimaBlockBytes +
         int64_t{k_blocks} * kInt4BlockBytes;
}

// Weights of types int8 and int4, whose scales belong to groups of inputs. For each block of 64
// packed rows, a matrix has a strip of blocks of 128 inputs, which consist of four tiles of 16
// packed rows. A tile has the integers where a lane of mma.sync m16n8k32 needs them, then the f16
// scales:
// - int8: 16 bytes for each lane and 32 inputs: four integers of each of rows r and r + 8, then
// those
//   16 inputs further on. int4, in two's complement: as the integers of int4-k.
// - The scales of the groups of row r, each followed by that of row r + 8.
// Integers and scales of missing inputs are 0.
MOESERVE_HOST_DEVICE constexpr int GroupedIntegerBytes(bool int4) { return int4 ? 1024 : 2048; }
MOESERVE_HOST_DEVICE constexpr int GroupsOfBlock(bool int4) { return int4 ? 4 : 2; }
MOESERVE_HOST_DEVICE constexpr int GroupedTileBytes(bool int4) {
  return GroupedIntegerBytes(int4) + GroupsOfBlock(int4) * kInt4TileRows * 2;
}
MOESERVE_HOST_DEVICE constexpr int GroupedBlockBytes(bool int4) {
  return kImageBlock / kInt4TileRows * GroupedTileBytes(int4);
}

// Rounded rows for them have, for each block, 128 integers and the scales of four groups.
inline constexpr int kGroupedRowBytes = kInt8BlockInputs + 4 * 4;

// The place of four bits: those from `shift` (0 or 4) on of a byte.
struct NibblePlace {
  int64_t byte;
  int shift;
};

// Returns the place of integer `i` of 32 among the 8 bytes of the lanes, whose bytes are
// `lane_bytes` apart. `row` counts in the tile.
MOESERVE_HOST_DEVICE inline NibblePlace Int4LanePlace(int row, int i, int lane_bytes) {
  const int lane = row % 8 * 4 + i % 16 / 4;
  return {int64_t{lane} * lane_bytes + row / 8 * 4 + i % 4, i / 16 * 4};
}

// Return the places of integer (packed row, k), and of the factors s and m of group `group` of the
// packed row, from the start of a matrix.
MOESERVE_HOST_DEVICE inline NibblePlace Int4ValuePlace(int k_blocks, int row, int k) {
  const int in_block = row % kImageBlock, in_tile = k % kInt8BlockInputs;
  NibblePlace place = Int4LanePlace(in_block % kInt4TileRows, k % 32, 16);
  place.byte += int64_t{row / kImageBlock} * Int4StripBytes(k_blocks) +
                int64_t{Int4MinimaBlocks(k_blocks)} * kInt4MinimaBlockBytes +
                int64_t{k / kInt8BlockInputs} * kInt4BlockBytes +
                in_block / kInt4TileRows * kInt4TileBytes + in_tile / 64 * 512 +
                in_tile / 32 % 2 * 8;
  return place;
}
MOESERVE_HOST_DEVICE inline NibblePlace Int4FactorPlace(int k_blocks, int row, int group) {
  const int in_block = row % kImageBlock, in_tile = row % kInt4TileRows;
  constexpr int kGroups = kInt8BlockInputs / 32;
  const int64_t tile = int64_t{row / kImageBlock} * Int4StripBytes(k_blocks) +
                       int64_t{Int4MinimaBlocks(k_blocks)} * kInt4MinimaBlockBytes +
                       int64_t{group / kGroups} * kInt4BlockBytes +
                       in_block / kInt4TileRows * kInt4TileBytes;
  return {tile + 1024 + in_tile % 8 * 4 + in_tile / 8 * 2 + group % kGroups / 2, group % 2 * 4};
}
// Return the places of integer (packed row, k) of types int8 and int4, and the byte offset of the
// scale of group `group`.
MOESERVE_HOST_DEVICE inline int64_t GroupedTileOffset(bool int4, int k_blocks, int row, int block) {
  return (int64_t{row / kImageBlock} * k_blocks + block) * GroupedBlockBytes(int4) +
         row % kImageBlock / kInt4TileRows * GroupedTileBytes(int4);
}
MOESERVE_HOST_DEVICE inline NibblePlace GroupedValuePlace(bool int4, int k_blocks, int row, int k) {
  const int in_tile = k % kInt8BlockInputs;
  NibblePlace place = Int4LanePlace(row % kInt4TileRows, k % 32, 16);
  place.byte += GroupedTileOffset(int4, k_blocks, row, k / kInt8BlockInputs);
  if (int4) {
    place.byte += in_tile / 64 * 512 + in_tile / 32 % 2 * 8;
  } else {
    place.byte += in_tile / 32 * 512 + place.shift * 2;
    place.shift = 0;
  }
  return place;
}
MOESERVE_HOST_DEVICE inline int64_t GroupedScaleOffset(bool int4, int k_blocks, int row,
                                                       int group) {
  const int groups = GroupsOfBlock(int4), in_tile = row % kInt4TileRows;
  return GroupedTileOffset(int4, k_blocks, row, group / groups) + GroupedIntegerBytes(int4) +
         ((in_tile % 8 * groups + group % groups) * 2 + in_tile / 8) * 2;
}
MOESERVE_HOST_DEVICE inline NibblePlace Int4MinimumPlace(int k_blocks, int row, int group) {
  const int in_block = row % kImageBlock;
  NibblePlace place = Int4LanePlace(in_block % kInt4TileRows, group % 32, 8);
  place.byte += int64_t{row / kImageBlock} * Int4StripBytes(k_blocks) +
                int64_t{group / 32} * kInt4MinimaBlockBytes +
                in_block / kInt4TileRows * kInt4MinimaTileBytes;
  return place;
}

// In a matrix of MXFP4, a strip of 16 packed rows x 64 inputs has a word of 32 bits for each lane
// of a warp and each 16 inputs, at word 4 lane + k / 16: the numbers that the lane needs for
// mma.sync m16n8k16 (ptx.cuh). The four registers of a lane are pairs of bf16. The four bits of a
// number, the highest of which is its sign, lie where shifts of the whole word bring them to the
// bits 15 and 8 to 6 of its half of a register: by 0 (the first register), 4 (the second), -6
// around the word (the third), and 6 or, for bit 8, -2 (the fourth).

// Returns the byte offset of the word of element (packed row, k).
MOESERVE_HOST_DEVICE inline int64_t Mxfp4WordOffset(int k_blocks, int row, int k) {
  const int64_t block = static_cast<int64_t>(row / kImageBlock) * k_blocks + k / kImageBlock;
  const int strip = row % kImageBlock / kMxfp4StripRows;
  const int lane = row % 8 * 4 + k % 8 / 2;
  return block * kMxfp4BlockBytes + strip * kMxfp4StripBytes +
         (lane * 4 + k % kImageBlock / 16) * 4;
}

// Returns the bits of the number `code`, 0 to 15, in the word of element (packed row, k).
MOESERVE_HOST_DEVICE inline uint32_t Mxfp4WordBits(int row, int k, uint32_t code) {
  const uint32_t bits = ((code & 8) << 12 | (code & 7) << 6) << (k % 2 * 16);
  switch (row % 16 / 8 + k % 16 / 8 * 2) {
    case 0:
      return bits;
    case 1:
      return bits >> 4;
    case 2:
      return bits << 6 | bits >> 26;
    default:
      return (bits & 0x80c080c0u) >> 6 | (bits & 0x01000100u) << 2;
  }
}

// Returns the byte offset of the scale of element (packed row, k). A scale s stands for 2^(s -
// 253). The four bytes of the packed rows r and r + 8 of a strip are adjacent: those for the first
// 32 inputs, then those for the others.
MOESERVE_HOST_DEVICE inline int64_t Mxfp4ScaleOffset(int k_blocks, int row, int k) {
  const int64_t block = static_cast<int64_t>(row / kImageBlock) * k_blocks + k / kImageBlock;
  const int strip = row % kImageBlock / kMxfp4StripRows;
  return block * kMxfp4BlockBytes + strip * kMxfp4StripBytes + 512 + row % 8 * 4 +
         k % kImageBlock / 32 * 2 + row % 16 / 8;
}

// In a matrix of FP8, a strip of 16 packed rows x 64 inputs has two words of 32 bits for each lane
// and each 16 inputs, those of its numbers of inputs 0 to 7 and of inputs 8 to 15: words 0 to 3 of
// a lane in its 16 of the first 512 bytes, words 4 to 7 in the second 512. A word has the numbers
// of two registers of mma.sync m16n8k16, those of packed rows r and r + 8. In each half of the
// word, the bits 15 and 10 to 4 are the first number, as in a register; the second one has its sign
// at bit 11, its lower four bits at bits 3 to 0, and the three between at bits 14 to 12.

// Returns the byte offset of the word of element (packed row, k).
MOESERVE_HOST_DEVICE inline int64_t Fp8WordOffset(int k_blocks, int row, int k) {
  const int64_t block = static_cast<int64_t>(row / kImageBlock) * k_blocks + k / kImageBlock;
  const int strip = row % kImageBlock / kFp8StripRows;
  const int lane = row % 8 * 4 + k % 8 / 2;
  const int word = k % kImageBlock / 8;
  return block * kFp8BlockBytes + strip * kFp8StripBytes + word / 4 * 512 + lane * 16 +
         word % 4 * 4;
}

// Returns the bits of the number `code` (E4M3) in the word of element (packed row, k).
MOESERVE_HOST_DEVICE inline uint32_t Fp8WordBits(int row, int k, uint32_t code) {
  const uint32_t bits = row % 16 < 8 ? (code & 0x80) << 8 | (code & 0x7f) << 4
                                     : (code & 0x80) << 4 | (code & 0x70) << 8 | (code & 0x0f);
  return bits << (k % 2 * 16);
}

// Returns the byte offset of the f32 scale of 128 inputs of a packed row. The first block of a pair
// has those of packed rows 0 to 7 of each strip, the second one those of rows 8 to 15.
MOESERVE_HOST_DEVICE inline int64_t Fp8ScaleOffset(int k_blocks, int row, int group) {
  const int64_t block =
      static_cast<int64_t>(row / kImageBlock) * k_blocks + group * 2 + row % 16 / 8;
  const int strip = row % kImageBlock / kFp8StripRows;
  return block * kFp8BlockBytes + strip * kFp8StripBytes + 1024 + row % 8 * 4;
}

}  // namespace moeserve::cuda
