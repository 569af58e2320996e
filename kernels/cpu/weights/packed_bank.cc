#include "kernels/cpu/weights/packed_bank.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace moeserve::cpu {
namespace {

// LineBytes: bytes of one line (16 outputs, one step). StepElements: elements of k in one step.
int LineBytes(const LinearBankShape& s) {
  return s.quantization == Quantization::kNone && s.weight_dtype == DType::kF16 ? 32 : 64;
}
int StepElements(const LinearBankShape& s) {
  if (s.quantization != Quantization::kNone) return QuantStep(s.quantization);
  return s.weight_dtype == DType::kBF16 ? 2 : 1;
}

int64_t Steps(const LinearBankShape& s, int64_t k) {
  return (k + StepElements(s) - 1) / StepElements(s);
}

constexpr int kScaleBytes = kPanel * 2;  // bytes of the scales for one panel and group

// Returns the bytes of a panel: its lines and, for integer weights, the scales of its groups and
// the factors of subgroups.
int64_t PanelBytes(const LinearBankShape& s, int64_t k) {
  const int64_t scales = s.quantization == Quantization::kNone ? 0 : QuantScales(s.quantization, k);
  const int64_t factors =
      HasSubGroups(s.quantization) ? (k + kFactorColumns - 1) / kFactorColumns * kFactorBytes : 0;
  return Steps(s, k) * LineBytes(s) + scales * kScaleBytes + factors;
}

int Panels(int outputs, bool gated) { return (outputs + kPanel - 1) / kPanel * (gated ? 2 : 1); }

// Stores n integers of a row in its lines, which are `stride` bytes apart and hold a step each: 4
// bytes, or 8 nibbles in 4 bytes of which byte i has those of columns i and i + 4. What a last step
// lacks stays as it is.
void StoreIntegers(Quantization type, const int8_t* values, int64_t n, char* line, int64_t stride) {
  const int step = QuantStep(type);
  const int zero = QuantZero(type);
  int64_t i = 0;
  for (; i + step <= n; i += step, line += stride) {
    if (step == 4) {
      for (int c = 0; c < 4; ++c) line[c] = static_cast<char>(values[i + c] + zero);
      continue;
    }
    // Adding the zero to a nibble, which is 0 or 8, only changes its highest bit.
    uint64_t eight;
    std::memcpy(&eight, values + i, sizeof(eight));
    eight = (eight & 0x0f0f0f0f0f0f0f0fULL) ^ 0x0101010101010101ULL * static_cast<uint64_t>(zero);
    const auto four = static_cast<uint32_t>(eight | eight >> 28);
    std::memcpy(line, &four, sizeof(four));
  }
  for (int c = 0; i + c < n; ++c) {
    const int stored = values[i + c] + zero;
    char& byte = line[c % 4];
    if (step == 4) {
      byte = static_cast<char>(stored);
    } else {
      byte = static_cast<char>(c < 4 ? (byte & 0xf0) | stored : (byte & 0x0f) | stored << 4);
    }
  }
}

// Calls `body` for parts of [0, rows) on the threads of `pool`. A part consists of whole panels,
// because the packed rows of a panel share cache lines. (An int4 byte holds two columns of one row,
// so two threads never change the same byte.)
template <typename Body>
void ForRowParts(ThreadPool& pool, int64_t rows, int64_t columns, const Body& body) {
  constexpr int64_t kPart = 64;
  if (rows * columns < (1 << 16)) return body(0, rows);
  pool.Run((rows + kPart - 1) / kPart,
           [&](int64_t i, int) { body(i * kPart, std::min(rows, (i + 1) * kPart)); });
}

// Gives the whole pages of zeroed anonymous memory back to the system. Nothing may read them again.
void ReleasePages(const char* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace

int64_t CpuLinearBank::Bytes(const LinearBankShape& shape, int expert) {
  const int64_t panels = Panels(shape.out_features[expert], shape.gated);
  const int64_t blocks = (panels + kPanelsPerBlock - 1) / kPanelsPerBlock;
  const int64_t biases = shape.bias ? blocks * kBlock * static_cast<int64_t>(sizeof(float)) : 0;
  return panels * PanelBytes(shape, shape.in_features_of(expert)) + biases;
}

int64_t CpuLinearBank::Bytes(const LinearBankShape& shape) {
  const int experts = static_cast<int>(shape.out_features.size());
  int64_t bytes = 0;
  for (int e = 0; e < experts; ++e) bytes += Bytes(shape, e);
  return bytes;
}

Result<std::unique_ptr<LinearBank>> CpuLinearBank::Create(LinearBankShape shape,
                                                          WeightMemory& memory, ThreadPool* pool) {
  std::unique_ptr<CpuLinearBank> bank(new CpuLinearBank(std::move(shape), pool));
  const auto bytes = static_cast<size_t>(Bytes(bank->shape_));
  MOESERVE_ASSIGN_OR_RETURN(WeightMemory::Part part, memory.Allocate(bytes));
  bank->owner_ = std::move(part.owner);
  bank->writable_ = true;
  const char* next = part.data;
  for (int e = 0; e < bank->num_experts(); ++e) {
    bank->PlaceMatrix(next);
    next += Bytes(bank->shape_, e);
  }
  return std::unique_ptr<LinearBank>(std::move(bank));
}

std::unique_ptr<LinearBank> CpuLinearBank::View(LinearBankShape shape, PackedBytes packed,
                                                ThreadPool* pool) {
  std::unique_ptr<CpuLinearBank> bank(new CpuLinearBank(std::move(shape), pool));
  MOESERVE_CHECK(std::ssize(packed.experts) == bank->num_experts(), "packed bytes of all experts");
  for (int e = 0; e < bank->num_experts(); ++e) {
    const std::span<const char> bytes = packed.experts[static_cast<size_t>(e)];
    MOESERVE_CHECK(std::ssize(bytes) == Bytes(bank->shape_, e) &&
                       reinterpret_cast<uintptr_t>(bytes.data()) % 64 == 0,
                   "packed bytes do not fit their bank");
    bank->PlaceMatrix(bytes.data());
  }
  bank->owner_ = std::move(packed.owner);
  return bank;
}

void CpuLinearBank::PlaceMatrix(const char* bytes) {
  const size_t e = matrices_.size();
  const int outputs = shape_.out_features[e], inputs = shape_.in_features_of(static_cast<int>(e));
  const int panels = Panels(outputs, shape_.gated);
  const int64_t panel = PanelBytes(shape_, inputs);
  const char* const bias = bytes + panels * panel;
  matrices_.push_back({.weights = bytes,
                       .bias = shape_.bias ? reinterpret_cast<const float*>(bias) : nullptr,
                       .panels = panels,
                       .blocks = (panels + kPanelsPerBlock - 1) / kPanelsPerBlock,
                       .outputs = outputs,
                       .inputs = inputs,
                       .steps = Steps(shape_, inputs),
                       .block_bytes = kPanelsPerBlock * panel});
}

char* CpuLinearBank::Writable(const void* p) {
  MOESERVE_CHECK(writable_, "a view of packed bytes is complete");
  return static_cast<char*>(const_cast<void*>(p));
}

int CpuLinearBank::PackedRow(Half half, int row) const {
  if (!shape_.gated) return row;
  return row / kPanel * 2 * kPanel + (half == Half::kGate ? 0 : kPanel) + row % kPanel;
}

int64_t CpuLinearBank::ElementOffset(const Matrix& m, int packed_row, int64_t k) const {
  const DType t = shape_.weight_dtype;
  const int block = packed_row / kBlock;
  const int panel = packed_row % kBlock / kPanel;
  const int lane = packed_row % kPanel;
  const int64_t step = k / StepElements(shape_);
  const int64_t line =
      block * m.block_bytes + (step * panels_of_block(m, block) + panel) * LineBytes(shape_);
  return line +
         (lane * StepElements(shape_) + k % StepElements(shape_)) * static_cast<int64_t>(SizeOf(t));
}

void CpuLinearBank::LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) {
  const Matrix& m = matrices_[expert];
  MOESERVE_CHECK(weight.shape.size() == 2 && weight.shape[1] == m.inputs &&
                     row_begin + weight.shape[0] <= m.outputs,
                 "weight does not fit its bank");
  ForRowParts(*pool_, weight.shape[0], m.inputs, [&](int64_t begin, int64_t end) {
    if (shape_.quantization == Quantization::kNone) {
      LoadRows(m, half, row_begin, weight, begin, end);
      return;
    }
    std::vector<float> row(static_cast<size_t>(m.inputs));
    std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(shape_.quantization, m.inputs)));
    std::vector<F16> scales(static_cast<size_t>(QuantScales(shape_.quantization, m.inputs)));
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t k = 0; k < m.inputs; ++k) row[k] = ElementAsF32(weight, r * m.inputs + k);
      QuantizeRow(shape_.quantization, row, values.data(), scales.data());
      StoreQuantizedRow(m, PackedRow(half, row_begin + static_cast<int>(r)), values.data(),
                        scales.data());
    }
  });
}

