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

}  // namespace moeserve::cuda
