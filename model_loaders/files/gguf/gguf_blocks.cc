#include "model_loaders/files/gguf/gguf_blocks.h"

#include <array>
#include <bit>
#include <cstring>

#include "kernels/base/dtype.h"

namespace moeserve {
namespace {

constexpr int kBlock = 32;        // elements of a block of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4
constexpr int kSuperBlock = 256;  // elements of a block of the K types, which has parts of 16 or 32

// All numbers of a block are little-endian.
float Half(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return F32FromF16(bits);
}

// The elements of a block of 32 are in 16 bytes: elements 0 to 15 in the low four bits, elements 16
// to 31 in the high ones.
int Nibble(const uint8_t* bytes, int i) {
  return i < kBlock / 2 ? bytes[i] & 0x0F : bytes[i - kBlock / 2] >> 4;
}

void Q8Zero(const uint8_t* block, float* out) {
  const float scale = Half(block);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
}

void Q4Zero(const uint8_t* block, float* out) {
  const float scale = Half(block);
  for (int i = 0; i < kBlock; ++i) out[i] = scale * static_cast<float>(Nibble(block + 2, i) - 8);
}

void Q4One(const uint8_t* block, float* out) {
  const float scale = Half(block);
  const float smallest = Half(block + 2);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = scale * static_cast<float>(Nibble(block + 4, i)) + smallest;
  }
}

// Returns element i of 32 with five bits: bit 4 is bit i of the number at `high`.
int FiveBits(const uint8_t* high, const uint8_t* low, int i) {
  return Nibble(low, i) | ((high[i / 8] >> (i % 8)) & 1) << 4;
}

void Q5Zero(const uint8_t* block, float* out) {
  const float scale = Half(block);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = scale * static_cast<float>(FiveBits(block + 2, block + 6, i) - 16);
  }
}

void Q5One(const uint8_t* block, float* out) {
  const float scale = Half(block);
  const float smallest = Half(block + 2);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = scale * static_cast<float>(FiveBits(block + 4, block + 8, i)) + smallest;
  }
}

// The scales and offsets of the eight parts of a block of Q4_K or Q5_K, as multiples of two
// numbers. Twelve bytes contain them, with six bits each.
struct PartScales {
  std::array<float, 8> scale;
  std::array<float, 8> offset;

  explicit PartScales(const uint8_t* block) {
    const float unit_scale = Half(block);
    const float unit_offset = Half(block + 2);
    const uint8_t* packed = block + 4;
    for (int part = 0; part < 8; ++part) {
      int s = 0;
      int o = 0;
      if (part < 4) {
        s = packed[part] & 0x3F;
        o = packed[part + 4] & 0x3F;
      } else {  // the upper two bits are those that parts 0 to 3 leave free
        s = (packed[part + 4] & 0x0F) | (packed[part - 4] >> 6) << 4;
        o = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
      }
      scale[static_cast<size_t>(part)] = unit_scale * static_cast<float>(s);
      offset[static_cast<size_t>(part)] = unit_offset * static_cast<float>(o);
    }
  }
};

// Writes a block of eight parts. Parts 2 n and 2 n + 1 are the low and the high four bits of bytes
// 32 n to 32 n + 31 at `low`. Bit p of byte i at `high`, which may be null, is the fifth bit of
// element i of part p.
void WriteParts(const PartScales& scales, const uint8_t* low, const uint8_t* high, float* out) {
  for (int part = 0; part < 8; ++part) {
    const float scale = scales.scale[static_cast<size_t>(part)];
    const float offset = scales.offset[static_cast<size_t>(part)];
    const uint8_t* bytes = low + part / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      int q = part % 2 == 0 ? bytes[i] & 0x0F : bytes[i] >> 4;
      if (high != nullptr) q |= ((high[i] >> part) & 1) << 4;
      out[part * 32 + i] = scale * static_cast<float>(q) - offset;
    }
  }
}

void Q4K(const uint8_t* block, float* out) {
  WriteParts(PartScales(block), block + 16, nullptr, out);
}

void Q5K(const uint8_t* block, float* out) {
  WriteParts(PartScales(block), block + 48, block + 16, out);
}