void CpuLinearBank::LoadQuantized(int expert, Half half, int row_begin,
                                  const QuantizedMatrix& weight) {
  const Matrix& m = matrices_[expert];
  MOESERVE_CHECK(weight.type == shape_.quantization && weight.columns == m.inputs &&
                     row_begin + weight.rows <= m.outputs,
                 "quantized weight does not fit its bank");
  const int64_t row_bytes = QuantRowBytes(weight.type, weight.columns);
  const int64_t groups = QuantScales(weight.type, weight.columns);
  ForRowParts(*pool_, weight.rows, m.inputs, [&](int64_t begin, int64_t end) {
    std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(weight.type, m.inputs)));
    std::vector<F16> scales(static_cast<size_t>(groups));
    for (int64_t r = begin; r < end; ++r) {
      UnpackQuantizedRow(weight.type, m.inputs, weight.values + r * row_bytes, values.data());
      std::memcpy(scales.data(), weight.scales + r * groups, scales.size() * sizeof(F16));
      StoreQuantizedRow(m, PackedRow(half, row_begin + static_cast<int>(r)), values.data(),
                        scales.data());
    }
  });
}

void CpuLinearBank::StoreQuantizedRow(const Matrix& m, int packed_row, const int8_t* values,
                                      const F16* scales) {
  const Quantization type = shape_.quantization;
  const bool has_factors = HasSubGroups(type);
  const int block = packed_row / kBlock;
  const int panels = panels_of_block(m, block);
  const int panel = packed_row % kBlock / kPanel;
  const int lane = packed_row % kPanel;
  const int part = has_factors ? kFactorColumns : QuantGroup(type);
  const int8_t* factors = values + m.inputs;
  char* base = Writable(m.weights) + block * m.block_bytes;
  for (int64_t begin = 0; begin < m.inputs; begin += part) {
    const int64_t n = std::min<int64_t>(part, m.inputs - begin);
    if (has_factors) {
      const auto size = static_cast<size_t>(QuantSubGroups(type, n));
      std::memcpy(base + panel * kFactorBytes + lane * 2, factors, size);
      factors += size;
      base += panels * kFactorBytes;
    }
    StoreIntegers(type, values + begin, n, base + panel * 64 + lane * 4, int64_t{64} * panels);
    base += Steps(shape_, n) * panels * 64;
    if (!has_factors) {
      std::memcpy(base + panel * kScaleBytes + lane * 2, scales++, 2);
      base += panels * kScaleBytes;
    } else if (begin + n == m.inputs || (begin + n) % kWholeRow == 0) {
      const auto unit = static_cast<uint16_t>(F32FromF16(scales[1]));
      std::memcpy(base + panel * 2 * kScaleBytes + lane * 2, scales, 2);
      std::memcpy(base + panel * 2 * kScaleBytes + kScaleBytes + lane * 2, &unit, 2);
      base += panels * 2 * kScaleBytes;
      scales += 2;
    }
  }
}

