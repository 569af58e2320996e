#include "kernels/cpu/cpu_backend.h"

#include "kernels/cpu/packed_bank.h"

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
    : table_(table), pool_(threads), scratch_(static_cast<size_t>(threads)) {
  description_ = std::string("cpu, ") + table->name + ", " + std::to_string(threads) +
                 (threads == 1 ? " thread" : " threads");
}

Result<std::unique_ptr<DeviceBuffer>> CpuBackend::Allocate(size_t bytes) {
  MOESERVE_ASSIGN_OR_RETURN(HostBuffer memory, HostBuffer::Allocate(bytes));
  return std::unique_ptr<DeviceBuffer>(std::make_unique<CpuBuffer>(std::move(memory)));
}

Result<std::unique_ptr<LinearBank>> CpuBackend::NewLinearBank(LinearBankShape shape) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                            CpuLinearBank::Create(std::move(shape)));
  weight_bytes_ += static_cast<const CpuLinearBank&>(*bank).bytes();
  return bank;
}

}  // namespace moeserve::cpu
