#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/check.h"

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

// Returns the most operations per second of `rounds` calls run(round), which return their number.
template <typename Run>
double BestRate(int rounds, const Run& run) {
  double best = 0.0;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    const auto operations = static_cast<double>(run(round));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, operations / seconds.count());
  }
  return best;
}

}  // namespace

CpuBackend::CpuBackend(const KernelTable* table, int threads)
    : table_(*table),
      description_(std::string("cpu, ") + table->name + ", " + std::to_string(threads) +
                   (threads == 1 ? " thread" : " threads")),
      workers_(threads),
      linear_(table_, workers_),
      attention_(table_, workers_, step_),
      states_(table_, workers_, step_),
      routing_(table_, workers_, step_),
      rows_(table_, workers_, step_),
      rank_ops_(workers_),
      weight_pages_(workers_) {}

Result<std::unique_ptr<DeviceBuffer>> CpuBackend::Allocate(size_t bytes) {
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer memory, HostBuffer::Allocate(bytes));
  return std::make_unique<CpuBuffer>(std::move(memory));
}

Result<std::unique_ptr<LinearBank>> CpuBackend::NewLinearBank(LinearBankShape shape) {
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<LinearBank> bank,
      CpuLinearBank::Create(std::move(shape), weight_memory_, &workers_.pool()));
  weight_bytes_ += CpuLinearBank::Bytes(bank->shape());
  return bank;
}

Result<std::unique_ptr<LinearBank>> CpuBackend::NewPackedBank(LinearBankShape shape,
                                                              PackedBytes packed) {
  std::unique_ptr<LinearBank> bank =
      CpuLinearBank::View(std::move(shape), std::move(packed), &workers_.pool());
  weight_bytes_ += CpuLinearBank::Bytes(bank->shape());
  return bank;
}

Result<std::unique_ptr<EmbeddingTable>> CpuBackend::NewEmbeddingTable(const HostTensor& table) {
  auto own = NewCpuEmbeddingTable(table, table_);
  if (own.ok()) weight_bytes_ += table.size() * static_cast<int64_t>(SizeOf(table.dtype));
  return own;
}

Result<std::unique_ptr<DeviceBuffer>> CpuBackend::UploadBytes(std::span<const std::byte> bytes) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBuffer> buffer, Allocate(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(buffer->data()));
  return buffer;
}

StepRows CpuBackend::BeginStep(const StepInputs& inputs, const void*, bool) {
  step_ = inputs;
  attention_.BeginStep();
  routing_.BeginStep();
  return {static_cast<int64_t>(inputs.token_ids.size()),
          static_cast<int64_t>(inputs.output_rows.size())};
}

Result<double> CpuBackend::MeasureReadBandwidth(int64_t bytes, int rounds) {
  constexpr int64_t kPart = int64_t{8} << 20;  // a task of one thread: long enough to be read as a
                                               // sequential stream
  const int64_t parts = bytes / kPart;
  if (parts < 1) return absl::InvalidArgumentError("bandwidth: expected 8 MiB or more");
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer memory,
                            HostBuffer::Allocate(static_cast<size_t>(parts * kPart)));
  ThreadPool& pool = workers_.pool();
  // The system allocates a page only when it is first written.
  pool.Run(parts, [&](int64_t i, int) { std::memset(memory.data() + i * kPart, 1, kPart); });
  std::atomic<uint64_t> sum{0};
  const double best = BestRate(rounds, [&](int round) {
    // Which prefetches are fastest depends on the processor.
    constexpr int kPrefetchLevels[] = {1, 2, 0};
    const int level = kPrefetchLevels[round % 3];
    pool.Run(parts, [&](int64_t i, int) {
      sum.fetch_add(table_.read_stream(memory.data() + i * kPart, kPart, level));
    });
    return parts * kPart;
  });
  MOESERVE_CHECK(sum.load() != 0, "the bandwidth probe reads what it wrote");
  return best;
}

double CpuBackend::MeasureArithmetic(ArithmeticKind kind, int rounds) {
  const auto probe = kind == ArithmeticKind::kF32    ? table_.arithmetic_f32
                     : kind == ArithmeticKind::kBF16 ? table_.arithmetic_bf16
                                                     : table_.arithmetic_int8;
  if (probe == nullptr) return 0.0;
  // A round takes some milliseconds: little compared with the time slice of a thread on a busy
  // machine, and much compared with the time to hand tasks to threads.
  constexpr int64_t kIterations = 30'000;
  const int64_t parts = int64_t{32} * threads();
  std::vector<float> sinks(static_cast<size_t>(threads()) * 16);  // one cache line per thread
  return BestRate(rounds, [&](int) {
    std::atomic<int64_t> operations{0};
    workers_.pool().Run(parts, [&](int64_t, int worker) {
      operations.fetch_add(probe(kIterations, &sinks[static_cast<size_t>(worker) * 16]),
                           std::memory_order_relaxed);
    });
    return operations.load();
  });
}

}  // namespace moeserve::cpu
