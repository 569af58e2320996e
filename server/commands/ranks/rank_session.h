// The part of a process that computes a model together with others.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/ranks/follower.h"
#include "engine/ranks/leader.h"
#include "engine/ranks/link.h"
#include "engine/ranks/rebalancer.h"
#include "kernels/exchange/message_exchange.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/commands/ranks/open_exchange.h"
#include "server/commands/ranks/rank_options.h"
#include "server/commands/ranks/start_facts.h"
#include "server/metrics/rank_metrics.h"

namespace moeserve::server {

// The exit status after a rank was lost: EX_TEMPFAIL, by which a supervisor can start all again.
inline constexpr int kRankLostStatus = 75;

// Where a rank loads experts that are moved to it: its model's checkpoint, opened once more, and a
// backend of the same instruction set with one thread.
struct ExpertFiles {
  std::unique_ptr<Backend> backend;
  Checkpoint checkpoint;
};

// Connects the process with the other ranks, from before the model is loaded until the process
// ends. All ranks call the same functions in the same order.
//
// If a follower loses the leader, the process ends at once with kRankLostStatus. If the leader
// loses a follower, the engine ends all requests, and status() is not OK.
class RankSession {
 public:
  // Connects with the other ranks. `device` is that of the backend. Errors as OpenExchange().
  static Result<std::unique_ptr<RankSession>> Open(const RankOptions& options,
                                                   const std::string& device);
  // Opens the link and compares `facts`. To be called once, before all others. Errors as Agree().
  absl::Status Join(StartFacts facts);
  // The leader's: stops the followers, unless a rank was lost. The engine must have been destroyed.
  ~RankSession();

  // Whether each rank has a log of its own, so that it must print errors that all have.
  bool logs_alone() const { return options_.transport != "mpi"; }
  bool leads() const { return exchange_->rank() == 0; }
  int ranks() const { return exchange_->ranks(); }
  // Places the experts of the model as the leader's options say, and sets what a rank creates its
  // model with. Without `files`, experts stay where they are. FailedPrecondition if this is not the
  // first model; else errors of the leader's file.
  absl::Status Place(const ModelSpec& spec, ModelOptions& options,
                     std::unique_ptr<ExpertFiles> files);

  // Compares what the ranks have found: returns OK if all are OK and have equal facts. Otherwise
  // returns the same error on all ranks; but if status() is not OK, what this rank knows.
  absl::Status Agree(const absl::Status& own, StartFacts facts = {});

  // To be called by all ranks once they have agreed to have a backend: connects the devices if
  // gathers read their memory. Errors as Agree().
  absl::Status ConnectDevices();

  // To be called after the last Agree(), before the first step. From then on, the leader moves
  // experts. Until Lead(), ranks wait for each other as long as for loading.
  void BeginSteps();
  // The leader plans no more moves. Any thread may call it.
  void StopMoves();
  // The leader's: the engine that ends its requests when a rank is lost. Its steps at the start
  // decide how long ranks wait for each other. Returns a warning, or an empty text.
  std::string Lead(std::weak_ptr<Engine> engine);
  // The leader's: `lost` is called when a rank is lost, by a thread of the link, and not after it
  // was replaced. It must neither wait nor call this object.
  void OnLoss(std::function<void()> lost);
  // A follower's, after BeginSteps(): runs the leader's steps until it stops; then returns OK. If
  // that is not possible, tells the leader and ends the process with kRankLostStatus.
  absl::Status Follow(Model& model);

  // Returns what is known of the ranks. Any thread may call it.
  RankStatus Ranks() const;
  // Returns Unavailable with the reason once a rank is lost; at the leader, also the error after
  // which no step can follow.
  absl::Status status() const;

 private:
  RankSession(const RankOptions& options, OpenedExchange opened);

  absl::Status OpenLink();
  Result<ExpertPlacement> ChoosePlacement(const ModelSpec& spec) const;
  // Copies the leader's text to all ranks.
  absl::Status BroadcastText(std::string& text);
  // Returns the texts of all ranks at the leader, nothing at others.
  Result<std::vector<std::string>> GatherTexts(const std::string& own);
  void Lost(int rank, const std::string& reason);
  Rebalancer* rebalancer() const;

  const RankOptions options_;
  const std::string host_;
  const std::string link_host_;
  const absl::Status opened_;       // what keeps this rank from computing
  const StartFacts open_facts_;     // that Join() adds
  std::vector<std::string> hosts_;  // of all ranks; at the leader, after Join()
  std::unique_ptr<MessageExchange> exchange_;
  std::unique_ptr<ExpertFiles> expert_files_;  // null: experts stay
  LoadWatch load_watch_;
  RebalanceOptions rebalance_;
  std::unique_ptr<Leader> leader_;      // null at followers
  std::unique_ptr<Follower> follower_;  // null at the leader
  std::optional<ExpertPlacement> placement_;
  bool following_ = false;  // followers run steps

  mutable Mutex mutex_;
  std::vector<bool> lost_ ABSL_GUARDED_BY(mutex_);  // [ranks] as the link has told
  std::weak_ptr<Engine> engine_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> on_loss_ ABSL_GUARDED_BY(mutex_);
  // Null if experts stay. Exists from BeginSteps() on.
  std::unique_ptr<Rebalancer> rebalancer_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<Link> link_;  // the last member: its thread uses the others
};

}  // namespace moeserve::server
