// The CPU backend: weights are packed for the CPU's vector instructions, and all threads belong to
// one pool.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/rank_ops.h"
#include "kernels/cpu/route_counters.h"
#include "kernels/cpu/routing.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/states.h"
#include "kernels/cpu/storage/kv_cache.h"
#include "kernels/cpu/storage/state_slots.h"
#include "kernels/cpu/weights/packed_bank.h"
#include "kernels/cpu/weights/weight_memory.h"
#include "kernels/cpu/weights/weight_pages.h"
#include "kernels/cpu/workers.h"

namespace moeserve::cpu {

// Creates what operations use, holds the current step, and passes each operation to its room.
class CpuBackend : public Backend {
 public:
  // `table` must be supported by the processor (isa.h); threads >= 1.
  CpuBackend(const KernelTable* table, int threads);

  std::string_view name() const override { return "cpu"; }
  std::string_view description() const override { return description_; }
  int threads() const override { return workers_.threads(); }
  std::string_view instruction_set() const override { return table_.name; }
  bool rounds_head_input() const override { return table_.bf16_dot; }

  Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t bytes) override;
  Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) override;
  std::string_view packed_layout() const override { return kPackedLayout; }
  int64_t PackedExpertBytes(const LinearBankShape& shape, int expert) const override {
    return CpuLinearBank::Bytes(shape, expert);
  }
  Result<std::unique_ptr<LinearBank>> NewPackedBank(LinearBankShape shape,
                                                    PackedBytes packed) override;
  Result<std::unique_ptr<NormBank>> NewNormBank(NormShape shape, std::span<const HostTensor> scales,
                                                std::span<const HostTensor> shifts) override {
    return NewCpuNormBank(shape, scales, shifts);
  }
  Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor& table) override;
  Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank& bank) override {
    return NewCpuTiedTable(bank);
  }
  Result<std::unique_ptr<Router>> NewRouter(const RouteSettings& settings,
                                            const RouterTensors& tensors) override {
    return std::make_unique<CpuRouter>(settings, tensors);
  }
  Result<std::unique_ptr<DeviceBuffer>> UploadBytes(std::span<const std::byte> bytes) override;
  Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape> layers,
                                                     KvCacheType type,
                                                     std::vector<int64_t> num_pages) override {
    return CpuKvCache::Allocate(std::move(layers), type, std::move(num_pages));
  }
  int64_t PageBytes(std::span<const KvLayerShape> layers, KvCacheType type) const override {
    return CpuKvCache::BytesPerBlock(layers, type);
  }
  Result<std::unique_ptr<RouteCounters>> NewRouteCounters(const CountSettings& settings) override {
    return std::make_unique<CpuRouteCounters>(settings);
  }
  int64_t weight_bytes() const override { return weight_bytes_; }

  Result<std::unique_ptr<StateStorage>> NewStates(std::vector<StateShape> shapes, int num_slots,
                                                  int pending_rows) override {
    return CpuStates::Allocate(std::move(shapes), num_slots, pending_rows, table_, workers_);
  }

  StepRows BeginStep(const StepInputs& inputs, const void* owner, bool replayable) override;
  void RunStep(const std::function<void()>& operations) override {
    operations();
    if (step_.counters != nullptr && !step_.count_later) routing_.CountRoutes(step_.kind);
  }
  void ForgetSteps(const void*) override {}
  StepOutcome FinishStep() override {
    return {.failed = routing_.failed(), .routes = routing_.routes()};
  }
  std::span<const TokenRoutes> CountStep(std::span<const uint8_t> kind) override {
    return routing_.CountRoutes(kind);
  }
  RoutingPlan HostPlan(int slot) override { return routing_.plan(slot); }

  void Linear(const LinearArgs& args) override {
    PrepareLinear(args);
    linear_.Linear(args);
  }
  bool FusesFeedForward(const FeedForwardArgs& args) const override {
    return linear_.FusesFeedForward(*args.up, args.input.dtype, args.output.rows);
  }
  void FusedFeedForward(const FeedForwardArgs& args) override { linear_.FusedFeedForward(args); }
  // See LinearOps.
  uint64_t expert_visits() const { return linear_.expert_visits(); }

  void Rope(const RopeArgs& args) override { attention_.Rope(args); }
  void ScaleByPosition(const PositionScaleArgs& args) override { attention_.ScaleByPosition(args); }
  void AppendKv(const AppendKvArgs& args) override { attention_.AppendKv(args); }
  void Attention(const AttentionArgs& args) override {
    PrepareAttention(args);
    attention_.Attention(args);
  }

  void ShortConvolution(const ShortConvolutionArgs& args) override {
    states_.ShortConvolution(args);
  }
  void Recurrence(const RecurrenceArgs& args) override { states_.Recurrence(args); }

  RoutingPlan Route(const RouteArgs& args) override {
    if (args.norm != nullptr) AddNorm(*args.norm);
    return routing_.Route(args);
  }
  RoutingPlan FirstExperts(const RoutingPlan& plan, int count) const override {
    RoutingPlan part = Backend::FirstExperts(plan, count);
    part.num_assignments = plan.expert_offsets[count];
    return part;
  }

  RankOps* rank_ops() override { return &rank_ops_; }
  WeightPages* weight_pages() override { return &weight_pages_; }

  void Embed(const EmbedArgs& args) override { rows_.Embed(args); }
  void Norm(const NormArgs& args) override { rows_.Norm(args); }
  void AssignRows(const AssignRowsArgs& args) override { rows_.AssignRows(args); }
  void Combine(const CombineArgs& args) override { rows_.Combine(args); }
  void Convert(const RowsView& input, const RowsView& output) override {
    rows_.Convert(input, output);
  }
  void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                 float scale) override {
    rows_.AddScaled(x, branch, bias, scale);
  }
  void ScaleBySigmoid(const RowsView& x, const RowsView& gate) override {
    rows_.ScaleBySigmoid(x, gate);
  }
  void MultiplyByGate(const RowsView& x, const RowsView& gate, GateActivation activation) override {
    rows_.MultiplyByGate(x, gate, activation);
  }
  void GatherOutputRows(const RowsView& input, const RowsView& output) override {
    rows_.GatherOutputRows(input, output);
  }
  void GatherSourceRows(const RowsView& input, const RowsView& output) override {
    rows_.GatherSourceRows(input, output);
  }
  void PoolRows(const PoolArgs& args) override { rows_.PoolRows(args); }
  void Scale(const RowsView& x, float factor) override { rows_.Scale(x, factor); }
  void SoftCapRows(const RowsView& x, float cap) override { rows_.SoftCapRows(x, cap); }
  void Clamp(const RowsView& x, float limit) override { rows_.Clamp(x, limit); }
  void Exchange(const ExchangeArgs& args) override { rows_.Exchange(args); }
  void CopyToHost(const RowsView& input, std::span<float> output) override {
    rows_.CopyToHost(input, output);
  }
  void CopyFromHost(std::span<const float> input, const RowsView& output) override {
    rows_.CopyFromHost(input, output);
  }

  Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) override;
  double MeasureArithmetic(ArithmeticKind kind, int rounds) override;

 private:
  const KernelTable& table_;
  std::string description_;
  WeightMemory weight_memory_;
  int64_t weight_bytes_ = 0;
  StepInputs step_;
  Workers workers_;
  LinearOps linear_;
  AttentionOps attention_;
  StateOps states_;
  RoutingOps routing_;
  RowOps rows_;
  CpuRankOps rank_ops_;
  CpuWeightPages weight_pages_;
};

}  // namespace moeserve::cpu
