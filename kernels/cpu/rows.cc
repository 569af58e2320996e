#include "kernels/cpu/rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/weights/packed_bank.h"

namespace moeserve::cpu {
namespace {

class CpuNormBank : public NormBank {
 public:
  NormShape shape;
  std::vector<std::vector<float>> scales;
  std::vector<std::vector<float>> shifts;  // empty for RMS norms
};

class CpuEmbeddingTable : public EmbeddingTable {
 public:
  virtual void ReadRow(int32_t row, float* out) const = 0;
};

// An untied embedding table: either the tensor itself, whose address may have any alignment, or a
// copy.
class OwnTable : public CpuEmbeddingTable {
 public:
  const KernelTable* kernels = nullptr;
  HostTensor table;  // [rows, width]
  HostBuffer copy;   // used if the tensor has no owner: a copy of its bytes
  void ReadRow(int32_t row, float* out) const override {
    const int64_t width = table.shape[1];
    const int64_t begin = row * width;
    const char* first =
        static_cast<const char*>(table.data) + begin * static_cast<int64_t>(SizeOf(table.dtype));
    if (table.dtype == DType::kF32) {
      std::memcpy(out, first, static_cast<size_t>(width) * sizeof(float));
    } else if (table.dtype == DType::kBF16 &&
               reinterpret_cast<uintptr_t>(first) % alignof(Bf16) == 0) {
      kernels->widen_bf16(reinterpret_cast<const Bf16*>(first), out, width);
    } else {
      for (int64_t i = 0; i < width; ++i) out[i] = ElementAsF32(table, begin + i);
    }
  }
  const void* read_in_place() const override {
    return table.owner == nullptr ? nullptr : table.data;
  }
};

class TiedTable : public CpuEmbeddingTable {
 public:
  const CpuLinearBank* bank = nullptr;
  void ReadRow(int32_t row, float* out) const override { bank->ReadRow(0, row, out); }
};

float* FloatRow(const RowsView& v, int64_t r) {
  MOESERVE_CHECK(v.dtype == DType::kF32, "f32 rows");
  return reinterpret_cast<float*>(v.row(r));
}

// Widens n elements of a row, f32 or bf16.
void LoadRow(const KernelTable& table, const RowsView& from, int64_t r, float* x, int64_t n) {
  if (from.dtype == DType::kBF16) {
    table.widen_bf16(reinterpret_cast<const Bf16*>(from.row(r)), x, n);
  } else {
    std::copy_n(FloatRow(from, r), n, x);
  }
}
// Writes n elements to a row, f32 or bf16.
void StoreRow(const KernelTable& table, const float* x, const RowsView& to, int64_t r, int64_t n) {
  if (to.dtype == DType::kBF16) {
    table.convert_row(x, reinterpret_cast<Bf16*>(to.row(r)), n);
  } else {
    std::copy_n(x, n, FloatRow(to, r));
  }
}
// Copies n elements of row r of `from` to row q of `to`.
void CopyRow(const KernelTable& table, const RowsView& from, int64_t r, const RowsView& to,
             int64_t q, int64_t n) {
  if (from.dtype == DType::kF32) {
    StoreRow(table, FloatRow(from, r), to, q, n);
  } else if (to.dtype == DType::kF32) {
    LoadRow(table, from, r, FloatRow(to, q), n);
  } else {
    std::memcpy(to.row(q), from.row(r), static_cast<size_t>(n) * sizeof(Bf16));
  }
}

}  // namespace

std::unique_ptr<NormBank> NewCpuNormBank(NormShape shape, std::span<const HostTensor> scales,
                                         std::span<const HostTensor> shifts) {
  auto bank = std::make_unique<CpuNormBank>();
  bank->shape = shape;
  for (const HostTensor& t : scales) bank->scales.push_back(Widened(t));
  for (const HostTensor& t : shifts) bank->shifts.push_back(Widened(t));
  return bank;
}

Result<std::unique_ptr<EmbeddingTable>> NewCpuEmbeddingTable(const HostTensor& table,
                                                             const KernelTable& kernels) {
  auto own = std::make_unique<OwnTable>();
  own->kernels = &kernels;
  own->table = table;
  if (table.owner == nullptr) {
    const size_t bytes = static_cast<size_t>(table.size()) * SizeOf(table.dtype);
    MOESERVE_ASSIGN_OR_RETURN(own->copy, HostBuffer::Allocate(bytes));
    std::memcpy(own->copy.data(), table.data, bytes);
    own->table.data = own->copy.data();
  }
  return own;
}

std::unique_ptr<EmbeddingTable> NewCpuTiedTable(const LinearBank& bank) {
  auto table = std::make_unique<TiedTable>();
  table->bank = &static_cast<const CpuLinearBank&>(bank);
  return table;
}

void RowOps::Embed(const EmbedArgs& args) {
  const auto& tokens = static_cast<const CpuEmbeddingTable&>(*args.tokens);
  const auto* types = static_cast<const CpuEmbeddingTable*>(args.types);
  const auto* learned = static_cast<const CpuEmbeddingTable*>(args.positions);
  const int64_t width = args.output.cols;
  const int64_t half = width / 2;
  const int64_t work = width * (args.sinusoidal ? 60 : 8);
  workers_.ForRows(args.output.rows, work, [&](int64_t begin, int64_t end, int worker) {
    float* extra = workers_.Floats(worker, static_cast<size_t>(width));
    for (int64_t t = begin; t < end; ++t) {
      float* out = FloatRow(args.output, t);
      tokens.ReadRow(step_.token_ids[t], out);
      if (args.scale != 1.0f) {
        for (int64_t i = 0; i < width; ++i) out[i] *= args.scale;
      }
      if (types != nullptr) {
        types->ReadRow(step_.token_types.empty() ? 0 : step_.token_types[t], extra);
        for (int64_t i = 0; i < width; ++i) out[i] += extra[i];
      }
      if (learned != nullptr) {
        learned->ReadRow(step_.position[t], extra);
        for (int64_t i = 0; i < width; ++i) out[i] += extra[i];
      }
      if (args.sinusoidal) {
        for (int64_t i = 0; i < half; ++i) {
          const double share =
              static_cast<double>(i) / static_cast<double>(args.half_spacing ? half : half - 1);
          const double f = std::pow(10000.0, -share);
          const double angle = (step_.position[t] + args.first_position) * f;
          out[i] += static_cast<float>(std::sin(angle));
          out[half + i] += static_cast<float>(std::cos(angle));
        }
      }
    }
  });
}

void RowOps::Norm(const NormArgs& args) {
  const auto& bank = static_cast<const CpuNormBank&>(*args.bank);
  const RoutingPlan* plan = args.plan;
  const int64_t rows = plan == nullptr ? args.input.rows : plan->expert_offsets[plan->num_experts];
  const int64_t out_size = static_cast<int64_t>(SizeOf(args.output.dtype));
  workers_.ForEachRow(rows, args.input.cols * 2, [&](int64_t r) {
    const int group = plan == nullptr ? 0 : plan->expert_of_assignment[r];
    const std::vector<float>& scale = bank.scales[group];
    const int64_t n = static_cast<int64_t>(scale.size());
    for (int64_t s = 0; s < args.segments; ++s) {
      table_.norm_row({.x = FloatRow(args.input, r) + s * n,
                       .n = n,
                       .parts = bank.shape.parts,
                       .layer = bank.shape.layer,
                       .eps = bank.shape.eps,
                       .scale = scale.data(),
                       .shift = bank.shifts.empty() ? nullptr : bank.shifts[group].data(),
                       .out = args.output.row(r) + s * n * out_size,
                       .out_bf16 = args.output.dtype == DType::kBF16});
    }
  });
}

void RowOps::AssignRows(const AssignRowsArgs& args) {
  const RoutingPlan& plan = *args.plan;
  const int64_t width = args.output.cols;
  const int64_t first = plan.expert_offsets[args.first];
  const int64_t rows = plan.expert_offsets[plan.num_experts] - first;
  workers_.ForRows(rows, width, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t a = first + begin; a < first + end; ++a) {
      const int expert = plan.expert_of_assignment[a];
      const int32_t row = plan.row_of_assignment[a];
      const int32_t source = args.sources == nullptr ? kAssignInput : args.sources[expert];
      if (source == kAssignNothing) continue;
      if (source >= 0) {
        StoreRow(table_, args.constants + source * width, args.output, a, width);
      } else if (source == kAssignInput && args.weighted) {
        float* const product = workers_.Floats(worker, static_cast<size_t>(width));
        LoadRow(table_, args.input, row, product, width);
        const float weight = plan.weight_of_assignment[a];
        for (int64_t i = 0; i < width; ++i) product[i] *= weight;
        StoreRow(table_, product, args.output, a, width);
      } else if (source == kAssignInput) {
        CopyRow(table_, args.input, row, args.output, a, width);
      } else {
        std::memset(args.output.row(a), 0, static_cast<size_t>(width) * SizeOf(args.output.dtype));
      }
    }
  });
}

