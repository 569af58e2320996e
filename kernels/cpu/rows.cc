// Operations on single rows: embeddings, norms, sums, copies.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/packed_bank.h"

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

}  // namespace

Result<std::unique_ptr<NormBank>> CpuBackend::NewNormBank(NormShape shape,
                                                          std::span<const HostTensor> scales,
                                                          std::span<const HostTensor> shifts) {
  auto bank = std::make_unique<CpuNormBank>();
  bank->shape = shape;
  for (const HostTensor& t : scales) bank->scales.push_back(Widened(t));
  for (const HostTensor& t : shifts) bank->shifts.push_back(Widened(t));
  return std::unique_ptr<NormBank>(std::move(bank));
}

Result<std::unique_ptr<EmbeddingTable>> CpuBackend::NewEmbeddingTable(const HostTensor& table) {
  auto own = std::make_unique<OwnTable>();
  own->kernels = table_;
  own->table = table;
  const size_t bytes = static_cast<size_t>(table.size()) * SizeOf(table.dtype);
  if (table.owner == nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(own->copy, HostBuffer::Allocate(bytes));
    std::memcpy(own->copy.data(), table.data, bytes);
    own->table.data = own->copy.data();
  }
  weight_bytes_ += static_cast<int64_t>(bytes);
  return std::unique_ptr<EmbeddingTable>(std::move(own));
}

Result<std::unique_ptr<EmbeddingTable>> CpuBackend::NewTiedEmbeddingTable(const LinearBank& bank) {
  auto table = std::make_unique<TiedTable>();
  table->bank = &static_cast<const CpuLinearBank&>(bank);
  return std::unique_ptr<EmbeddingTable>(std::move(table));
}

void CpuBackend::Embed(const EmbedArgs& args) {
  const auto& tokens = static_cast<const CpuEmbeddingTable&>(*args.tokens);
  const auto* learned = static_cast<const CpuEmbeddingTable*>(args.positions);
  const int64_t width = args.output.cols;
  const int64_t half = width / 2;
  const int64_t work = width * (args.sinusoidal ? 60 : 8);
  ForRows(args.output.rows, work, [&](int64_t begin, int64_t end, int worker) {
    float* extra = scratch_[worker].Floats(static_cast<size_t>(width));
    for (int64_t t = begin; t < end; ++t) {
      float* out = FloatRow(args.output, t);
      tokens.ReadRow(step_.token_ids[t], out);
      if (args.scale != 1.0f) {
        for (int64_t i = 0; i < width; ++i) out[i] *= args.scale;
      }
      if (learned != nullptr) {
        learned->ReadRow(step_.position[t], extra);
        for (int64_t i = 0; i < width; ++i) out[i] += extra[i];
      }
      if (args.sinusoidal) {
        for (int64_t i = 0; i < half; ++i) {
          const double f =
              std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half - 1));
          const double angle = (step_.position[t] + args.first_position) * f;
          out[i] += static_cast<float>(std::sin(angle));
          out[half + i] += static_cast<float>(std::cos(angle));
        }
      }
    }
  });
}

void CpuBackend::Norm(const NormArgs& args) {
  const auto& bank = static_cast<const CpuNormBank&>(*args.bank);
  const int64_t out_size = static_cast<int64_t>(SizeOf(args.output.dtype));
  auto run = [&](int64_t begin, int64_t end, size_t group) {
    const std::vector<float>& scale = bank.scales[group];
    const int64_t n = static_cast<int64_t>(scale.size());
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t s = 0; s < args.segments; ++s) {
        table_->norm_row({.x = FloatRow(args.input, r) + s * n,
                          .n = n,
                          .layer = bank.shape.layer,
                          .eps = bank.shape.eps,
                          .scale = scale.data(),
                          .shift = bank.shifts.empty() ? nullptr : bank.shifts[group].data(),
                          .out = args.output.row(r) + s * n * out_size,
                          .out_bf16 = args.output.dtype == DType::kBF16});
      }
    }
  };
  if (args.plan == nullptr) {
    ForRows(args.input.rows, args.input.cols * 2,
            [&](int64_t begin, int64_t end, int) { run(begin, end, 0); });
    return;
  }
  const RoutingPlan& plan = *args.plan;
  ForRows(plan.expert_offsets[plan.num_experts], args.input.cols * 2,
          [&](int64_t begin, int64_t end, int) {
            for (int64_t a = begin; a < end; ++a) {
              run(a, a + 1, static_cast<size_t>(plan.expert_of_assignment[a]));
            }
          });
}

