// Copies of experts in device memory, which come and go.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/ranks/rank_ops.h"
#include "kernels/cuda/slots/slot_memory.h"
#include "kernels/expert_slots.h"

namespace moeserve::cuda {

// A pool of device memory for the experts of all blocks. An expert that is needed takes the place
// of those that were used least recently. Copies are made in the order of the stream of the
// products: they begin when all earlier products have ended, and later ones wait for them. So
// nobody overwrites what is read.
class CudaExpertSlots final : public ExpertSlots {
 public:
  // Makes a bank whose images are in host memory.
  using MakeBank = std::function<Result<std::unique_ptr<CudaLinearBank>>(LinearBankShape)>;
  // `add_bytes` is told how much device memory is used. The stream outlives the object.
  CudaExpertSlots(cudaStream_t stream, MakeBank make_bank, std::function<void(int64_t)> add_bytes)
      : stream_(stream),
        make_bank_(std::move(make_bank)),
        add_bytes_(std::move(add_bytes)),
        division_(stream) {}

  Result<std::unique_ptr<LinearBank>> NewBank(LinearBankShape shape) override;
  int AddBlock(std::span<LinearBank* const> banks) override;
  int64_t bytes() const override { return bytes_; }
  absl::Status Start(int64_t bytes) override;
  bool in_force() const override { return !all_stay_; }
  void Run(int block, const RoutingPlan& plan, const RoutingPlan& part,
           const Products& products) override;
  ExpertSlotCounts counts() const override { return counts_; }

 private:
  struct Key {
    int block;
    int expert;
  };
  using Recent = std::list<Key>;
  struct Expert {
    int64_t bytes = 0;             // of the images of all banks; 0: it has none here
    int64_t offset = -1;           // in the pool; -1: it is not there
    uint64_t wave = 0;             // the last wave that needs it
    Recent::iterator recent = {};  // if it is in the pool
  };
  struct Block {
    std::vector<CudaLinearBank*> banks;
    std::vector<Expert> experts;
    // [banks] images that were copied and are not yet in the bank's table.
    std::vector<std::vector<PlacedImage>> copied;
  };

  static int64_t ImagePlace(int64_t bytes) {
    return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  }
  // Brings an expert into the pool for the current wave. Returns false if the others of the wave
  // leave no room for it.
  bool Bring(int block, int expert);
  // Enqueues the copies of an expert with a place in the pool.
  absl::Status Copy(Block& block, int expert);
  // Takes the place of the expert that was used least recently, unless the current wave needs it.
  // Returns false if the wave needs all.
  bool DropOldest();
  // Writes the places of what was copied to the tables of the banks.
  absl::Status Place(Block& block);
  // Returns the part of the plan that belongs to the experts [begin, end).
  PlanParts PartOf(const RoutingPlan& plan, int places, int begin, int end,
                   std::span<const int32_t> offsets);

  cudaStream_t stream_;
  const MakeBank make_bank_;
  const std::function<void(int64_t)> add_bytes_;
  CudaRankOps division_;  // divides plans into waves
  std::vector<Block> blocks_;
  int64_t bytes_ = 0;
  bool all_stay_ = false;
  DeviceMemory pool_;
  SlotMemory places_;
  Recent recent_;  // the experts in the pool, those used least recently first
  uint64_t wave_ = 0;
  int64_t divided_ = 0;  // the elements of the largest plan for whose division there is memory
  ExpertSlotCounts counts_;
};

}  // namespace moeserve::cuda