void RowOps::Combine(const CombineArgs& args) {
  const RoutingPlan& plan = *args.plan;
  const int64_t width = args.output.cols;
  const int64_t per_row = plan.rows == 0 ? 0 : plan.num_assignments / plan.rows + 1;
  workers_.ForRows(plan.rows, width * per_row, [&](int64_t begin, int64_t end, int worker) {
    const bool direct = args.output.dtype == DType::kF32;
    float* buffer = workers_.Floats(worker, static_cast<size_t>(width));
    for (int64_t r = begin; r < end; ++r) {
      float* sum = direct ? FloatRow(args.output, r) : buffer;
      if (args.residual == nullptr) {
        std::fill(sum, sum + width, 0.0f);
      } else {
        LoadRow(table_, *args.residual, r, sum, width);
      }
      for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
        const int32_t a = plan.assignments_of_row[i];
        const float weight = args.weighted ? plan.weight_of_assignment[a] : 1.0f;
        if (args.results.dtype == DType::kBF16) {
          table_.axpy_bf16(weight, reinterpret_cast<const Bf16*>(args.results.row(a)), sum, width);
        } else {
          table_.axpy(weight, FloatRow(args.results, a), sum, width);
        }
      }
      if (!direct) StoreRow(table_, sum, args.output, r, width);
    }
  });
}

