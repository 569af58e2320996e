#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/kv_cache.h"
#include "kernels/cpu/packed_bank.h"
#include "kernels/cpu/route_counters.h"

namespace moeserve::cpu {
namespace {

class CpuBuffer : public DeviceBuffer {
 public:
  explicit CpuBuffer(HostBuffer memory) : memory_(std::move(memory)) {}
  void* data() const override { return memory_.data(); }
  size_t bytes() const override { return memory_.bytes(); }

 private:
  HostBuffer memory_;
};

}  // namespace

CpuBackend::CpuBackend(const KernelTable* table, int threads)
    : table_(table),
      fetch_l1_(PrefetchesToL1()),
      pool_(threads),
      scratch_(static_cast<size_t>(threads)),
      queues_(static_cast<size_t>(threads)) {
  description_ = std::string("cpu, ") + table->name + ", " + std::to_string(threads) +
                 (threads == 1 ? " thread" : " threads");
}

void CpuBackend::RunQueues(int queues, int64_t step,
                           absl::FunctionRef<void(int64_t begin, int64_t end, int worker)> run) {
  pool_.Run(queues, [&](int64_t, int worker) {
    for (int i = 0; i < queues; ++i) {
      Queue& queue = queues_[(worker + i) % queues];
      for (;;) {
        const int64_t begin = queue.next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= queue.end) break;
        run(begin, queue.end, worker);
      }
    }
  });
}

Result<std::unique_ptr<DeviceBuffer>> CpuBackend::Allocate(size_t bytes) {
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer memory, HostBuffer::Allocate(bytes));
  return std::unique_ptr<DeviceBuffer>(std::make_unique<CpuBuffer>(std::move(memory)));
}

Result<std::unique_ptr<LinearBank>> CpuBackend::NewLinearBank(LinearBankShape shape) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                            CpuLinearBank::Create(std::move(shape), weight_memory_, &pool_));
  weight_bytes_ += static_cast<const CpuLinearBank&>(*bank).bytes();
  return bank;
}

int64_t CpuBackend::PackedBankBytes(const LinearBankShape& shape) const {
  return CpuLinearBank::Bytes(shape);
}

Result<std::unique_ptr<LinearBank>> CpuBackend::NewPackedBank(LinearBankShape shape,
                                                              PackedBytes packed) {
  std::unique_ptr<LinearBank> bank =
      CpuLinearBank::View(std::move(shape), std::move(packed), &pool_);
  weight_bytes_ += static_cast<const CpuLinearBank&>(*bank).bytes();
  return bank;
}

Result<std::unique_ptr<DeviceBuffer>> CpuBackend::Upload(std::span<const float> values) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBuffer> buffer, Allocate(values.size_bytes()));
  std::copy(values.begin(), values.end(), static_cast<float*>(buffer->data()));
  return buffer;
}

Result<std::unique_ptr<KvCacheStorage>> CpuBackend::NewKvCache(std::vector<KvLayerShape> layers,
                                                               KvCacheType type,
                                                               int64_t num_pages) {
  return CpuKvCache::Allocate(std::move(layers), type, num_pages);
}

int64_t CpuBackend::PageBytes(std::span<const KvLayerShape> layers, KvCacheType type) const {
  return CpuKvCache::BytesPerBlock(layers, type);
}

StepRows CpuBackend::BeginStep(const StepInputs& inputs, const void*, bool) {
  step_ = inputs;
  ++step_number_;
  failed_.assign(inputs.token_ids.size(), 0);
  return {static_cast<int64_t>(inputs.token_ids.size()),
          static_cast<int64_t>(inputs.output_rows.size())};
}

void CpuBackend::RunStep(const std::function<void()>& operations) {
  operations();
  if (step_.counters != nullptr && !step_.count_later) CountRoutes(step_.kind);
}

void CpuBackend::CountRoutes(std::span<const uint8_t> kind) {
  auto& counters = static_cast<CpuRouteCounters&>(*step_.counters);
  counted_plans_.clear();
  for (const CountedBlock& block : counters.settings().blocks) {
    const size_t slot = static_cast<size_t>(block.slot);
    const bool routed = slot < plans_.size() && plans_[slot].step == step_number_;
    counted_plans_.push_back(routed ? &plans_[slot].plan : nullptr);
  }
  routes_.resize(step_.token_ids.size());
  counters.Count(kind, step_.token_ids, counted_plans_, routes_);
}

std::span<const TokenRoutes> CpuBackend::CountStep(std::span<const uint8_t> kind) {
  CountRoutes(kind);
  return routes_;
}

StepOutcome CpuBackend::FinishStep() {
  StepOutcome outcome{.failed = failed_, .routes = {}};
  if (step_.counters != nullptr && !step_.count_later) outcome.routes = routes_;
  return outcome;
}

Result<std::unique_ptr<RouteCounters>> CpuBackend::NewRouteCounters(const CountSettings& settings) {
  return std::unique_ptr<RouteCounters>(std::make_unique<CpuRouteCounters>(settings));
}

Result<double> CpuBackend::MeasureReadBandwidth(int64_t bytes, int rounds) {
  constexpr int64_t kPart = int64_t{8} << 20;  // a task of one thread: long enough to be read as a
                                               // sequential stream
  const int64_t parts = bytes / kPart;
  if (parts < 1) return absl::InvalidArgumentError("bandwidth: expected 8 MiB or more");
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer memory,
                            HostBuffer::Allocate(static_cast<size_t>(parts * kPart)));
  // The system allocates a page only when it is first written.
  pool_.Run(parts, [&](int64_t i, int) { std::memset(memory.data() + i * kPart, 1, kPart); });
  double best = 0.0;
  std::atomic<uint64_t> sum{0};
  for (int round = 0; round < rounds; ++round) {
    // Which prefetches are fastest depends on the processor.
    constexpr int kPrefetchLevels[] = {1, 2, 0};
    const int level = kPrefetchLevels[round % 3];
    const auto start = std::chrono::steady_clock::now();
    pool_.Run(parts, [&](int64_t i, int) {
      sum.fetch_add(table_->read_stream(memory.data() + i * kPart, kPart, level));
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(parts * kPart) / seconds.count());
  }
  MOESERVE_CHECK(sum.load() != 0, "the bandwidth probe reads what it wrote");
  return best;
}

double CpuBackend::MeasureArithmetic(ArithmeticKind kind, int rounds) {
  const auto probe = kind == ArithmeticKind::kF32    ? table_->arithmetic_f32
                     : kind == ArithmeticKind::kBF16 ? table_->arithmetic_bf16
                                                     : table_->arithmetic_int8;
  if (probe == nullptr) return 0.0;
  // A round takes some milliseconds: little compared with the time slice of a thread on a busy
  // machine, and much compared with the time to hand tasks to threads.
  constexpr int64_t kIterations = 30'000;
  const int64_t parts = int64_t{32} * pool_.threads();
  double best = 0.0;
  std::vector<float> sinks(static_cast<size_t>(pool_.threads()) * 16);  // one cache line per thread
  for (int round = 0; round < rounds; ++round) {
    std::atomic<int64_t> operations{0};
    const auto start = std::chrono::steady_clock::now();
    pool_.Run(parts, [&](int64_t, int worker) {
      operations.fetch_add(probe(kIterations, &sinks[static_cast<size_t>(worker) * 16]),
                           std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(operations.load()) / seconds.count());
  }
  return best;
}

}  // namespace moeserve::cpu