void CpuLinearBank::LoadRows(const Matrix& m, Half half, int row_begin, const HostTensor& weight,
                             int64_t begin, int64_t end) {
  const DType to = shape_.weight_dtype;
  const int64_t columns = m.inputs;
  const int64_t line = LineBytes(shape_);
  const int64_t per_step = StepElements(shape_), to_size = static_cast<int64_t>(SizeOf(to));
  char* base = Writable(m.weights);
  const char* source = static_cast<const char*>(weight.data);
  const int64_t source_size = static_cast<int64_t>(SizeOf(weight.dtype));
  for (int64_t r = begin; r < end; ++r) {
    const int packed = PackedRow(half, row_begin + static_cast<int>(r));
    char* to_row = base + ElementOffset(m, packed, 0);
    const int64_t stride = panels_of_block(m, packed / kBlock) * line;
    const char* from = source + r * columns * source_size;
    if (to == weight.dtype && to == DType::kBF16) {
      for (int64_t s = 0; s < columns / 2; ++s) std::memcpy(to_row + s * stride, from + 4 * s, 4);
      if (columns % 2 != 0)
        std::memcpy(to_row + (m.steps - 1) * stride, from + 2 * (columns - 1), 2);
      continue;
    }
    for (int64_t k = 0; k < columns; ++k) {
      char* p = to_row + k / per_step * stride + k % per_step * to_size;
      if (to == weight.dtype) {
        std::memcpy(p, from + k * source_size, static_cast<size_t>(source_size));
        continue;
      }
      MOESERVE_CHECK(to != DType::kF16, "no conversion to f16: it could overflow");
      const float v = ElementAsF32(weight, r * columns + k);
      const Bf16 rounded = Bf16FromF32(v);
      std::memcpy(p, to == DType::kF32 ? static_cast<const void*>(&v) : &rounded,
                  static_cast<size_t>(to_size));
    }
  }
}

