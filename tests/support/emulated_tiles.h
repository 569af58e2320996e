// The tile registers of AMX in ordinary memory, with the interface of kernels/cpu/isa/simd/amx.h.
#pragma once

namespace moeserve::cpu::MOESERVE_ISA {

class TileRegisters {
 public:
  TileRegisters(int first, int second) {
    for (Register& r : registers_) r.rows = 16;
    for (int i : {0, 1, 4}) registers_[i].rows = first;
    for (int i : {2, 3}) registers_[i].rows = second == 0 ? first : second;
    if (second != 0) registers_[5].rows = second;
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  template <int kTile>
  void Clear() {
    __builtin_memset(registers_[kTile].bytes, 0, sizeof(Register::bytes));
  }
  template <int kTile>
  void Load(const void* p, int64_t stride) {
    Register& tile = registers_[kTile];
    for (int r = 0; r < tile.rows; ++r) {
      __builtin_memcpy(tile.bytes[r], static_cast<const char*>(p) + r * stride, 64);
    }
  }
  template <int kTile>
  void Store(void* p, int64_t stride) {
    const Register& tile = registers_[kTile];
    for (int r = 0; r < tile.rows; ++r) {
      __builtin_memcpy(static_cast<char*>(p) + r * stride, tile.bytes[r], 64);
    }
  }
  template <int kSums, int kInputs, int kWeights>
  void AddBf16() {
    const Register &x = registers_[kInputs], &w = registers_[kWeights];
    const FlushSubnormals flush;
    for (int r = 0; r < x.rows; ++r) {
      for (int n = 0; n < 16; ++n) {
        float part[2] = {};
        for (int k = 0; k < 32; ++k) {
          const float value = F32FromBf16(Get<Bf16>(x.bytes[r], k));
          const float weight = F32FromBf16(Get<Bf16>(w.bytes[k / 2], 2 * n + k % 2));
          part[k % 2] = __builtin_fmaf(value, weight, part[k % 2]);
        }
        const float sum = Get<float>(registers_[kSums].bytes[r], n) + (part[0] + part[1]);
        __builtin_memcpy(registers_[kSums].bytes[r] + n * 4, &sum, 4);
      }
    }
  }
  template <int kSums, int kInputs, int kWeights>
  void AddInt8() {
    const Register &x = registers_[kInputs], &w = registers_[kWeights];
    for (int r = 0; r < x.rows; ++r) {
      for (int n = 0; n < 16; ++n) {
        auto sum = Get<int32_t>(registers_[kSums].bytes[r], n);
        for (int k = 0; k < 64; ++k) {
          sum += Get<int8_t>(x.bytes[r], k) * Get<uint8_t>(w.bytes[k / 4], 4 * n + k % 4);
        }
        __builtin_memcpy(registers_[kSums].bytes[r] + n * 4, &sum, 4);
      }
    }
  }

 private:
  struct Register {
    int rows;
    char bytes[16][64];
  };
  template <typename T>
  static T Get(const char* row, int i) {
    T value;
    __builtin_memcpy(&value, row + i * sizeof(T), sizeof(T));
    return value;
  }

  Register registers_[8];
};

}  // namespace moeserve::cpu::MOESERVE_ISA
