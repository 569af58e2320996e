#include "engine/ranks/leader.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/time/clock.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "engine/ranks/step_check.h"

namespace moeserve {
namespace {

// How long the leader waits for the reason of a follower whose step has failed.
constexpr absl::Duration kReasonTime = absl::Milliseconds(200);
constexpr absl::Duration kBetweenLooks = absl::Milliseconds(5);

}  // namespace

Leader::~Leader() {
  for (const auto& [id, cache] : caches_) cache->SetObserver(nullptr);
  for (const auto& [id, states] : states_) states->SetObserver(nullptr);
}

void Leader::CopiesPage(uint64_t storage, int table, int32_t from, int32_t to) {
  changes_.push_back(
      {.kind = StorageChange::Kind::kCopyPage, .storage = storage, .values = {table, from, to}});
}

void Leader::ClearsState(uint64_t storage, int32_t slot) {
  changes_.push_back(
      {.kind = StorageChange::Kind::kClearState, .storage = storage, .values = {slot, 0, 0}});
}

void Leader::AdvancesState(uint64_t storage, int32_t from, int rows, int32_t to) {
  changes_.push_back(
      {.kind = StorageChange::Kind::kAdvanceState, .storage = storage, .values = {from, rows, to}});
}

void Leader::Drops(uint64_t storage) {
  caches_.erase(storage);
  tables_.erase(storage);
  states_.erase(storage);
  changes_.push_back({.kind = StorageChange::Kind::kDrop, .storage = storage});
}

void Leader::Send(StepMessage message) {
  message.number = ++number_;
  message.changes = std::exchange(changes_, {});
  {
    const MutexLock lock(mutex_);
    if (timeout_ > absl::ZeroDuration()) {
      exchange_.SetTimeout(timeout_);
      message.timeout_ms = static_cast<uint32_t>(absl::ToInt64Milliseconds(timeout_));
      timeout_ = absl::ZeroDuration();
    }
  }
  std::string bytes = Serialize(message);
  uint64_t size = bytes.size();
  exchange_.BroadcastWhenever({reinterpret_cast<char*>(&size), sizeof(size)});
  exchange_.Broadcast(bytes);
}

void Leader::StopFollowers() {
  if (exchange_.status().ok()) Send({.kind = StepMessage::Kind::kStop});
}

void Leader::Announce(std::shared_ptr<const ExpertPlacement> placement) {
  const MutexLock lock(mutex_);
  wanted_ = std::move(placement);
}

std::pair<std::shared_ptr<const ExpertPlacement>, bool> Leader::placement() const {
  const MutexLock lock(mutex_);
  return {used_, announced_ || wanted_ != nullptr};
}

absl::Duration Leader::longest_step() const {
  const MutexLock lock(mutex_);
  return longest_step_;
}

void Leader::LimitWaits(absl::Duration timeout) {
  constexpr absl::Duration kMost = absl::Milliseconds(UINT32_MAX);
  const MutexLock lock(mutex_);
  timeout_ = std::clamp(timeout, absl::Milliseconds(1), kMost);
}

void Leader::Timed(absl::Duration longest) {
  const MutexLock lock(mutex_);
  longest_step_ = longest;
}

void Leader::Loaded(Model& model) {
  model_ = &model;
  moving_ = std::make_unique<MovingExperts>(model, source_);
  const MutexLock lock(mutex_);
  used_ = moving_->current();
}

void Leader::PlaceExperts(StepMessage& message) {
  const MutexLock lock(mutex_);
  if (std::exchange(all_ready_, false)) {
    moving_->UseNext();
    used_ = moving_->current();
    announced_ = false;
  }
  const ExpertPlacement& current = *moving_->current();
  message.placement_version = current.version();
  const std::shared_ptr<const ExpertPlacement> wanted = std::exchange(wanted_, nullptr);
  if (wanted == nullptr || wanted->version() <= current.version()) return;
  message.next_version = wanted->version();
  message.moves = MovesBetween(current, *wanted);
  moving_->Prepare(wanted);
  announced_ = true;
}

void Leader::BeforeStep(StepKind kind, const Batch& batch, KvCacheStorage& cache,
                        const PredictionSources& sources, const StepDivision& division) {
  if (caches_.emplace(cache.id(), &cache).second) {
    cache.SetObserver(this);
    tables_.emplace(cache.id(), PageTables(cache.num_tables()));
    StorageChange change{.kind = StorageChange::Kind::kNewCache, .storage = cache.id()};
    change.values = {static_cast<int32_t>(cache.type()), kind == StepKind::kPredict ? 1 : 0, 0};
    for (int t = 0; t < cache.num_tables(); ++t) change.sizes.push_back(cache.num_pages(t));
    changes_.push_back(std::move(change));
  }
  StateStorage* const states = batch.states.storage;
  if (states != nullptr && states_.emplace(states->id(), states).second) {
    states->SetObserver(this);
    changes_.push_back({.kind = StorageChange::Kind::kNewStates,
                        .storage = states->id(),
                        .sizes = {states->num_slots(), states->pending_rows()}});
  }
  StepMessage message{.kind = static_cast<StepMessage::Kind>(kind),
                      .cache = cache.id(),
                      .states = states == nullptr ? 0 : states->id(),
                      .tokens = batch.tokens,
                      .positions = batch.positions,
                      .sequence = batch.sequence,
                      .long_sequence = batch.long_sequence,
                      .token_types = batch.token_types,
                      .tables = batch.tables,
                      .lengths = batch.lengths,
                      .state_slots = batch.states.slot,
                      .keep = batch.states.keep,
                      .snapshot = batch.states.snapshot,
                      .pending = batch.states.pending,
                      .source_rows = {sources.rows.begin(), sources.rows.end()},
                      .predicted = sources.predicted,
                      .divide_rows = division.rows};
  if (division.head) message.logit_rows = batch.logit_rows;
  PlaceExperts(message);
  message.page_tables = tables_.at(cache.id()).Follow(batch.page_tables);
  for (const RoutingControl* control : batch.controls) {
    message.controls.push_back(control == nullptr ? std::nullopt
                                                  : std::optional(control->change()));
  }
  Send(std::move(message));
}

absl::Status Leader::AfterStep(uint64_t checksum, const absl::Status& own) {
  const absl::Status status = CompareChecks(checksum, own);
  const MutexLock lock(mutex_);
  status_.Update(status);
  return status_;  // the first error stays, also if a step that drafts tokens had it
}

absl::Status Leader::StepFailed() {
  exchange_.Lose(0, "not enough memory for a step");
  return exchange_.status();
}

absl::Status Leader::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

void Leader::WaitForReason() const {
  const absl::Time until = SteadyNow() + kReasonTime;
  while (exchange_.status().ok() && SteadyNow() < until) absl::SleepFor(kBetweenLooks);
}

absl::Status Leader::FindDamage() {
  MOESERVE_RETURN_IF_ERROR(model_->CheckFiles(/*now=*/true));
  Send({.kind = StepMessage::Kind::kCheckFiles});
  WaitForReason();
  return exchange_.status();
}

absl::Status Leader::CompareChecks(uint64_t checksum, const absl::Status& own) {
  moving_->AfterStep();
  const StepCheck mine{.number = number_,
                       .checksum = checksum,
                       .code = own.raw_code(),
                       .prepared = moving_->ready()};
  std::vector<StepCheck> all(static_cast<size_t>(exchange_.ranks()));
  exchange_.GatherAtLeader({reinterpret_cast<const char*>(&mine), sizeof(mine)},
                           {reinterpret_cast<char*>(all.data()), all.size() * sizeof(StepCheck)});
  // Damaged weights route rows to other experts, so that the exchange may have failed, too.
  MOESERVE_RETURN_IF_ERROR(own);
  MOESERVE_RETURN_IF_ERROR(exchange_.status());
  for (size_t r = 0; r < all.size(); ++r) {
    const StepCheck& found = all[r];
    if (found.code != 0) {
      // The rank tells its reason over the link, and is then lost.
      WaitForReason();
      MOESERVE_RETURN_IF_ERROR(exchange_.status());
    }
    if (found.number != number_ || found.code != 0) {
      return absl::InternalError(Concat("rank ", r, ": expected step ", number_,
                                        " without an error, found step ", found.number,
                                        " with status code ", found.code, "; see its log"));
    }
    if (found.checksum != checksum) {
      const absl::Status differs = absl::InternalError(
          Concat("rank ", r, ": expected the results of rank 0 in step ", number_,
                 ", found others; the ranks differ in files, programs or hardware"));
      MOESERVE_RETURN_IF_ERROR(FindDamage());
      return differs;
    }
  }
  if (moving_->next() == nullptr) return absl::OkStatus();
  const auto is_ready = [&](const StepCheck& check) {
    return check.prepared == moving_->next()->version();
  };
  all_ready_ = std::ranges::all_of(all, is_ready);
  const auto cannot = [](const StepCheck& check) {
    return check.prepared == MovingExperts::kImpossible;
  };
  if (std::ranges::any_of(all, cannot)) {
    const MutexLock lock(mutex_);
    announced_ = false;  // another placement may be announced
  }
  return absl::OkStatus();
}

}  // namespace moeserve
