// Operations on single rows: embeddings, norms, sums, copies; and pools of rows.
#pragma once

#include <memory>
#include <span>

#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

std::unique_ptr<NormBank> NewCpuNormBank(NormShape shape, std::span<const HostTensor> scales,
                                         std::span<const HostTensor> shifts);
// See Backend::NewEmbeddingTable() and NewTiedEmbeddingTable(). `kernels` must outlive the table.
Result<std::unique_ptr<EmbeddingTable>> NewCpuEmbeddingTable(const HostTensor& table,
                                                             const KernelTable& kernels);
std::unique_ptr<EmbeddingTable> NewCpuTiedTable(const LinearBank& bank);

// See the functions of Backend with the same names. Norm banks and embedding tables are those of
// the functions above. Only the backend's thread calls these functions.
class RowOps {
 public:
  // All arguments must outlive this object. `step` has the inputs of the current step.
  RowOps(const KernelTable& table, Workers& workers, const StepInputs& step)
      : table_(table), workers_(workers), step_(step) {}

  void Embed(const EmbedArgs& args);
  void Norm(const NormArgs& args);
  void AssignRows(const AssignRowsArgs& args);
  void Combine(const CombineArgs& args);
  void Convert(const RowsView& input, const RowsView& output);
  void AddScaled(const RowsView& x, const RowsView& branch, const float* bias, float scale);
  void ScaleBySigmoid(const RowsView& x, const RowsView& gate);
  void MultiplyByGate(const RowsView& x, const RowsView& gate, GateActivation activation);
  void GatherOutputRows(const RowsView& input, const RowsView& output);
  void GatherSourceRows(const RowsView& input, const RowsView& output);
  void PoolRows(const PoolArgs& args);
  void Scale(const RowsView& x, float factor);
  void SoftCapRows(const RowsView& x, float cap);
  void Clamp(const RowsView& x, float limit);
  void Exchange(const ExchangeArgs& args);
  void CopyToHost(const RowsView& input, std::span<float> output);
  void CopyFromHost(std::span<const float> input, const RowsView& output);

 private:
  const KernelTable& table_;
  Workers& workers_;
  const StepInputs& step_;
};

}  // namespace moeserve::cpu
