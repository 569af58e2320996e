// The experts that a model reads from mapped files, or from the memory of the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/tiers/packed_file.h"
#include "engine/tiers/policy_trial.h"
#include "engine/tiers/tier_options.h"
#include "kernels/backend.h"
#include "kernels/expert_slots.h"
#include "kernels/weight_pages.h"

namespace moeserve {

class ExpertTiers;

// What a routed layer calls around the products of its experts. Called by the model's thread.
class BlockTier {
 public:
  // After routing, before the first product of the experts that have rows in `plan`, whose order it
  // may set; the order lives until the next call. `prompt`: the step has rows of prompts.
  void BeforeProducts(RoutingPlan& plan, bool prompt);
  // After the last product.
  void AfterProducts();

  // The same around `products` of the experts that have rows in `part`. With slots of a device,
  // they may be called for parts of them, as ExpertSlots::Run() does, whose `plan` this is.
  void RunProducts(const RoutingPlan& plan, RoutingPlan& part, bool prompt,
                   const ExpertSlots::Products& products);

 private:
  friend class ExpertTiers;
  BlockTier(ExpertTiers& tiers, std::vector<std::shared_ptr<PackedExperts>> files, size_t number)
      : tiers_(tiers), files_(std::move(files)), number_(number) {}
  // A block of slots.
  BlockTier(ExpertTiers& tiers, int block) : tiers_(tiers), number_(static_cast<size_t>(block)) {}
  // Finds what is missing of the chosen experts.
  void LookForPages();
  // Requests the pages that are missing.
  void RequestPages();
  // Requests missing pages of the experts that the last step without prompts has chosen, as many
  // whole experts of a bank as `bytes` allow.
  void RequestLastChosen(int64_t bytes);
  // Sets the order of the experts: those in memory come first.
  void SetOrder(RoutingPlan& plan);
  // Compares the checksums of experts that are used for the first time.
  void VerifyChosen();

  ExpertTiers& tiers_;
  const std::vector<std::shared_ptr<PackedExperts>> files_;  // of the banks of the block
  const size_t number_;  // ExpertTiers::blocks_[number_] is this; with slots, the block's number
  std::vector<int> last_chosen_;  // by the last step without prompts
  // Of the current plan.
  std::vector<int> chosen_;       // ascending
  std::vector<int64_t> missing_;  // bytes of each of them that are not in memory
  std::vector<int32_t> order_;
  bool prompt_ = false;
};

// One object per model. Called by one thread at a time.
class ExpertTiers {
 public:
  // `pages` must outlive the object. Null: the backend reads no files.
  ExpertTiers(WeightPages* pages, const TierOptions& options)
      : pages_(pages), options_(options), trial_(options.policy) {}

  // Before banks are loaded: says that the routed layers need about `experts` bytes on the device,
  // and all others `dense`. If they do not all fit, experts lie in the memory of the host, and the
  // device has slots for them. The device must outlive the object.
  void UseSlotsOf(ExpertSlotsDevice& device, int64_t experts, int64_t dense);
  // Makes the bank of a routed layer.
  Result<std::unique_ptr<LinearBank>> NewBank(Backend& backend, LinearBankShape shape);
  // Whether steps must not be replayable.
  bool uses_slots() const { return slots_ != nullptr && slots_->in_force(); }

  // Says that `bank` reads its experts from a file, whose checksums are not yet compared. `here`
  // [E] are those that this process computes; empty: all.
  void Add(const LinearBank* bank, std::shared_ptr<PackedExperts> experts,
           const std::vector<bool>& here);
  // Says that a bank reads all of its weights, in every step, from a file.
  void AddDense(std::shared_ptr<PackedExperts> experts) { dense_.push_back(std::move(experts)); }
  // To be called when all banks are added, of which the backend has `weight_bytes`. Decides whether
  // policies or slots are in force. If so, keeps dense weights in memory, as far as the system
  // allows it. Fails if the device has too little memory for slots.
  absl::Status FinishLoading(int64_t weight_bytes);

  // Returns what a routed layer with these banks calls; null if it reads none from a file, without
  // slots. Must not outlive this object. To be called in the order of the blocks. All blocks must
  // exist while one of them is called.
  std::unique_ptr<BlockTier> NewBlock(const std::vector<LinearBank*>& banks);

  // To be called before each step: applies the policy.
  void BeginStep();
  // To be called after each step.
  void EndStep();

  TierCounts counts() const;
  // Returns the bytes of the experts that this process reads from files.
  int64_t bytes() const { return bytes_; }

  // Returns the first error of PackedExperts::Verify(). It stays.
  const absl::Status& status() const { return status_; }

 private:
  friend class BlockTier;
  using Clock = std::chrono::steady_clock;
  void Advise(PageAdvice advice);

  // Returns what the device has for experts beside other weights.
  int64_t DeviceMemory(int64_t dense) const;

  WeightPages* const pages_;
  const TierOptions options_;
  PolicyTrial trial_;
  ExpertSlotsDevice* device_ = nullptr;
  std::unique_ptr<ExpertSlots> slots_;  // null: there are none
  std::map<const LinearBank*, std::shared_ptr<PackedExperts>> files_;
  std::vector<std::shared_ptr<PackedExperts>> dense_;
  std::vector<BlockTier*> blocks_;
  int64_t bytes_ = 0;
  bool random_ = false;  // whether the files have the advice of TierPolicy::kAhead
  TierCounts counts_;    // of files
  absl::Status status_;
  // Of the current step: the bytes of chosen experts, and the time of their products.
  int64_t step_bytes_ = 0;
  double step_seconds_ = 0.0;
  // Of the current block.
  bool reads_ = false;  // whether bytes are missing
  Clock::time_point begin_;
  double begin_running_ = 0.0;  // seconds that the thread has run
};

}  // namespace moeserve
