#include "engine/tiers/expert_tiers.h"

#include <cstdint>
#include <utility>

namespace moeserve {

std::unique_ptr<BlockTier> ExpertTiers::NewBlock(const std::vector<const LinearBank*>& banks) {
  std::vector<std::shared_ptr<PackedExperts>> files;
  for (const LinearBank* bank : banks) {
    const auto found = files_.find(bank);
    if (found != files_.end()) files.push_back(found->second);
  }
  if (files.empty()) return nullptr;
  return std::unique_ptr<BlockTier>(new BlockTier(*this, std::move(files)));
}

void BlockTier::BeforeProducts(const RoutingPlan& plan) {
  tiers_.pages_->ExpertsOf(plan, chosen_);
  VerifyChosen();
}

void BlockTier::VerifyChosen() {
  std::vector<std::pair<PackedExperts*, int>> unverified;
  for (const auto& file : files_) {
    for (const int e : chosen_) {
      if (!file->verified(e)) unverified.emplace_back(file.get(), e);
    }
  }
  if (unverified.empty()) return;
  std::vector<absl::Status> outcomes(unverified.size());
  tiers_.pages_->ForEach(std::ssize(unverified), [&](int64_t i) {
    const auto& [file, expert] = unverified[static_cast<size_t>(i)];
    outcomes[static_cast<size_t>(i)] = file->Verify(expert);
  });
  for (absl::Status& outcome : outcomes) tiers_.status_.Update(std::move(outcome));
}

}  // namespace moeserve
