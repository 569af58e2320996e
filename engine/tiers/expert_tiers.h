// The experts that a model reads from mapped files.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/tiers/packed_file.h"
#include "engine/tiers/tier_options.h"
#include "kernels/backend.h"
#include "kernels/weight_pages.h"

namespace moeserve {

class ExpertTiers;

// What a routed layer calls around the products of its experts. Called by the model's thread.
class BlockTier {
 public:
  // After routing, before the first product of the experts that have rows in `plan`.
  void BeforeProducts(const RoutingPlan& plan);

 private:
  friend class ExpertTiers;
  BlockTier(ExpertTiers& tiers, std::vector<std::shared_ptr<PackedExperts>> files)
      : tiers_(tiers), files_(std::move(files)) {}
  // Compares the checksums of experts that are used for the first time.
  void VerifyChosen();

  ExpertTiers& tiers_;
  const std::vector<std::shared_ptr<PackedExperts>> files_;  // of the banks of the block
  std::vector<int> chosen_;                                  // experts of the current plan
};

// One object per model. Called by one thread at a time.
class ExpertTiers {
 public:
  // `backend` must outlive the object.
  ExpertTiers(Backend& backend, const TierOptions& options)
      : pages_(backend.weight_pages()), options_(options) {}

  // Says that `bank` reads its experts from a file, whose checksums are not yet compared.
  void Add(const LinearBank* bank, std::shared_ptr<PackedExperts> experts) {
    files_[bank] = std::move(experts);
  }
  // Returns what a routed layer with these banks calls; null if it reads none from a file. Must not
  // outlive this object.
  std::unique_ptr<BlockTier> NewBlock(const std::vector<const LinearBank*>& banks);

  const TierCounts& counts() const { return counts_; }

  // Returns the first error of PackedExperts::Verify(). It stays.
  const absl::Status& status() const { return status_; }

 private:
  friend class BlockTier;
  WeightPages* const pages_;  // null if the backend reads no files
  std::map<const LinearBank*, std::shared_ptr<PackedExperts>> files_;
  const TierOptions options_;
  TierCounts counts_;
  absl::Status status_;
};

}  // namespace moeserve
