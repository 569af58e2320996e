// Ranks whose steps are timed: threads of one process, or processes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/model/model.h"
#include "engine/ranks/leader.h"
#include "kernels/exchange/message_exchange.h"
#include "kernels/exchange/transport.h"

namespace moeserve {

struct RankSetup {
  ModelSpec spec;
  int threads = 1;            // of each rank
  int64_t pages = 1;          // of the cache
  bool shares_cores = false;  // whether ranks share cores with each other
  SplitChoice owner_sums = SplitChoice::kAuto;
};

// What a rank did in RankEngine::Run().
struct RankFigures {
  uint64_t bytes = 0;            // sent, without announcements of steps and:
  uint64_t bytes_to_leader = 0;  // sent in gathers at the leader: parts of logits, checks
  uint64_t gathers = 0;          // how many
  double gather_seconds = 0.0;   // in gathers, from their start to their end
  double longest_wait = 0.0;     // seconds of waiting for the rank for which it waited longest
};

// A synthetic model in bf16 and its cache, by one process alone or as a rank.
struct BenchModel {
  // `exchange` and `listener` are null for one process; else all of them outlive the object.
  BenchModel(const RankSetup& setup, Exchange* exchange, const ExpertPlacement* placement,
             StepListener* listener);

  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;
  std::unique_ptr<KvCacheStorage> cache;
};

// The leader. The followers run Follow(), and sleep while this object does nothing.
class RankEngine {
 public:
  RankEngine(const RankSetup& setup, std::unique_ptr<Transport> transport);
  // Ends the followers.
  ~RankEngine();

  int ranks() const { return exchange_.ranks(); }
  bool divides_head() const { return own_->model->divides_head(); }
  Leader& leader() { return *leader_; }

  // Wakes the followers, calls `steps`, whose steps all ranks run, and lets the followers sleep.
  // Returns what each rank did.
  std::vector<RankFigures> Run(const std::function<void(Model&, KvCacheStorage&)>& steps);
  // Returns the median of the seconds of `count` gathers to which each rank gives so many bytes.
  double TimeGathers(int64_t bytes, int count);

 private:
  struct Source;

  MessageExchange exchange_;
  ExpertPlacement placement_;
  std::unique_ptr<Source> source_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<BenchModel> own_;

  friend void Follow(const RankSetup& setup, std::unique_ptr<Transport> transport);
};

// Does what the leader says until that is destroyed. The process ends if a rank is lost.
void Follow(const RankSetup& setup, std::unique_ptr<Transport> transport);

}  // namespace moeserve
