// Experts whose weights lie in the host's memory, while a device has room for copies of some.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"

namespace moeserve {

struct ExpertSlotCounts {
  // Bytes of chosen experts that were on the device when their turn came, and that were copied;
  // both 0 if all experts stay on the device.
  uint64_t hit_bytes = 0;
  uint64_t copied_bytes = 0;
  uint64_t waves = 0;  // products of a part of a plan's experts, if not all fitted at once
};

// The experts of one model. Which ones are on the device decides nothing about bits: the products
// are the same, and each expert's results lie in rows of their own. Must not outlive the backend.
// Called by one thread at a time.
class ExpertSlots {
 public:
  virtual ~ExpertSlots() = default;

  // Setup: all banks, then all blocks, then Start().
  // Like Backend::NewLinearBank(), for a bank that is used with plans only. ResourceExhausted if
  // the host has no memory for the weights.
  virtual Result<std::unique_ptr<LinearBank>> NewBank(LinearBankShape shape) = 0;
  // Says that the banks, whose weights are loaded, are used together: an expert's matrices of all
  // of them come and go together. Returns the number of the block. The banks must outlive Run().
  virtual int AddBlock(std::span<LinearBank* const> banks) = 0;
  // Returns the bytes of device memory that all experts need.
  virtual int64_t bytes() const = 0;
  // Takes at most `bytes` of device memory. If all experts fit, they stay there. InvalidArgument if
  // the largest expert does not fit; ResourceExhausted if the device has less memory.
  virtual absl::Status Start(int64_t bytes) = 0;
  // Returns whether experts come and go; then steps must not be replayable.
  virtual bool in_force() const = 0;

  // Part of a step. Calls `products` for parts of the experts that have rows in `part`, which
  // together are all of them, ascending, or once if none has rows. Before each call, the experts of
  // its plan are copied to the device, as far as they are not there. The rows of a call's plan are
  // those of `part` from the row `first` on. `plan` has the assignments of `part`, maybe also those
  // of further experts behind them, and all arrays. Waits for the plan.
  using Products = std::function<void(const RoutingPlan& plan, int64_t first)>;
  virtual void Run(int block, const RoutingPlan& plan, const RoutingPlan& part,
                   const Products& products) = 0;

  virtual ExpertSlotCounts counts() const = 0;
};

// Implemented by the backends of devices that can do this.
class ExpertSlotsDevice {
 public:
  virtual ~ExpertSlotsDevice() = default;
  virtual std::unique_ptr<ExpertSlots> NewExpertSlots() = 0;
  // Returns the bytes of device memory that are free now.
  virtual int64_t FreeBytes() const = 0;
};

}  // namespace moeserve