void RowOps::Convert(const RowsView& input, const RowsView& output) {
  workers_.ForEachRow(input.rows, input.cols,
                      [&](int64_t r) { CopyRow(table_, input, r, output, r, input.cols); });
}

void RowOps::AddScaled(const RowsView& x, const RowsView& branch, const float* bias, float scale) {
  workers_.ForEachRow(x.rows, x.cols * 2, [&](int64_t r) {
    float* to = FloatRow(x, r);
    const float* from = FloatRow(branch, r);
    if (bias == nullptr) {
      for (int64_t i = 0; i < x.cols; ++i) to[i] += scale * from[i];
    } else {
      for (int64_t i = 0; i < x.cols; ++i) to[i] += scale * (from[i] + bias[i]);
    }
  });
}

void RowOps::ScaleBySigmoid(const RowsView& x, const RowsView& gate) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const float g = 1.0f / (1.0f + std::exp(-FloatRow(gate, r)[0]));
    float* row = FloatRow(x, r);
    for (int64_t i = 0; i < x.cols; ++i) row[i] *= g;
  }
}

void RowOps::MultiplyByGate(const RowsView& x, const RowsView& gate, GateActivation activation) {
  const int64_t share = x.cols / gate.cols;  // columns of x for each column of the gate
  const bool bf16 = x.dtype == DType::kBF16;
  workers_.ForRows(x.rows, x.cols * 4, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t r = begin; r < end; ++r) {
      const float* gates = FloatRow(gate, r);
      if (share > 1) {
        float* const all = workers_.Floats(worker, static_cast<size_t>(x.cols));
        for (int64_t i = 0; i < gate.cols; ++i) std::fill_n(all + i * share, share, gates[i]);
        gates = all;
      }
      table_.multiply_by_gate(x.row(r), bf16, gates, x.cols, activation);
    }
  });
}

void RowOps::GatherOutputRows(const RowsView& input, const RowsView& output) {
  for (int64_t i = 0; i < output.rows; ++i) {
    std::copy_n(FloatRow(input, step_.output_rows[i]), input.cols, FloatRow(output, i));
  }
}