RoutingPlan CpuBackend::FirstExperts(const RoutingPlan& plan, int count) const {
  RoutingPlan part = Backend::FirstExperts(plan, count);
  part.num_assignments = plan.expert_offsets[count];
  return part;
}

void CpuBackend::AssignRows(const AssignRowsArgs& args) {
  const RoutingPlan& plan = *args.plan;
  const int64_t width = args.output.cols;
  const bool to_bf16 = args.output.dtype == DType::kBF16;
  const auto row_bytes = static_cast<size_t>(width) * SizeOf(args.output.dtype);
  const auto write_floats = [&](const float* from, int64_t a) {
    if (to_bf16) {
      table_->convert_row(from, reinterpret_cast<Bf16*>(args.output.row(a)), width);
    } else {
      std::copy_n(from, width, FloatRow(args.output, a));
    }
  };
  const int64_t first = plan.expert_offsets[args.zero];
  const int64_t rows = plan.expert_offsets[plan.num_experts] - first;
  ForRows(rows, width, [&](int64_t begin, int64_t end, int) {
    for (int64_t a = first + begin; a < first + end; ++a) {
      const int expert = plan.expert_of_assignment[a];
      if (expert >= args.constant) {
        write_floats(args.constants + (expert - args.constant) * width, a);
      } else if (expert < args.copy) {
        std::memset(args.output.row(a), 0, row_bytes);
      } else if (const int32_t row = plan.row_of_assignment[a]; args.input.dtype == DType::kF32) {
        write_floats(FloatRow(args.input, row), a);
      } else if (to_bf16) {
        std::memcpy(args.output.row(a), args.input.row(row), row_bytes);
      } else {
        table_->widen_bf16(reinterpret_cast<const Bf16*>(args.input.row(row)),
                           FloatRow(args.output, a), width);
      }
    }
  });
}

void CpuBackend::Combine(const CombineArgs& args) {
  const RoutingPlan& plan = *args.plan;
  const int64_t width = args.output.cols;
  const bool bf16_results = args.results.dtype == DType::kBF16;
  const int64_t per_row = plan.rows == 0 ? 0 : plan.num_assignments / plan.rows + 1;
  ForRows(plan.rows, width * per_row, [&](int64_t begin, int64_t end, int worker) {
    const bool direct = args.output.dtype == DType::kF32;
    float* buffer = scratch_[worker].Floats(static_cast<size_t>(width));
    for (int64_t r = begin; r < end; ++r) {
      float* sum = direct ? FloatRow(args.output, r) : buffer;
      if (args.residual == nullptr) {
        std::fill(sum, sum + width, 0.0f);
      } else if (args.residual->dtype == DType::kF32) {
        std::copy_n(FloatRow(*args.residual, r), width, sum);
      } else {
        table_->widen_bf16(reinterpret_cast<const Bf16*>(args.residual->row(r)), sum, width);
      }
      for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
        const int32_t a = plan.assignments_of_row[i];
        const float weight = plan.weight_of_assignment[a];
        if (bf16_results) {
          table_->axpy_bf16(weight, reinterpret_cast<const Bf16*>(args.results.row(a)), sum, width);
        } else {
          table_->axpy(weight, FloatRow(args.results, a), sum, width);
        }
      }
      if (!direct) table_->convert_row(sum, reinterpret_cast<Bf16*>(args.output.row(r)), width);
    }
  });
}

void CpuBackend::Convert(const RowsView& input, const RowsView& output) {
  ForRows(input.rows, input.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      if (input.dtype == DType::kBF16) {
        const Bf16* from = reinterpret_cast<const Bf16*>(input.row(r));
        for (int64_t i = 0; i < input.cols; ++i) FloatRow(output, r)[i] = F32FromBf16(from[i]);
      } else if (output.dtype == DType::kBF16) {
        table_->convert_row(FloatRow(input, r), reinterpret_cast<Bf16*>(output.row(r)), input.cols);
      } else {
        std::copy_n(FloatRow(input, r), input.cols, FloatRow(output, r));
      }
    }
  });
}

