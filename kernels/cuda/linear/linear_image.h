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

}  // namespace moeserve::cuda