void RowOps::GatherSourceRows(const RowsView& input, const RowsView& output) {
  MOESERVE_CHECK(output.rows == std::ssize(step_.source_rows), "a source row per row");
  workers_.ForEachRow(output.rows, output.cols, [&](int64_t i) {
    std::copy_n(FloatRow(input, step_.source_rows[static_cast<size_t>(i)]), input.cols,
                FloatRow(output, i));
  });
}

void RowOps::PoolRows(const PoolArgs& args) {
  const int64_t width = args.output.cols;
  const int64_t pools = args.output.rows;
  if (pools == 0) return;
  MOESERVE_CHECK(pools == static_cast<int64_t>(step_.pool_ranges.size()), "rows of pools");
  workers_.ForEachRow(pools, width * (args.input.rows / pools + 1), [&](int64_t p) {
    const RowRange range = step_.pool_ranges[p];
    float* const out = FloatRow(args.output, p);
    std::copy_n(FloatRow(args.input, range.begin), width, out);
    for (int64_t r = range.begin + 1; r < range.end; ++r) {
      const float* const x = FloatRow(args.input, r);
      if (args.kind == PoolKind::kMean) {
        for (int64_t i = 0; i < width; ++i) out[i] += x[i];
      } else {
        for (int64_t i = 0; i < width; ++i) out[i] = PoolMax(out[i], x[i]);
      }
    }
    if (args.kind == PoolKind::kMax) return;
    const auto count = static_cast<float>(range.end - range.begin);
    for (int64_t i = 0; i < width; ++i) out[i] /= count;
  });
}

void RowOps::SoftCapRows(const RowsView& x, float cap) {
  workers_.ForEachRow(x.rows, x.cols,
                      [&](int64_t r) { table_.soft_cap(cap, FloatRow(x, r), x.cols); });
}

void RowOps::Clamp(const RowsView& x, float limit) {
  workers_.ForEachRow(x.rows, x.cols, [&](int64_t r) {
    float* row = FloatRow(x, r);
    for (int64_t i = 0; i < x.cols; ++i) {
      row[i] = row[i] > limit ? limit : row[i] < -limit ? -limit : row[i];
    }
  });
}

void RowOps::Scale(const RowsView& x, float factor) {
  workers_.ForEachRow(x.rows, x.cols, [&](int64_t r) {
    float* row = FloatRow(x, r);
    for (int64_t i = 0; i < x.cols; ++i) row[i] *= factor;
  });
}

void RowOps::Exchange(const ExchangeArgs& args) {
  const size_t send = static_cast<size_t>(args.send.cols) * SizeOf(args.send.dtype);
  const size_t receive = static_cast<size_t>(args.receive.cols) * SizeOf(args.receive.dtype);
  std::vector<std::byte> sent(static_cast<size_t>(args.send.rows) * send);
  std::vector<std::byte> received(static_cast<size_t>(args.receive.rows) * receive);
  for (int64_t r = 0; r < args.send.rows; ++r) {
    std::memcpy(sent.data() + static_cast<size_t>(r) * send, args.send.row(r), send);
  }
  args.exchange->Run(sent, received);
  for (int64_t r = 0; r < args.receive.rows; ++r) {
    std::memcpy(args.receive.row(r), received.data() + static_cast<size_t>(r) * receive, receive);
  }
}

void RowOps::CopyToHost(const RowsView& input, std::span<float> output) {
  MOESERVE_CHECK(static_cast<int64_t>(output.size()) >= input.rows * input.cols, "host copy");
  for (int64_t r = 0; r < input.rows; ++r) {
    LoadRow(table_, input, r, output.data() + r * input.cols, input.cols);
  }
}

void RowOps::CopyFromHost(std::span<const float> input, const RowsView& output) {
  MOESERVE_CHECK(static_cast<int64_t>(input.size()) >= output.rows * output.cols, "host rows");
  for (int64_t r = 0; r < output.rows; ++r) {
    StoreRow(table_, input.data() + r * output.cols, output, r, output.cols);
  }
}

}  // namespace moeserve::cpu