void CpuBackend::AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                           float scale) {
  ForRows(x.rows, x.cols * 2, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* to = FloatRow(x, r);
      const float* from = FloatRow(branch, r);
      if (bias == nullptr) {
        for (int64_t i = 0; i < x.cols; ++i) to[i] += scale * from[i];
      } else {
        for (int64_t i = 0; i < x.cols; ++i) to[i] += scale * (from[i] + bias[i]);
      }
    }
  });
}

void CpuBackend::ScaleBySigmoid(const RowsView& x, const RowsView& gate) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const float g = 1.0f / (1.0f + std::exp(-FloatRow(gate, r)[0]));
    float* row = FloatRow(x, r);
    for (int64_t i = 0; i < x.cols; ++i) row[i] *= g;
  }
}

void CpuBackend::MultiplyBySigmoid(const RowsView& x, const RowsView& gate) {
  ForRows(x.rows, x.cols * 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      table_->multiply_by_sigmoid(x.row(r), x.dtype == DType::kBF16, FloatRow(gate, r), x.cols);
    }
  });
}

void CpuBackend::GatherOutputRows(const RowsView& input, const RowsView& output) {
  for (int64_t i = 0; i < output.rows; ++i) {
    std::copy_n(FloatRow(input, step_.output_rows[i]), input.cols, FloatRow(output, i));
  }
}

void CpuBackend::SoftCapRows(const RowsView& x, float cap) {
  ForRows(x.rows, x.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) table_->soft_cap(cap, FloatRow(x, r), x.cols);
  });
}

void CpuBackend::Clamp(const RowsView& x, float limit) {
  ForRows(x.rows, x.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = FloatRow(x, r);
      for (int64_t i = 0; i < x.cols; ++i) {
        row[i] = row[i] > limit ? limit : row[i] < -limit ? -limit : row[i];
      }
    }
  });
}

void CpuBackend::Scale(const RowsView& x, float factor) {
  ForRows(x.rows, x.cols, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = FloatRow(x, r);
      for (int64_t i = 0; i < x.cols; ++i) row[i] *= factor;
    }
  });
}

void CpuBackend::Exchange(const ExchangeArgs& args) {
  const auto row_bytes = [](const RowsView& rows) {
    return static_cast<size_t>(rows.cols) * SizeOf(rows.dtype);
  };
  std::vector<std::byte> sent(static_cast<size_t>(args.send.rows) * row_bytes(args.send));
  std::vector<std::byte> received(static_cast<size_t>(args.receive.rows) * row_bytes(args.receive));
  for (int64_t r = 0; r < args.send.rows; ++r) {
    const size_t bytes = row_bytes(args.send);
    std::memcpy(sent.data() + static_cast<size_t>(r) * bytes, args.send.row(r), bytes);
  }
  args.exchange->Run(sent, received);
  for (int64_t r = 0; r < args.receive.rows; ++r) {
    const size_t bytes = row_bytes(args.receive);
    std::memcpy(args.receive.row(r), received.data() + static_cast<size_t>(r) * bytes, bytes);
  }
}

void CpuBackend::CopyToHost(const RowsView& input, std::span<float> output) {
  MOESERVE_CHECK(static_cast<int64_t>(output.size()) >= input.rows * input.cols, "host copy");
  for (int64_t r = 0; r < input.rows; ++r) {
    float* to = output.data() + r * input.cols;
    if (input.dtype == DType::kBF16) {
      table_->widen_bf16(reinterpret_cast<const Bf16*>(input.row(r)), to, input.cols);
    } else {
      std::copy_n(FloatRow(input, r), input.cols, to);
    }
  }
}

void CpuBackend::CopyFromHost(std::span<const float> input, const RowsView& output) {
  MOESERVE_CHECK(static_cast<int64_t>(input.size()) >= output.rows * output.cols, "host rows");
  for (int64_t r = 0; r < output.rows; ++r) {
    const float* from = input.data() + r * output.cols;
    if (output.dtype == DType::kBF16) {
      table_->convert_row(from, reinterpret_cast<Bf16*>(output.row(r)), output.cols);
    } else {
      std::copy_n(from, output.cols, FloatRow(output, r));
    }
  }
}

}  // namespace moeserve::cpu
