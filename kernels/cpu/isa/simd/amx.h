// The tile registers of AMX: eight registers of up to 16 rows of 64 bytes. One instruction
// multiplies a register of input rows by one of weights and adds the products to a third.
#pragma once

namespace moeserve::cpu::MOESERVE_ISA {

// Sets up the tile registers of this thread while it lives. For one tile of input rows, registers 0
// to 3 hold sums, 4 holds inputs, and 5 to 7 hold weights. For two tiles, registers 0 and 1 hold
// the sums of the first and 2 and 3 those of the second, 4 and 5 hold their inputs, and 6 and 7
// weights.
class TileRegisters {
 public:
  // `first` and `second` are the rows of the two tiles, 1..16, or second is 0.
  TileRegisters(int first, int second) {
    Shapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = 64;
      shapes.rows[i] = 16;
    }
    const auto rows = static_cast<unsigned char>(first);
    for (int i : {0, 1, 4}) shapes.rows[i] = rows;
    for (int i : {2, 3}) shapes.rows[i] = second == 0 ? rows : static_cast<unsigned char>(second);
    if (second != 0) shapes.rows[5] = static_cast<unsigned char>(second);
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  template <int kTile>
  void Clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // `stride` is the distance in bytes from one row to the next.
  template <int kTile>
  void Load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  void Store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // Adds to the f32 sums the products of pairs of bf16. For each element of the sums, the products
  // of even and those of odd k are added separately, in ascending order, and then all three.
  template <int kSums, int kInputs, int kWeights>
  void AddBf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(kSums), "i"(kInputs), "i"(kWeights));
  }
  // Adds to the int32 sums the products of four signed inputs and unsigned weights.
  template <int kSums, int kInputs, int kWeights>
  void AddInt8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(kSums), "i"(kInputs), "i"(kWeights));
  }

 private:
  struct Shapes {
    unsigned char palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    unsigned char rows[16];
  };
};

}  // namespace moeserve::cpu::MOESERVE_ISA