void CpuLinearBank::LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) {
  MOESERVE_CHECK(shape_.bias, "this bank was made without biases");
  auto* base = reinterpret_cast<float*>(Writable(matrices_[expert].bias));
  for (int64_t r = 0; r < bias.size(); ++r) {
    base[PackedRow(half, row_begin + static_cast<int>(r))] = ElementAsF32(bias, r);
  }
}

bool CpuLinearBank::TakesFrom(const LinearBank& other) const {
  const auto* const bank = dynamic_cast<const CpuLinearBank*>(&other);
  if (!CanTake() || bank == nullptr || bank->num_experts() != num_experts()) return false;
  const LinearBankShape& s = bank->shape_;
  const bool empty = std::ranges::all_of(matrices_, [](const Matrix& m) { return m.panels == 0; });
  return s.in_features.size() == shape_.in_features.size() && s.gated == shape_.gated &&
         s.bias == shape_.bias && s.quantization == shape_.quantization &&
         (empty || s.weight_dtype == shape_.weight_dtype) && s.mxfp4 == shape_.mxfp4 &&
         s.fp8 == shape_.fp8;
}

void CpuLinearBank::TakeExperts(const LinearBank& other) {
  MOESERVE_CHECK(TakesFrom(other), "a bank of the same experts");
  const auto& from = static_cast<const CpuLinearBank&>(other);
  taken_.resize(matrices_.size());
  shape_.weight_dtype = from.shape_.weight_dtype;  // was another one only if there was no matrix
  for (size_t e = 0; e < matrices_.size(); ++e) {
    if (matrices_[e].panels > 0 || from.matrices_[e].panels == 0) continue;
    matrices_[e] = from.matrices_[e];
    taken_[e] = from.owner_;
    shape_.out_features[e] = from.shape_.out_features[e];
    if (shape_.in_features.size() > 1) shape_.in_features[e] = from.shape_.in_features[e];
  }
}

std::shared_ptr<const void> CpuLinearBank::DropExpert(int expert) {
  const auto e = static_cast<size_t>(expert);
  Matrix& m = matrices_[e];
  const bool taken = e < taken_.size() && taken_[e] != nullptr;
  if (m.panels == 0 || (!taken && !writable_)) return nullptr;
  const char* const weights = m.weights;
  const auto bytes = static_cast<size_t>(Bytes(shape_, expert));
  std::shared_ptr<const void> owner = taken ? std::move(taken_[e]) : owner_;
  m.weights = nullptr;
  m.bias = nullptr;
  m.panels = m.blocks = m.outputs = 0;
  shape_.out_features[e] = 0;
  // Other matrices are in the same memory, so only whole pages are given back.
  return std::shared_ptr<const void>(weights, [bytes, owner = std::move(owner)](const void* p) {
    ReleasePages(static_cast<const char*>(p), bytes);
  });
}

void CpuLinearBank::ReadRow(int expert, int row, float* out) const {
  MOESERVE_CHECK(!shape_.gated, "rows of a gated bank are interleaved");
  MOESERVE_CHECK(shape_.quantization == Quantization::kNone, "rows of integers are not read back");
  const Matrix& m = matrices_[expert];
  const DType t = shape_.weight_dtype;
  const char* p = m.weights + ElementOffset(m, row, 0);
  const int64_t stride = int64_t{panels_of_block(m, row / kBlock)} * LineBytes(shape_);
  const int per_step = StepElements(shape_);
  for (int64_t k = 0; k < m.inputs; ++k) {
    const char* e = p + k / per_step * stride + k % per_step * static_cast<int64_t>(SizeOf(t));
    if (t == DType::kF32) {
      std::memcpy(out + k, e, 4);
      continue;
    }
    uint16_t bits;
    std::memcpy(&bits, e, 2);
    out[k] = t == DType::kBF16 ? F32FromBf16(bits) : F32FromF16(bits);
  }
}

}  // namespace moeserve::cpu
