// The CUDA backend: it uses one device and one stream, and records steps as graphs.
#pragma once

#include <compare>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "kernels/backend_options.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/dense/dense_layers.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "kernels/cuda/positions/rope_tables.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/cuda/ranks/rank_ops.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/statistics/route_counters.h"
#include "kernels/cuda/step_buffers.h"
#include "kernels/cuda/tuning/attention_tuning.h"
#include "kernels/cuda/tuning/product_tuning.h"
#include "kernels/cuda/tuning/route_tuning.h"
#include "kernels/cuda/tuning/sampler_tuning.h"
#include "kernels/expert_slots.h"

namespace moeserve::cuda {

// Operations are enqueued on one stream and return before they have run; CopyToHost(), HostPlan(),
// ReadSamples() and FinishStep() wait for them. Replayable steps of the same shape: the first one
// is issued operation by operation and allocates the memory that the shape needs; the second one is
// captured as a graph; all later ones replay the graph, without a call per operation and without
// waiting for the host.
class CudaBackend : public Backend, public ExpertSlotsDevice {
 public:
  // Unavailable if there is no usable device; the message states the cause.
  static Result<std::unique_ptr<Backend>> Create(const BackendOptions& options);
  ~CudaBackend() override;

  std::string_view name() const override { return "cuda"; }
  std::string_view description() const override { return description_; }
  std::vector<std::string> warnings() const override;

  Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t bytes) override;
  Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) override;
  bool stores_mxfp4() const override { return true; }
  bool stores_fp8() const override { return true; }
  Result<std::unique_ptr<NormBank>> NewNormBank(NormShape shape, std::span<const HostTensor> scales,
                                                std::span<const HostTensor> shifts) override;
  Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor& table) override;
  Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank& bank) override;
  Result<std::unique_ptr<Router>> NewRouter(const RouteSettings& settings,
                                            const RouterTensors& tensors) override;
  Result<std::unique_ptr<DeviceBuffer>> UploadBytes(std::span<const std::byte> bytes) override;
  Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape> layers,
                                                     KvCacheType type,
                                                     std::vector<int64_t> num_pages) override;
  int64_t PageBytes(std::span<const KvLayerShape> layers, KvCacheType type) const override;

  Result<std::unique_ptr<StateStorage>> NewStates(std::vector<StateShape> shapes, int num_slots,
                                                  int pending_rows) override;

  StepRows BeginStep(const StepInputs& inputs, const void* owner, bool replayable) override;
  void RunStep(const std::function<void()>& operations) override;
  void ForgetSteps(const void* owner) override;

  void Embed(const EmbedArgs& args) override;
  void Norm(const NormArgs& args) override;
  void Linear(const LinearArgs& args) override;
  bool FusesFeedForward(const FeedForwardArgs& args) const override;
  void FusedFeedForward(const FeedForwardArgs& args) override;
  void Rope(const RopeArgs& args) override;
  void ScaleByPosition(const PositionScaleArgs& args) override;
  void AppendKv(const AppendKvArgs& args) override;
  void NormRopeAppend(const NormRopeAppendArgs& args) override;
  void Attention(const AttentionArgs& args) override;
  void ShortConvolution(const ShortConvolutionArgs& args) override;
  void Recurrence(const RecurrenceArgs& args) override;
  RoutingPlan Route(const RouteArgs& args) override;
  // Null with --cuda-dense cublaslt: the library's products of a part of the outputs may differ
  // from those of all, and so may the bits of ranks that divide the output matrix.
  RankOps* rank_ops() override { return rank_ops_.get(); }
  void AssignRows(const AssignRowsArgs& args) override;
  void Combine(const CombineArgs& args) override;
  void Convert(const RowsView& input, const RowsView& output) override;
  void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                 float scale) override;
  void AddNorm(const AddNormArgs& args) override;
  void ScaleBySigmoid(const RowsView& x, const RowsView& gate) override;
  void MultiplyByGate(const RowsView& x, const RowsView& gate, GateActivation activation) override;
  void GatherOutputRows(const RowsView& input, const RowsView& output) override;
  void GatherSourceRows(const RowsView& input, const RowsView& output) override;
  void PoolRows(const PoolArgs& args) override;
  void Scale(const RowsView& x, float factor) override;
  void SoftCapRows(const RowsView& x, float cap) override;
  void Clamp(const RowsView& x, float limit) override;
  bool samples_on_device() const override { return true; }
  void Sample(const RowsView& logits) override;
  void ReadSamples(std::span<SampleResult> results) override;
  void Exchange(const ExchangeArgs& args) override;
  void CopyToHost(const RowsView& input, std::span<float> output) override;
  void CopyFromHost(std::span<const float> input, const RowsView& output) override;
  RoutingPlan HostPlan(int slot) override;
  Result<std::unique_ptr<RouteCounters>> NewRouteCounters(const CountSettings& settings) override;
  StepOutcome FinishStep() override;
  std::span<const TokenRoutes> CountStep(std::span<const uint8_t> kind) override;
  uint64_t replayed_steps() const override { return replayed_steps_; }

  std::unique_ptr<ExpertSlots> NewExpertSlots() override;
  int64_t FreeBytes() const override;

  bool needs_reservation() const override { return true; }
  void BeginTuning() override;
  absl::Status EndTuning() override;
  // If each row uses 8 of 64 experts, an expert then has 256 rows, enough to amortise reading its
  // weights.
  int preferred_step_rows() const override { return 2048; }
  Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) override;
  int64_t weight_bytes() const override { return weight_bytes_; }

 private:
  // Two steps with equal shapes issue the same operations with the same arguments, so a recording
  // of one can be replayed for the other.
  struct StepShape {
    const void* owner = nullptr;
    StepRows rows;
    int64_t context = 0;  // a power of two, at least all positions + 1 and lengths of the step
    int table_stride = 0;
    uint64_t counters = 0;  // 0 if nothing is counted
    uint64_t cache = 0;     // 0 if no cache is used
    uint64_t states = 0;    // 0 if no states are used
    int variant = 0;

    auto Tie() const {
      return std::tie(owner, rows.tokens, rows.outputs, context, table_stride, counters, cache,
                      states, variant);
    }
    bool operator<(const StepShape& other) const { return Tie() < other.Tie(); }
  };
  struct Recording {
    bool ran = false;  // whether the operations ran once without capture
    GraphExec graph;
    std::vector<RoutingPlan> plans;  // indexed by slot: the plans that the recorded operations
                                     // return
  };
  // A routing plan and its copy in host memory.
  struct PlanSlot {
    PlanMemory memory;
    RoutingPlan plan;  // without arrays if the slot was not routed in this step
    std::vector<char> host;
    bool copied = false;
  };
  struct WorkKey {
    int window;
    bool chunks;
    int split_tokens;
    int table;  // whose lengths the work depends on; -1 if attention is causal
    auto operator<=>(const WorkKey&) const = default;
  };
  struct WorkSlot {
    DeviceMemory memory;
    AttentionWork work;  // without `partial`, which is the same memory for all
    int max_tokens = 0;
    int64_t row_floats = 0;
    bool laid_out = false;  // whether `work` was computed in this step, for these tokens:
    int first_token = 0, tokens = 0;
  };

  // An exchange of fixed sizes with its host memory. Recorded steps refer to it.
  struct ExchangeCall {
    HostExchange* exchange = nullptr;
    PinnedMemory sent, received;
    size_t sent_bytes = 0, received_bytes = 0;
  };
  using ExchangeKey = std::tuple<const HostExchange*, size_t, size_t>;

  CudaBackend() = default;

  Result<std::unique_ptr<CudaLinearBank>> MakeBank(LinearBankShape shape, BankMemory memory);
  // Returns `status`. If memory ran out, the message also states the free memory and the memory of
  // the weights.
  absl::Status WithBudget(const absl::Status& status, const std::string& what) const;
  // CheckStatus() and CheckCall() stop the process with CUDA's error message if a call in a step
  // fails, because the device is unusable after such an error.
  void CheckStatus(const absl::Status& status, const char* what) const;
  void CheckCall(cudaError_t error, const char* what) const;
  void Synchronize();
  // Must be called before the operations of a step are issued, also before they are captured.
  void BeginOperations();
  void RunOperations(const std::function<void()>& operations);
  void CountRoutes();
  // Updates the share of plans that is used, from what a step has counted.
  void NoteRoutes(std::span<const TokenRoutes> routes);
  void CopyPlans();
  CudaRouteCounters* counters() const { return static_cast<CudaRouteCounters*>(inputs_.counters); }
  // Drops all recordings; must be called before memory that recorded steps use is moved.
  void DropRecordings();
  // Opens the file with the choices of an earlier start.
  absl::Status OpenChoices(const BackendOptions& options);
  DeviceMemory AllocateForStep(size_t bytes, const char* what);
  // Copies pageable memory to the device and waits for the copy.
  void CopyIn(void* to, const void* from, size_t bytes);
  const RouteOverride* UploadOverrides(std::span<const RouteOverride> overrides, int experts);
  static NormLaunch LaunchOf(const AddNormArgs& args);
  NormRopeAppendLaunch LaunchOf(const NormRopeAppendArgs& args);
  // Launches a linear layer together with what comes before it, or returns false.
  bool JoinsLinear(const LinearArgs& args);
  // `view` begins with the token `first_token` of the step.
  AttentionWork WorkFor(const StepView& view, int first_token, int tiled_from, const WorkKey& key,
                        int64_t row_floats);
  // Returns the rotary angles of the step's tokens for these settings.
  const float2* RopeAngles(const RopeSettings& settings);
  StepView View() const;
  // Returns the view with the pages of a layer of the cache.
  StepView ViewOf(const KvCacheStorage& cache, int layer) const;
  ExchangeCall& CallFor(const ExchangeArgs& args);
  // Returns pinned memory that no pending copy uses.
  char* Staging(size_t bytes);
  // Returns the number of leading tokens of the step that are the only token of their sequence.
  int SingleTokens(const StepInputs& inputs) const;

  std::string description_;
  Stream stream_;
  std::unique_ptr<CudaRankOps> rank_ops_;
  std::unique_ptr<DenseLayers> dense_;  // null: the kernels of linear.h compute all dense layers
  // The kernels that were chosen by measuring; null with --cuda-tune off.
  std::unique_ptr<Choices> choices_;
  std::unique_ptr<ProductTuning> products_;
  std::unique_ptr<AttentionTuning> attention_tuning_;
  std::unique_ptr<RouteTuning> route_tuning_;
  std::unique_ptr<SamplerTuning> sampler_tuning_;
  std::vector<KernelTuning*> tunings_;  // all of them, in the order in which they measure
  bool tunes_fully_ = false;
  std::string choices_file_, choices_key_;
  std::vector<std::string> tuning_messages_;
  StepBuffers buffers_;
  Int8Rows int8_rows_;  // of one product after another
  std::map<StepShape, Recording> recordings_;
  StepShape shape_;
  StepInputs inputs_;
  DeviceStep step_;
  uint64_t replayed_steps_ = 0;
  bool replayable_ = false;
  int tiled_from_ = 0;
  bool waited_ = false;  // whether the host has waited since the step's last operation was issued
  std::vector<PlanSlot> slots_;
  // The share of their capacity that plans have used, a mean in which later steps weigh more. Only
  // the choice of kernels depends on it. Below 1 if rows take as many experts as they need (top-p).
  double route_share_ = 1.0;
  DeviceMemory packed_;  // scratch of CopyPlans()
  RouteScratch route_scratch_;
  std::map<WorkKey, WorkSlot> work_;
  DeviceMemory partial_results_;  // of attention; launches use it one after another
  DeviceMemory tile_sums_;        // AttentionLaunch::tile_sums
  RopeTables rope_tables_;
  DeviceMemory sampled_;  // [outputs] SampleResult
  DeviceMemory overrides_;
  DeviceMemory given_;
  PinnedMemory staging_;  // used by CopyToHost(), CopyFromHost() and other copies to the host
  std::map<ExchangeKey, ExchangeCall> exchanges_;
  int64_t weight_bytes_ = 0;
};

}  // namespace moeserve::cuda
