#include "engine/ranks/moving_experts.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <utility>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve {
namespace {

// Names the calling thread and gives it the lowest priority.
void StepBack(const char* name) {
  pthread_setname_np(pthread_self(), name);
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 19);
}

}  // namespace

MovingExperts::~MovingExperts() {
  if (loader_.joinable()) loader_.join();
  if (cleaner_.joinable()) cleaner_.join();
}

void MovingExperts::Prepare(std::shared_ptr<const ExpertPlacement> next) {
  if (loader_.joinable()) loader_.join();
  next_ = std::move(next);
  status_ = absl::OkStatus();
  experts_ = LoadedExperts();
  loaded_ = false;
  ExpertPlacement::Blocks missing = model_.MissingExperts(*next_);
  if (missing.empty()) {
    loaded_ = true;
  } else if (source_.weights == nullptr || source_.backend == nullptr) {
    experts_ = absl::FailedPreconditionError(
        "an expert of this rank was not loaded, and it is not known from where to load it");
    loaded_ = true;
  } else if (absl::Status can = model_.CheckTaking(missing); !can.ok()) {
    experts_ = std::move(can);
    loaded_ = true;
  } else {
    Load(std::move(missing));
    if (source_.waits) loader_.join();
  }
}

void MovingExperts::Load(ExpertPlacement::Blocks missing) {
  loader_ = std::jthread(
      [this, spec = model_.spec(), options = model_.options(), missing = std::move(missing)] {
        StepBack("expert-loader");
        experts_ = LoadedExperts::Load(spec, options, missing, *source_.weights, *source_.backend,
                                       source_.bytes_per_second);
        loaded_ = true;
      });
}

uint32_t MovingExperts::ready() {
  // Nobody waits for the loader to end: on a busy core, a thread of its priority may take long.
  if (next_ == nullptr || !loaded_) return 0;
  if (status_.ok()) status_ = experts_.ok() ? model_.CheckExperts(*experts_) : experts_.status();
  return status_.ok() ? next_->version() : kImpossible;
}

void MovingExperts::UseNext() {
  MOESERVE_CHECK(next_ != nullptr && loaded_ && experts_.ok(), "a placement that is ready");
  current_ = std::exchange(next_, nullptr);
  model_.UsePlacement(current_, *std::exchange(experts_, LoadedExperts()));
  switched_ = true;
}

void MovingExperts::AfterStep() {
  if (!std::exchange(switched_, false)) return;
  auto dropped = model_.DropExperts();
  if (dropped.empty()) return;
  // A cleaner that has not ended is waited for by the next one, not by the step.
  cleaner_ = std::jthread([dropped = std::move(dropped), before = std::move(cleaner_)]() mutable {
    StepBack("expert-cleaner");
    dropped.clear();
    if (before.joinable()) before.join();
  });
}

std::vector<ExpertMove> MovesBetween(const ExpertPlacement& from, const ExpertPlacement& to) {
  std::vector<ExpertMove> moves;
  for (const auto& [key, holders] : to.blocks()) {
    const std::vector<HolderSet>& before = from.holders(key.first, key.second);
    for (size_t e = 0; e < holders.size(); ++e) {
      if (holders[e] == before[e]) continue;
      moves.push_back({key.first, key.second, static_cast<int32_t>(e), holders[e]});
    }
  }
  return moves;
}

Result<std::shared_ptr<const ExpertPlacement>> AfterMoves(const ExpertPlacement& from,
                                                          const std::vector<ExpertMove>& moves,
                                                          uint32_t version) {
  ExpertPlacement::Blocks blocks = from.blocks();
  const HolderSet all =
      from.ranks() == kMaxRanks ? ~HolderSet{0} : (HolderSet{1} << from.ranks()) - 1;
  for (const ExpertMove& move : moves) {
    const auto block = blocks.find({move.stack, move.block});
    const bool exists = block != blocks.end() && move.expert >= 0 &&
                        move.expert < std::ssize(block->second) &&
                        block->second[static_cast<size_t>(move.expert)] != 0;
    if (!exists) {
      return absl::InvalidArgumentError(Concat("a move: expected an expert with matrices, found ",
                                               "expert ", move.expert, " of block ", move.block));
    }
    if (move.holders == 0 || (move.holders & ~all) != 0) {
      return absl::InvalidArgumentError(Concat("holders of an expert: expected some of ",
                                               from.ranks(), " ranks, found the set ",
                                               move.holders));
    }
    block->second[static_cast<size_t>(move.expert)] = move.holders;
  }
  return std::make_shared<const ExpertPlacement>(from.ranks(), std::move(blocks), version);
}

}  // namespace moeserve
