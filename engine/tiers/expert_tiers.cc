#include "engine/tiers/expert_tiers.h"

#include <time.h>

#include <algorithm>

namespace moeserve {
namespace {

// Returns the seconds that the calling thread has run.
double RunningSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void ExpertTiers::Add(const LinearBank* bank, std::shared_ptr<PackedExperts> experts,
                      const std::vector<bool>& here) {
  for (int e = 0; e < experts->count(); ++e) {
    if (here.empty() || here[static_cast<size_t>(e)]) bytes_ += std::ssize(experts->bytes(e));
  }
  files_[bank] = std::move(experts);
}

int64_t ExpertTiers::DeviceMemory(int64_t dense) const {
  if (options_.memory.has_value()) return *options_.memory;
  // A tenth is left for activations.
  return std::max<int64_t>(device_->FreeBytes() / 10 * 9 - dense - options_.cache, 0);
}

void ExpertTiers::UseSlotsOf(ExpertSlotsDevice& device, int64_t experts, int64_t dense) {
  device_ = &device;
  if (experts > DeviceMemory(dense)) slots_ = device.NewExpertSlots();
}

Result<std::unique_ptr<LinearBank>> ExpertTiers::NewBank(Backend& backend, LinearBankShape shape) {
  return slots_ != nullptr ? slots_->NewBank(std::move(shape))
                           : backend.NewLinearBank(std::move(shape));
}

std::unique_ptr<BlockTier> ExpertTiers::NewBlock(const std::vector<LinearBank*>& banks) {
  if (slots_ != nullptr) {
    return std::unique_ptr<BlockTier>(new BlockTier(*this, slots_->AddBlock(banks)));
  }
  std::vector<std::shared_ptr<PackedExperts>> files;
  for (const LinearBank* bank : banks) {
    const auto found = files_.find(bank);
    if (found != files_.end()) files.push_back(found->second);
  }
  if (files.empty()) return nullptr;
  std::unique_ptr<BlockTier> block(new BlockTier(*this, std::move(files), blocks_.size()));
  blocks_.push_back(block.get());
  return block;
}

absl::Status ExpertTiers::FinishLoading(int64_t weight_bytes) {
  if (slots_ != nullptr) MOESERVE_RETURN_IF_ERROR(slots_->Start(DeviceMemory(0)));
  std::optional<int64_t> memory = options_.memory;
  if (!memory.has_value() && options_.total.has_value()) {
    memory = *options_.total - (weight_bytes - bytes_);
  }
  counts_.in_force = memory.has_value() && bytes_ > std::max<int64_t>(*memory, 0);
  if (counts_.in_force) {
    counts_.policy = trial_.policy();
    for (const auto& file : dense_) {
      for (int e = 0; e < file->count(); ++e) {
        if (!pages_->Lock(file->bytes(e))) break;
      }
    }
  }
  dense_.clear();
  return absl::OkStatus();
}

TierCounts ExpertTiers::counts() const {
  if (slots_ == nullptr) return counts_;
  const ExpertSlotCounts slots = slots_->counts();
  return {.in_force = slots_->in_force(),
          .hit_bytes = slots.hit_bytes,
          .read_bytes = slots.copied_bytes,
          .expert_bytes = slots_->bytes(),
          .waves = slots.waves};
}

void ExpertTiers::Advise(PageAdvice advice) {
  for (const auto& [bank, file] : files_) {
    pages_->Advise({file->owner()->data(), file->owner()->size()}, advice);
  }
}

void ExpertTiers::BeginStep() {
  if (!counts_.in_force) return;
  const bool random = counts_.policy == TierPolicy::kAhead;
  if (random != random_) Advise(random ? PageAdvice::kRandom : PageAdvice::kNormal);
  random_ = random;
  step_bytes_ = 0;
  step_seconds_ = 0.0;
}

void ExpertTiers::EndStep() {
  if (!counts_.in_force) return;
  trial_.AddStep(step_bytes_, step_seconds_, Clock::now());
  counts_.policy = trial_.policy();
}

void BlockTier::BeforeProducts(RoutingPlan& plan, bool prompt) {
  tiers_.pages_->ExpertsOf(plan, chosen_);
  if (tiers_.counts_.in_force) {
    prompt_ = prompt;
    tiers_.begin_ = ExpertTiers::Clock::now();
    tiers_.begin_running_ = RunningSeconds();
    LookForPages();
    if (tiers_.counts_.policy == TierPolicy::kAhead && tiers_.reads_) {
      RequestPages();
      SetOrder(plan);
    }
    if (tiers_.counts_.policy == TierPolicy::kAhead && !prompt) {
      // The next block of the last one is the first of the next step.
      const std::vector<BlockTier*>& blocks = tiers_.blocks_;
      blocks[(number_ + 1) % blocks.size()]->RequestLastChosen(tiers_.options_.read_ahead);
    }
    if (!prompt) last_chosen_ = chosen_;
  }
  VerifyChosen();
}

void BlockTier::RunProducts(const RoutingPlan& plan, RoutingPlan& part, bool prompt,
                            const ExpertSlots::Products& products) {
  if (tiers_.slots_ != nullptr) {
    return tiers_.slots_->Run(static_cast<int>(number_), plan, part, products);
  }
  BeforeProducts(part, prompt);
  products(part, 0);
  AfterProducts();
}

void BlockTier::RequestLastChosen(int64_t bytes) {
  if (bytes == 0) return;
  for (const auto& file : files_) {
    for (const int e : last_chosen_) {
      const std::span<const char> wanted = file->bytes(e);
      const int64_t missing = std::ssize(wanted) - tiers_.pages_->Resident(wanted);
      if (missing == 0) continue;
      bytes -= missing;
      if (bytes < 0) return;
      tiers_.pages_->Advise(wanted, PageAdvice::kRequest);
    }
  }
}

void BlockTier::LookForPages() {
  TierCounts& counts = tiers_.counts_;
  missing_.assign(chosen_.size(), 0);
  tiers_.reads_ = false;
  for (size_t i = 0; i < chosen_.size(); ++i) {
    for (const auto& file : files_) {
      const std::span<const char> bytes = file->bytes(chosen_[i]);
      const int64_t resident = tiers_.pages_->Resident(bytes);
      missing_[i] += std::ssize(bytes) - resident;
      tiers_.step_bytes_ += std::ssize(bytes);
      counts.hit_bytes += static_cast<uint64_t>(resident);
    }
    counts.read_bytes += static_cast<uint64_t>(missing_[i]);
    tiers_.reads_ = tiers_.reads_ || missing_[i] > 0;
  }
}

void BlockTier::RequestPages() {
  // In the order of the products: those of a bank come before those of the next.
  for (const auto& file : files_) {
    for (size_t i = 0; i < chosen_.size(); ++i) {
      if (missing_[i] == 0) continue;
      tiers_.pages_->Advise(file->bytes(chosen_[i]), PageAdvice::kRequest);
    }
  }
}

void BlockTier::SetOrder(RoutingPlan& plan) {
  order_.clear();
  size_t next = 0;
  for (int e = 0; e < plan.num_experts; ++e) {
    const bool chosen = next < chosen_.size() && chosen_[next] == e;
    if (!chosen || missing_[next] == 0) order_.push_back(e);
    if (chosen) ++next;
  }
  plan.num_early = static_cast<int>(order_.size());
  for (size_t i = 0; i < chosen_.size(); ++i) {
    if (missing_[i] > 0) order_.push_back(chosen_[i]);
  }
  plan.order = order_.data();
}

void BlockTier::AfterProducts() {
  if (!tiers_.counts_.in_force) return;
  const std::chrono::duration<double> time = ExpertTiers::Clock::now() - tiers_.begin_;
  tiers_.step_seconds_ += time.count();
  if (!tiers_.reads_) return;
  const double ran = RunningSeconds() - tiers_.begin_running_;
  tiers_.counts_.stall_seconds += std::max(0.0, time.count() - ran);
  if (tiers_.counts_.policy != TierPolicy::kAhead || !prompt_) return;
  if (2 * std::ssize(chosen_) <= files_.front()->count()) return;
  // Experts that were in memory before the prompt stay there.
  for (size_t i = 0; i < chosen_.size(); ++i) {
    if (missing_[i] == 0) continue;
    for (const auto& file : files_) {
      tiers_.pages_->Advise(file->bytes(chosen_[i]), PageAdvice::kCold);
    }
  }
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
