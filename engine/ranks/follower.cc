#include "engine/ranks/follower.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "engine/model/output_head.h"
#include "engine/ranks/step_check.h"

namespace moeserve {
namespace {

// A message is at most so long; the leader's are far shorter.
constexpr uint64_t kMostMessageBytes = uint64_t{1} << 32;

absl::Status ImpossibleStep(std::string_view what) {
  return absl::InternalError(Concat("a step of the leader has ", what));
}

// Fails if an id is not below `count`; negative ids mean nothing.
absl::Status CheckStepIds(std::span<const int32_t> ids, int64_t count, std::string_view what) {
  for (const int32_t id : ids) {
    if (id >= count) return ImpossibleStep(Concat(what, ' ', id, " of ", count));
  }
  return absl::OkStatus();
}

}  // namespace

Result<StepMessage> Follower::Receive() {
  uint64_t size = 0;
  exchange_.BroadcastWhenever({reinterpret_cast<char*>(&size), sizeof(size)});
  MOESERVE_RETURN_IF_ERROR(exchange_.status());
  if (size > kMostMessageBytes) return ImpossibleStep(Concat("a message of ", size, " bytes"));
  std::string bytes(size, '\0');
  exchange_.Broadcast(bytes);
  MOESERVE_RETURN_IF_ERROR(exchange_.status());
  return ParseStepMessage(bytes, limits_);
}

absl::Status Follower::Apply(Model& model, const StorageChange& change) {
  const uint64_t id = change.storage;
  const auto& v = change.values;
  switch (change.kind) {
    case StorageChange::Kind::kNewCache: {
      const ModelSpec& spec = model.spec();
      const bool prediction = v[1] == 1;
      if (prediction && spec.prediction == nullptr) return ImpossibleStep("a cache of no layers");
      std::vector<KvLayerShape> shapes = CacheShapes(prediction ? *spec.prediction : spec);
      for (const KvLayerShape& shape : shapes) {
        if (shape.table >= std::ssize(change.sizes)) return ImpossibleStep("too few page tables");
      }
      MOESERVE_ASSIGN_OR_RETURN(
          caches_[id], model.backend().NewKvCache(std::move(shapes), static_cast<KvCacheType>(v[0]),
                                                  change.sizes));
      tables_.insert_or_assign(id, PageTables(caches_[id]->num_tables()));
      return absl::OkStatus();
    }
    case StorageChange::Kind::kNewStates: {
      if (change.sizes.size() != 2) return ImpossibleStep("states without sizes");
      MOESERVE_ASSIGN_OR_RETURN(
          states_[id],
          model.backend().NewStates(StateShapes(model.spec()), static_cast<int>(change.sizes[0]),
                                    static_cast<int>(change.sizes[1])));
      // What the leader did before its first step with them is not known here.
      for (int32_t slot = 0; slot < change.sizes[0]; ++slot) states_[id]->Clear(slot);
      return absl::OkStatus();
    }
    case StorageChange::Kind::kDrop:
      caches_.erase(id);
      tables_.erase(id);
      states_.erase(id);
      return absl::OkStatus();
    case StorageChange::Kind::kCopyPage: {
      const auto found = caches_.find(id);
      if (found == caches_.end() || v[0] < 0 || v[0] >= found->second->num_tables() ||
          std::min(v[1], v[2]) < 0 || std::max(v[1], v[2]) >= found->second->num_pages(v[0])) {
        return ImpossibleStep("a copy of a page that does not exist");
      }
      found->second->CopyPage(v[0], v[1], v[2]);
      return absl::OkStatus();
    }
    case StorageChange::Kind::kClearState:
    case StorageChange::Kind::kAdvanceState: {
      const auto found = states_.find(id);
      const bool clears = change.kind == StorageChange::Kind::kClearState;
      const int32_t to = clears ? v[0] : v[2];
      if (found == states_.end() || std::min(v[0], to) < 0 ||
          std::max(v[0], to) >= found->second->num_slots() ||
          (!clears && (v[1] < 0 || v[1] > found->second->pending_rows()))) {
        return ImpossibleStep("a change of a state that does not exist");
      }
      if (clears) {
        found->second->Clear(v[0]);
      } else {
        found->second->Advance(v[0], v[1], v[2]);
      }
      return absl::OkStatus();
    }
  }
  return ImpossibleStep("an unknown change");
}

void Follower::Loaded(Model& model) { moving_ = std::make_unique<MovingExperts>(model, source_); }

absl::Status Follower::PlaceExperts(const StepMessage& message) {
  if (message.placement_version != moving_->current()->version()) {
    if (moving_->next() == nullptr || moving_->next()->version() != message.placement_version ||
        moving_->ready() != message.placement_version) {
      return ImpossibleStep(
          Concat("placement ", message.placement_version, " of the experts, which is not ready"));
    }
    moving_->UseNext();
  }
  if (message.next_version == 0) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(auto next,
                            AfterMoves(*moving_->current(), message.moves, message.next_version));
  moving_->Prepare(std::move(next));
  return absl::OkStatus();
}

absl::Status Follower::RunStep(Model& model, const StepMessage& message) {
  const auto cache = caches_.find(message.cache);
  if (cache == caches_.end()) return ImpossibleStep("an unknown cache");
  Batch batch;
  batch.tokens = message.tokens;
  batch.positions = message.positions;
  batch.sequence = message.sequence;
  batch.phase.assign(batch.tokens.size(), Phase::kPrefill);  // nothing is counted
  batch.long_sequence = message.long_sequence;
  batch.token_types = message.token_types;
  if (message.page_tables.empty() && !model.backend().needs_reservation()) {
    return ImpossibleStep("rows of no sequence, for which no memory is reserved");
  }
  batch.tables = message.tables;
  if (message.tables != cache->second->num_tables()) return ImpossibleStep("other page tables");
  std::vector<int64_t> num_pages;
  for (int t = 0; t < message.tables; ++t) num_pages.push_back(cache->second->num_pages(t));
  MOESERVE_ASSIGN_OR_RETURN(const PageTables::Tables* tables,
                            tables_.at(message.cache).Apply(message.page_tables, num_pages));
  batch.page_tables.assign(tables->begin(), tables->end());
  batch.lengths = message.lengths;
  batch.divide_rows = message.divide_rows != 0;
  if (!message.logit_rows.empty() && !model.divides_head()) {
    return ImpossibleStep("rows of logits, but this rank has no range of the vocabulary");
  }
  batch.logit_rows = message.logit_rows;
  if (message.states != 0) {
    const auto states = states_.find(message.states);
    if (states == states_.end()) return ImpossibleStep("unknown states");
    const int slots = states->second->num_slots();
    MOESERVE_RETURN_IF_ERROR(CheckStepIds(message.state_slots, slots, "state"));
    MOESERVE_RETURN_IF_ERROR(CheckStepIds(message.keep, slots, "state"));
    MOESERVE_RETURN_IF_ERROR(CheckStepIds(message.snapshot, slots, "state"));
    batch.states = {states->second.get(), message.state_slots, message.keep, message.snapshot,
                    message.pending};
  }
  std::vector<std::optional<RoutingControl>> controls;
  for (const std::optional<RoutingChange>& change : message.controls) {
    controls.emplace_back();
    if (!change.has_value()) continue;
    MOESERVE_ASSIGN_OR_RETURN(controls.back(),
                              RoutingControl::Create(*change, model.spec(), {.enabled = true}));
  }
  for (const std::optional<RoutingControl>& control : controls) {
    batch.controls.push_back(control.has_value() ? &*control : nullptr);
  }
  switch (message.kind) {
    case StepMessage::Kind::kForward:
      model.Forward(batch, *cache->second, {}, {});
      break;
    case StepMessage::Kind::kEncodeSources:
      if (model.spec().encoder == nullptr) return ImpossibleStep("sources, but no encoder");
      model.EncodeSources(batch, *cache->second, {});
      break;
    case StepMessage::Kind::kPredict:
      if (model.spec().prediction == nullptr) return ImpossibleStep("predictions, but no layers");
      if (message.source_rows.size() != batch.tokens.size())
        return ImpossibleStep("too few sources");
      model.Predict(batch, {.rows = message.source_rows, .predicted = message.predicted != 0},
                    *cache->second, {});
      break;
    case StepMessage::Kind::kStop:
    case StepMessage::Kind::kCheckFiles:
      break;
  }
  return model.CheckFiles();
}

absl::Status Follower::Run(Model& model) {
  for (;;) {
    MOESERVE_ASSIGN_OR_RETURN(const StepMessage message, Receive());
    if (message.number != number_ + 1) {
      return ImpossibleStep(Concat("number ", message.number, " after ", number_));
    }
    number_ = message.number;
    if (message.timeout_ms > 0) exchange_.SetTimeout(absl::Milliseconds(message.timeout_ms));
    for (const StorageChange& change : message.changes) {
      MOESERVE_RETURN_IF_ERROR(Apply(model, change));
    }
    if (message.kind == StepMessage::Kind::kStop) return absl::OkStatus();
    if (message.kind == StepMessage::Kind::kCheckFiles) {
      MOESERVE_RETURN_IF_ERROR(model.CheckFiles(/*now=*/true));
      continue;
    }
    MOESERVE_RETURN_IF_ERROR(PlaceExperts(message));
    MOESERVE_RETURN_IF_ERROR(RunStep(model, message));
  }
}

absl::Status Follower::AfterStep(uint64_t checksum, const absl::Status& own) {
  moving_->AfterStep();
  const StepCheck mine{.number = number_,
                       .checksum = checksum,
                       .code = own.raw_code(),
                       .prepared = moving_->ready()};
  exchange_.GatherAtLeader({reinterpret_cast<const char*>(&mine), sizeof(mine)}, {});
  MOESERVE_RETURN_IF_ERROR(own);
  return exchange_.status();
}

}  // namespace moeserve
