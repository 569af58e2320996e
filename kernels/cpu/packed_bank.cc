#include "kernels/cpu/packed_bank.h"

#include <cstring>

#include "kernels/base/check.h"

namespace moeserve::cpu {
namespace {

// Bytes of one line (16 outputs of one step) and elements of k in a step.
int LineBytes(DType t) { return t == DType::kF16 ? 32 : 64; }
int StepElements(DType t) { return t == DType::kBF16 ? 2 : 1; }

int64_t Steps(DType t, int64_t k) { return (k + StepElements(t) - 1) / StepElements(t); }

int Panels(int outputs, bool gated) { return (outputs + kPanel - 1) / kPanel * (gated ? 2 : 1); }

}  // namespace

Result<std::unique_ptr<LinearBank>> CpuLinearBank::Create(LinearBankShape shape) {
  const int64_t line = LineBytes(shape.weight_dtype);
  const int experts = static_cast<int>(shape.out_features.size());
  int64_t bytes = 0;
  for (int e = 0; e < experts; ++e) {
    const int64_t steps = Steps(shape.weight_dtype, shape.in_features_of(e));
    const int64_t panels = Panels(shape.out_features[e], shape.gated);
    const int64_t blocks = (panels + kPanelsPerBlock - 1) / kPanelsPerBlock;
    bytes += panels * steps * line;
    if (shape.bias) bytes += blocks * kBlock * static_cast<int64_t>(sizeof(float));
  }
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer memory, HostBuffer::Allocate(static_cast<size_t>(bytes)));
  std::unique_ptr<CpuLinearBank> bank(new CpuLinearBank(std::move(shape), std::move(memory)));
  char* next = bank->memory_.data();
  for (int e = 0; e < experts; ++e) {
    Matrix m;
    m.outputs = bank->shape_.out_features[e];
    m.inputs = bank->shape_.in_features_of(e);
    const int64_t steps = Steps(bank->shape_.weight_dtype, m.inputs);
    m.block_bytes = kPanelsPerBlock * steps * line;
    m.panels = Panels(m.outputs, bank->shape_.gated);
    m.blocks = (m.panels + kPanelsPerBlock - 1) / kPanelsPerBlock;
    m.weights = next;
    m.bias = nullptr;
    next += m.panels * steps * line;
    bank->matrices_.push_back(m);
  }
  if (bank->shape_.bias) {
    for (Matrix& m : bank->matrices_) {
      m.bias = reinterpret_cast<const float*>(next);
      next += m.blocks * kBlock * static_cast<int64_t>(sizeof(float));
    }
  }
  return std::unique_ptr<LinearBank>(std::move(bank));
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
  const int64_t step = k / StepElements(t);
  const int64_t line =
      block * m.block_bytes + (step * panels_of_block(m, block) + panel) * LineBytes(t);
  return line + (lane * StepElements(t) + k % StepElements(t)) * static_cast<int64_t>(SizeOf(t));
}

void CpuLinearBank::LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) {
  const Matrix& m = matrices_[expert];
  MOESERVE_CHECK(weight.shape.size() == 2 && weight.shape[1] == m.inputs &&
                     row_begin + weight.shape[0] <= m.outputs,
                 "weight does not fit its bank");
  const DType to = shape_.weight_dtype;
  const int64_t columns = m.inputs;
  const int64_t steps = Steps(to, columns);
  char* base = const_cast<char*>(m.weights);
  const char* source = static_cast<const char*>(weight.data);
  const int64_t source_size = static_cast<int64_t>(SizeOf(weight.dtype));
  for (int64_t r = 0; r < weight.shape[0]; ++r) {
    const int packed = PackedRow(half, row_begin + static_cast<int>(r));
    char* to_row = base + ElementOffset(m, packed, 0);
    const int64_t stride = int64_t{panels_of_block(m, packed / kBlock)} * LineBytes(to);
    const char* from = source + r * columns * source_size;
    if (to == weight.dtype && to == DType::kBF16) {
      for (int64_t s = 0; s < columns / 2; ++s) std::memcpy(to_row + s * stride, from + 4 * s, 4);
      if (columns % 2 != 0) std::memcpy(to_row + (steps - 1) * stride, from + 2 * (columns - 1), 2);
      continue;
    }
    for (int64_t k = 0; k < columns; ++k) {
      const int64_t step = k / StepElements(to);
      char* p = to_row + step * stride + k % StepElements(to) * static_cast<int64_t>(SizeOf(to));
      if (to == weight.dtype) {
        std::memcpy(p, from + k * source_size, static_cast<size_t>(source_size));
        continue;
      }
      const float v = ElementAsF32(weight, r * columns + k);
      MOESERVE_CHECK(to != DType::kF16, "no conversion to f16: it could overflow");
      if (to == DType::kF32) {
        std::memcpy(p, &v, 4);
      } else {
        const Bf16 b = Bf16FromF32(v);
        std::memcpy(p, &b, 2);
      }
    }
  }
}

void CpuLinearBank::LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) {
  MOESERVE_CHECK(shape_.bias, "this bank was made without biases");
  float* base = const_cast<float*>(matrices_[expert].bias);
  for (int64_t r = 0; r < bias.size(); ++r) {
    base[PackedRow(half, row_begin + static_cast<int>(r))] = ElementAsF32(bias, r);
  }
}

void CpuLinearBank::ReadRow(int expert, int row, float* out) const {
  MOESERVE_CHECK(!shape_.gated, "rows of a gated bank are interleaved");
  const Matrix& m = matrices_[expert];
  const DType t = shape_.weight_dtype;
  const char* p = m.weights + ElementOffset(m, row, 0);
  const int64_t stride = int64_t{panels_of_block(m, row / kBlock)} * LineBytes(t);
  const int per_step = StepElements(t);
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