// 128 bytes with the lower four bits of all elements, 64 bytes with the upper two, a scale for each
// 16 elements, and the unit of the scales. Each half of a block has four parts of 32 elements.
void Q6K(const uint8_t* block, float* out) {
  const uint8_t* scales = block + 192;
  const float unit = Half(block + 208);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + half * 64;
    const uint8_t* high = block + 128 + half * 32;
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) {
        const uint8_t byte = low[part % 2 * 32 + i];
        const int q = (part < 2 ? byte & 0x0F : byte >> 4) | ((high[i] >> (2 * part)) & 3) << 4;
        const int at = half * 128 + part * 32 + i;
        const float scale = unit * static_cast<float>(static_cast<int8_t>(scales[at / 16]));
        out[at] = scale * static_cast<float>(q - 32);
      }
    }
  }
}

// A block of OCP's MX: a scale in E8M0, then numbers in E2M1. GGUF files have them in another order
// than OCP's format, which has elements 2 i and 2 i + 1 in byte i. Zero has no sign, and the scale
// 255, which OCP defines as not a number, is 2^128.
void Mxfp4(const uint8_t* block, float* out) {
  // Twice the numbers, so that they are integers, and half the scale.
  constexpr std::array<float, 16> kDoubled = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,
                                              8.0f,  12.0f, 0.0f,  -1.0f, -2.0f, -3.0f,
                                              -4.0f, -6.0f, -8.0f, -12.0f};
  const uint32_t exponent = block[0];  // 2^(exponent - 128); the first two are subnormal
  const float scale =
      std::bit_cast<float>(exponent < 2 ? uint32_t{0x00200000} << exponent : (exponent - 1) << 23);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = scale * kDoubled[static_cast<size_t>(Nibble(block + 1, i))];
  }
}

constexpr GgufType Plain(uint32_t id, std::string_view name, ElementType type, int64_t bytes) {
  return {.id = id, .name = name, .block_elements = 1, .block_bytes = bytes, .plain = type};
}

constexpr GgufType kTypes[] = {
    Plain(0, "F32", ElementType::kF32, 4),
    Plain(1, "F16", ElementType::kF16, 2),
    {2, "Q4_0", kBlock, 18, std::nullopt, Q4Zero},
    {3, "Q4_1", kBlock, 20, std::nullopt, Q4One},
    {6, "Q5_0", kBlock, 22, std::nullopt, Q5Zero},
    {7, "Q5_1", kBlock, 24, std::nullopt, Q5One},
    {8, "Q8_0", kBlock, 34, std::nullopt, Q8Zero},
    {9, "Q8_1"},
    {10, "Q2_K"},
    {11, "Q3_K"},
    {12, "Q4_K", kSuperBlock, 144, std::nullopt, Q4K},
    {13, "Q5_K", kSuperBlock, 176, std::nullopt, Q5K},
    {14, "Q6_K", kSuperBlock, 210, std::nullopt, Q6K},
    {15, "Q8_K"},
    {16, "IQ2_XXS"},
    {17, "IQ2_XS"},
    {18, "IQ3_XXS"},
    {19, "IQ1_S"},
    {20, "IQ4_NL"},
    {21, "IQ3_S"},
    {22, "IQ2_S"},
    {23, "IQ4_XS"},
    Plain(24, "I8", ElementType::kI8, 1),
    Plain(25, "I16", ElementType::kI16, 2),
    Plain(26, "I32", ElementType::kI32, 4),
    Plain(27, "I64", ElementType::kI64, 8),
    Plain(28, "F64", ElementType::kF64, 8),
    {29, "IQ1_M"},
    Plain(30, "BF16", ElementType::kBF16, 2),
    {34, "TQ1_0"},
    {35, "TQ2_0"},
    {39, "MXFP4", kBlock, 17, std::nullopt, Mxfp4},
    {40, "NVFP4"},
    {41, "Q1_0"},
};

}  // namespace

const GgufType* FindGgufType(uint32_t id) {
  for (const GgufType& type : kTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

std::string_view GgufTypeNames() {
  return "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K or MXFP4";
}

}  // namespace moeserve
