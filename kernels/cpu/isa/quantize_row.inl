// Rounding of input rows to int8, for products with integer weights (QuantizeRowArgs).

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// What the values of a group are multiplied with to become integers, and the scale of its record.
struct InputScale {
  bool finite;
  float inverse;
  float scale;
};

// `check` has the sum of 0 * value in its lanes: NaN if a value is not finite.
inline InputScale ScaleOf(Vec largest, Vec check) {
  const float most = MaxOfLanes(largest);
  const bool finite = SumOfLanes(check) == 0.0f;
  // If all values are tiny, 127 / most could overflow; all integers are then 0.
  return {finite, !finite || most < 1e-35f ? 0.0f : 127.0f / most,
          finite ? most * (1.0f / 127.0f) : __builtin_nanf("")};
}

inline IntVec RoundInput(Vec value, const InputScale& scale) {
  return scale.finite ? ToInt(Mul(value, Broadcast(scale.inverse))) : BroadcastInt(0);
}

// Stores the end of a record, after its values.
inline void StoreScale(const InputScale& scale, IntVec sum, int zero, char* end) {
  const int32_t correction = -zero * SumInt(sum);
  __builtin_memcpy(end, &scale.scale, 4);
  __builtin_memcpy(end + 4, &correction, 4);
}

// Rounds one group of 16 * kVecs values to int8 and writes its record.
template <int kVecs>
inline void QuantizeGroup(const Vec (&value)[kVecs], int zero, char* record) {
  Vec largest = Zero();
  Vec check = Zero();
  for (int v = 0; v < kVecs; ++v) {
    largest = Max(Abs(value[v]), largest);
    check = Fma(value[v], Zero(), check);
  }
  const InputScale scale = ScaleOf(largest, check);
  IntVec sum = BroadcastInt(0);
  for (int v = 0; v < kVecs; ++v) {
    const IntVec q = RoundInput(value[v], scale);
    StoreBytes(reinterpret_cast<int8_t*>(record) + v * 16, q);
    sum = AddInt(sum, q);
  }
  StoreScale(scale, sum, zero, record + kVecs * 16);
}

// Reads an input row in vectors of 16 values, with zeros after the row's end.
class InputRow {
 public:
  explicit InputRow(const QuantizeRowArgs& a) : x_(a.x), bf16_(a.bf16), n_(a.n) {}

  Vec At(int64_t i) const {
    const Bf16* bf16 = static_cast<const Bf16*>(x_);
    const float* f32 = static_cast<const float*>(x_);
    if (i + 16 <= n_) return bf16_ ? LoadBf16(bf16 + i) : Load(f32 + i);
    float rest[16] = {};
    for (int64_t j = i; j < n_; ++j) rest[j - i] = bf16_ ? F32FromBf16(bf16[j]) : f32[j];
    return Load(rest);
  }

 private:
  const void* x_;
  bool bf16_;
  int64_t n_;
};

template <int kVecs>
void QuantizeGroups(const QuantizeRowArgs& a) {
  constexpr int kGroup = kVecs * 16;
  const InputRow row(a);
  char* record = a.records;
  for (int64_t begin = 0; begin < a.n; begin += kGroup, record += kGroup + 8) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = row.At(begin + v * 16);
    QuantizeGroup(value, QuantZero(a.quantization), record);
  }
}

// Rounds groups that do not fit in registers: reads the row twice.
void QuantizeWholeRow(const QuantizeRowArgs& a) {
  const InputRow row(a);
  char* record = a.records;
  for (int64_t begin = 0; begin < a.n; begin += kWholeRow) {
    const int64_t left = a.n - begin;
    const int64_t columns = QuantRecordColumns(a.quantization, left);
    Vec largest = Zero();
    Vec check = Zero();
    for (int64_t i = 0; i < columns; i += 16) {
      const Vec value = row.At(begin + i);
      largest = Max(Abs(value), largest);
      check = Fma(value, Zero(), check);
    }
    const InputScale scale = ScaleOf(largest, check);
    const bool sub_groups = HasSubGroups(a.quantization);
    IntVec sum = BroadcastInt(0);
    char* sums = record + columns;
    for (int64_t i = 0; i < columns; i += kSubGroup) {
      const IntVec low = RoundInput(row.At(begin + i), scale);
      const IntVec high = RoundInput(row.At(begin + i + 16), scale);
      StoreBytes(reinterpret_cast<int8_t*>(record) + i, low);
      StoreBytes(reinterpret_cast<int8_t*>(record) + i + 16, high);
      const IntVec both = AddInt(low, high);
      sum = AddInt(sum, both);
      if (!sub_groups) continue;
      const auto negative = static_cast<int16_t>(-SumInt(both));
      __builtin_memcpy(sums, &negative, 2);
      sums += 2;
    }
    StoreScale(scale, sum, QuantZero(a.quantization), sums);
    record = sums + 8;
  }
}

void QuantizeInputRow(const QuantizeRowArgs& a) {
  switch (QuantGroup(a.quantization)) {
    case 32:
      return QuantizeGroups<2>(a);
    case 64:
      return QuantizeGroups<4>(a);
    default:
      return QuantizeWholeRow(a);
  }
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
