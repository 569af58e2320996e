// Steps of the CUDA backend: uploading inputs, padding rows, recording and replaying operations.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/cuda_backend.h"

namespace moeserve::cuda {
namespace {

// Steps with more rows are not recorded: they run so long that the time to issue their operations
// is hidden.
constexpr int64_t kMaxReplayedTokens = 256;
constexpr int64_t kMinContext = 256;
constexpr int64_t kMinTableStride = kMinContext / kPageTokens;
// Recordings take device memory. When this limit is reached, all recordings are dropped.
constexpr size_t kMaxRecordings = 128;

int64_t PowerOfTwo(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// Returns the number of rows to which a replayed step is padded. Only few different numbers result,
// so there are few shapes; the padding is less than 8 rows or less than a quarter of the rows,
// whichever is more.
int64_t Bucket(int64_t rows) {
  if (rows <= 8) return PowerOfTwo(rows);
  const int64_t step = std::max<int64_t>(8, PowerOfTwo(rows) / 8);
  return (rows + step - 1) / step * step;
}

}  // namespace

int CudaBackend::SingleTokens(const StepInputs& inputs) const {
  const auto& sequence = inputs.sequence;
  size_t t = 0;
  while (t < sequence.size() && (t + 1 == sequence.size() || sequence[t] != sequence[t + 1])) ++t;
  return static_cast<int>(t);
}

StepRows CudaBackend::BeginStep(const StepInputs& inputs, const void* owner, bool replayable) {
  inputs_ = inputs;
  const int64_t tokens = static_cast<int64_t>(inputs.token_ids.size());
  const int64_t outputs = static_cast<int64_t>(inputs.output_rows.size());
  const int single = SingleTokens(inputs);
  // Only steps in which each token is the only one of its sequence are replayable: tiles of
  // neighbouring tokens would depend on where sequences begin.
  // A step that is counted later may be neither: its recording would lack the counting. Nor may one
  // that pools rows, whose number of pools can differ from that of another step.
  replayable_ = replayable && tokens <= kMaxReplayedTokens && single == tokens && tokens > 0 &&
                !inputs.count_later && inputs.pool_ranges.empty();
  StepRows rows{tokens, outputs};
  if (replayable_) {
    rows.tokens = Bucket(tokens);
    rows.outputs = outputs == 0 ? 0 : std::min(rows.tokens, Bucket(outputs));
  }
  int64_t context = kMinContext, longest = 1;
  for (const int32_t p : inputs.position) context = std::max<int64_t>(context, p + 1);
  for (const int32_t n : inputs.lengths) context = std::max<int64_t>(context, n);
  for (const auto& blocks : inputs.page_tables) {
    longest = std::max(longest, static_cast<int64_t>(blocks.size()));
  }
  const int64_t tables = static_cast<int64_t>(inputs.page_tables.size());
  // Rounded up to a power of two, so there are few shapes. Only the sequences of this step count,
  // so a long sequence of an earlier step costs nothing.
  const int64_t table_stride = std::max(PowerOfTwo(longest), kMinTableStride) + 1;
  const int64_t pools = static_cast<int64_t>(inputs.pool_ranges.size());
  MOESERVE_CHECK(inputs.lengths.empty() || inputs.lengths.size() == inputs.page_tables.size(),
                 "a length for each page table");
  if (buffers_.MustGrow(rows.tokens, tables, table_stride, pools)) {
    DropRecordings();
    CheckStatus(buffers_.Reserve(rows.tokens, tables, table_stride, pools),
                "memory for a step's inputs");
  }
  uint64_t counters_id = 0;
  if (counters() != nullptr) {
    MOESERVE_CHECK(inputs.kind.size() == inputs.token_ids.size(), "what every token is");
    counters_id = counters()->id();
    if (counters()->counters().max_tokens() < rows.tokens) {
      DropRecordings();
      CheckStatus(counters()->counters().Reserve(static_cast<int>(PowerOfTwo(rows.tokens))),
                  "memory for counters");
    }
  }
  step_ = buffers_.Upload(inputs, rows, table_stride, stream_.get());
  shape_ = {owner,
            rows,
            PowerOfTwo(context),
            static_cast<int>(table_stride),
            counters_id,
            inputs.cache == nullptr ? 0 : inputs.cache->id(),
            inputs.state_storage == nullptr ? 0 : inputs.state_storage->id(),
            inputs.variant};
  tiled_from_ = replayable_ ? static_cast<int>(rows.tokens) : single;
  BeginOperations();
  return rows;
}

void CudaBackend::BeginOperations() {
  for (auto& [key, work] : work_) work.laid_out = false;
  rope_tables_.BeginStep();
  for (PlanSlot& slot : slots_) {
    slot.plan = {};
    slot.copied = false;
  }
}

void CudaBackend::RunStep(const std::function<void()>& operations) {
  RunOperations([&] {
    operations();
    if (counters() != nullptr && !inputs_.count_later) CountRoutes();
  });
  buffers_.Download(step_, static_cast<int64_t>(inputs_.token_ids.size()),
                    counters() != nullptr && !inputs_.count_later, stream_.get());
  waited_ = false;
}

StepOutcome CudaBackend::FinishStep() {
  if (!waited_) Synchronize();
  const size_t tokens = inputs_.token_ids.size();
  StepOutcome outcome{.failed = {buffers_.failed(), tokens}, .routes = {}};
  if (counters() != nullptr && !inputs_.count_later) {
    outcome.routes = {buffers_.routes(), tokens};
    NoteRoutes(outcome.routes);
  }
  return outcome;
}

void CudaBackend::NoteRoutes(std::span<const TokenRoutes> routes) {
  double found = 0.0, room = 0.0;
  for (const TokenRoutes& r : routes) found += static_cast<double>(r.routes);
  for (const PlanSlot& slot : slots_) room += static_cast<double>(slot.plan.capacity);
  // The plans have room for the rows that pad the step, too.
  room *= static_cast<double>(routes.size()) / static_cast<double>(shape_.rows.tokens);
  if (found <= 0.0 || room <= 0.0) return;
  constexpr double kNewest = 0.125;
  const double share = std::min(1.0, found / room);
  route_share_ += kNewest * (share - route_share_);
}

std::span<const TokenRoutes> CudaBackend::CountStep(std::span<const uint8_t> kind) {
  const size_t tokens = inputs_.token_ids.size();
  MOESERVE_CHECK(inputs_.count_later && kind.size() == tokens, "what every token turned out to be");
  buffers_.UploadKind(step_, kind, stream_.get());
  CountRoutes();
  buffers_.Download(step_, static_cast<int64_t>(tokens), true, stream_.get());
  Synchronize();
  NoteRoutes({buffers_.routes(), tokens});
  return {buffers_.routes(), tokens};
}

Result<std::unique_ptr<RouteCounters>> CudaBackend::NewRouteCounters(
    const CountSettings& settings) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<CudaRouteCounters> counters,
                            CudaRouteCounters::Create(settings, stream_.get()));
  return std::unique_ptr<RouteCounters>(std::move(counters));
}

