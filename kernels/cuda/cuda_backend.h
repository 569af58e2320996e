// The CUDA backend: one device, one stream, steps recorded as graphs.
#pragma once

#include <compare>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/rope_tables.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/statistics/route_counters.h"
#include "kernels/cuda/step_buffers.h"
#include "kernels/registry.h"

namespace moeserve::cuda {

// Operations are issued to one stream and return before they are done; CopyToHost() and HostPlan()
// wait. Of the replayable steps of one shape the first runs as issued, which grows all memory to
// its size, the second is captured as a graph and the others replay it, without calls per operation
// and without waiting for the host.
class CudaBackend : public Backend {
 public:
  // Unavailable without a usable device, with the cause.
  static Result<std::unique_ptr<Backend>> Create(const BackendOptions& options);
  ~CudaBackend() override;

  std::string_view name() const override { return "cuda"; }
  std::string_view description() const override { return description_; }

  Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t bytes) override;
  Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) override;
  Result<std::unique_ptr<NormBank>> NewNormBank(NormShape shape, std::span<const HostTensor> scales,
                                                std::span<const HostTensor> shifts) override;
  Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor& table) override;
  Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank& bank) override;
  Result<std::unique_ptr<Router>> NewRouter(const RouteSettings& settings,
                                            const RouterTensors& tensors) override;
  Result<std::unique_ptr<DeviceBuffer>> Upload(std::span<const float> values) override;
  Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape> layers,
                                                     KvCacheType type, int64_t num_blocks) override;
  int64_t KvBlockBytes(std::span<const KvLayerShape> layers, KvCacheType type) const override;

  StepRows BeginStep(const StepInputs& inputs, const void* owner, bool replayable) override;
  void RunStep(const std::function<void()>& operations) override;
  void ForgetSteps(const void* owner) override;

  void Embed(const EmbedArgs& args) override;
  void Norm(const NormArgs& args) override;
  void Linear(const LinearArgs& args) override;
  bool FusesFeedForward(const LinearBank& up, const LinearBank& down, DType dtype,
                        int64_t rows) const override;
  void FusedFeedForward(const FeedForwardArgs& args) override;
  void Rope(const RopeArgs& args) override;
  void AppendKv(const AppendKvArgs& args) override;
  void NormRopeAppend(const NormRopeAppendArgs& args) override;
  void Attention(const AttentionArgs& args) override;
  RoutingPlan Route(const RouteArgs& args) override;
  void Combine(const CombineArgs& args) override;
  void Convert(const RowsView& input, const RowsView& output) override;
  void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                 float scale) override;
  void AddNorm(const AddNormArgs& args) override;
  void ScaleBySigmoid(const RowsView& x, const RowsView& gate) override;
  void GatherOutputRows(const RowsView& input, const RowsView& output) override;
  void Scale(const RowsView& x, float factor) override;
  bool samples_on_device() const override { return true; }
  void Sample(const RowsView& logits) override;
  void ReadSamples(std::span<SampleResult> results) override;
  void CopyToHost(const RowsView& input, std::span<float> output) override;
  void CopyFromHost(std::span<const float> input, const RowsView& output) override;
  RoutingPlan HostPlan(int slot) override;
  Result<std::unique_ptr<RouteCounters>> NewRouteCounters(const CountSettings& settings) override;
  StepOutcome FinishStep() override;
  uint64_t replayed_steps() const override { return replayed_steps_; }

  bool needs_reservation() const override { return true; }
  // With 8 of 64 experts per row an expert then has 256 rows, enough to amortise its weights.
  int preferred_step_rows() const override { return 2048; }
  Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) override;
  int64_t weight_bytes() const override { return weight_bytes_; }

 private:
  // Two steps with equal keys issue the same operations with the same arguments.
  struct StepShape {
    const void* owner = nullptr;
    StepRows rows;
    int64_t context = 0;  // bound of the positions
    int table_stride = 0;
    uint64_t counters = 0;  // 0: nothing is counted
    uint64_t cache = 0;     // 0: none is used
    int variant = 0;

    auto Tie() const {
      return std::tie(owner, rows.tokens, rows.outputs, context, table_stride, counters, cache,
                      variant);
    }
    bool operator<(const StepShape& other) const { return Tie() < other.Tie(); }
  };
  struct Recording {
    bool ran = false;  // once, without capture
    GraphExec graph;
    std::vector<RoutingPlan> plans;  // by slot, as the recorded operations leave them
  };
  // A plan and its copy in host memory.
  struct PlanSlot {
    PlanMemory memory;
    RoutingPlan plan;  // without arrays: not routed in this step
    std::vector<char> host;
    bool copied = false;
  };
  struct WorkKey {
    int window;
    int split_tokens;
    auto operator<=>(const WorkKey&) const = default;
  };
  struct WorkSlot {
    DeviceMemory memory;
    AttentionWork work;
    int max_tokens = 0;
    int64_t row_floats = 0;
    bool laid_out = false;  // in this step
  };

  CudaBackend() = default;

  // `status`; where memory is missing, with the free memory and that of the weights.
  absl::Status WithBudget(const absl::Status& status, const std::string& what) const;
  // Stop the process with CUDA's message where a call of a step fails: the device is unusable then.
  void CheckStatus(const absl::Status& status, const char* what) const;
  void CheckCall(cudaError_t error, const char* what) const;
  void Synchronize();
  // Called before the operations of a step are issued, for capture too.
  void BeginOperations();
  void RunOperations(const std::function<void()>& operations);
  void CountRoutes();
  void CopyPlans();
  CudaRouteCounters* counters() const { return static_cast<CudaRouteCounters*>(inputs_.counters); }
  // Forgets every recording; before memory that steps work on moves.
  void DropRecordings();
  DeviceMemory AllocateForStep(size_t bytes, const char* what);
  // Copies pageable memory to the device and waits.
  void CopyIn(void* to, const void* from, size_t bytes);
  const RouteOverride* UploadOverrides(std::span<const RouteOverride> overrides, int experts);
  const AttentionWork& WorkFor(int window, int split_tokens, int64_t row_floats);
  // The angles of the step's tokens for these settings.
  const float2* RopeAngles(const RopeSettings& settings);
  StepView View() const;
  // Pinned memory that no copy uses.
  char* Staging(size_t bytes);
  // Tokens at the front of the step that are their sequence's only one.
  int SingleTokens(const StepInputs& inputs) const;

  std::string description_;
  Stream stream_;
  StepBuffers buffers_;
  std::map<StepShape, Recording> recordings_;
  StepShape shape_;
  StepInputs inputs_;
  DeviceStep step_;
  uint64_t replayed_steps_ = 0;
  bool replayable_ = false;
  int tiled_from_ = 0;
  bool waited_ = false;  // for the step, since its last operation was issued
  std::vector<PlanSlot> slots_;
  DeviceMemory packed_;  // of CopyPlans()
  RouteScratch route_scratch_;
  std::map<WorkKey, WorkSlot> work_;
  RopeTables rope_tables_;
  DeviceMemory sampled_;  // [outputs] SampleResult
  DeviceMemory overrides_;
  DeviceMemory given_;
  PinnedMemory staging_;  // of CopyToHost and CopyFromHost
  int64_t weight_bytes_ = 0;
};

}  // namespace moeserve::cuda