// Runs when the plans of all blocks are complete, so that one launch counts all of them.
void CudaBackend::CountRoutes() {
  std::vector<RoutingPlan> plans;
  for (const int slot : counters()->slots()) {
    plans.push_back(static_cast<size_t>(slot) < slots_.size() ? slots_[slot].plan : RoutingPlan{});
  }
  counters()->counters().LaunchCount({.tokens = static_cast<int>(shape_.rows.tokens),
                                      .kind = step_.kind,
                                      .token_ids = step_.token_ids,
                                      .routes = step_.routes},
                                     plans, stream_.get());
}

void CudaBackend::RunOperations(const std::function<void()>& operations) {
  if (!replayable_) {
    operations();
    return;
  }
  if (recordings_.size() >= kMaxRecordings && !recordings_.contains(shape_)) DropRecordings();
  // If memory has to grow during the first run, all recordings are dropped, including the entry for
  // this shape. So the entry is looked up again after the run.
  Recording* recording = &recordings_[shape_];
  if (!recording->ran) {
    operations();
    recordings_[shape_].ran = true;
    return;
  }
  if (!recording->graph) {
    Result<GraphExec> graph = GraphExec::Capture(stream_.get(), [&] {
      operations();
      return absl::OkStatus();
    });
    if (absl::IsResourceExhausted(graph.status())) {
      // Recordings take device memory, so all of them are dropped to free it. This step is issued
      // without a recording; later steps are recorded again.
      DropRecordings();
      BeginOperations();
      operations();
      return;
    }
    CheckStatus(graph.status(), "record a step");
    recording->graph = std::move(graph).value();
    for (const PlanSlot& slot : slots_) recording->plans.push_back(slot.plan);
  }
  // Restores the plans of this recording, because steps of other shapes have overwritten slots_.
  for (size_t i = 0; i < recording->plans.size(); ++i) slots_[i].plan = recording->plans[i];
  CheckStatus(recording->graph.Launch(stream_.get()), "replay a step");
  ++replayed_steps_;
}

void CudaBackend::ForgetSteps(const void* owner) {
  Synchronize();
  std::erase_if(recordings_, [owner](const auto& r) { return r.first.owner == owner; });
}

}  // namespace moeserve::cuda
