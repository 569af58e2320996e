// An engine whose model is computed by several ranks, which are threads.
#pragma once

#include <filesystem>
#include <memory>
#include <ostream>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "engine/balance/load_watch.h"
#include "engine/ranks/leader.h"
#include "kernels/exchange/message_exchange.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/engine_fixture.h"

namespace moeserve::testing {

struct RankedModel {
  const char* name;
  const char* folder;  // in the sources
  Quantization quantization = Quantization::kNone;
  bool predictions = false;
  bool pair = false;         // an encoder and a decoder
  DType type = DType::kF32;  // without quantization; else it is bf16

  DType compute() const { return quantization == Quantization::kNone ? type : DType::kBF16; }
};
inline void PrintTo(const RankedModel& m, std::ostream* out) { *out << m.name; }

// The files and the backend from which a rank loads experts that are moved to it.
struct ExpertFiles {
  static absl::Status Open(const RankedModel& model, ExpertFiles& files);
  ExpertSource source() const {
    return {.weights = checkpoint.weights.get(), .backend = backend.get(), .bytes_per_second = 0};
  }
  Checkpoint checkpoint;
  std::unique_ptr<Backend> backend;
};

enum class Moves {
  kNone,
  kAlways,      // every third step announces a placement with each expert of a block elsewhere
  kImpossible,  // they should move, but no rank has files to load them from
  kRefused,     // no rank has files, and the test says when they should move
};

// What the ranks divide beside the experts.
struct Splits {
  SplitChoice rows = SplitChoice::kAuto, head = SplitChoice::kAuto, sums = SplitChoice::kAuto;
};

struct RanksSetting {
  Splits splits = {};
  Moves moves = Moves::kNone;
  std::filesystem::path packed_folder = {};  // of a packed cache; empty: there is none
  // What the leader tells the followers before the first step, which they must know at the end; 0:
  // nothing.
  absl::Duration timeout = {};
  // The step, from 1, in which the leader's checksum is not that of the followers; 0: none.
  int disagree_in = 0;
};

// An engine at rank 0 and followers on threads.
class RankedEngine {
 public:
  // Fails the test if a rank cannot start; then started() is false. `model` outlives the object.
  static std::unique_ptr<RankedEngine> Start(const RankedModel& model, const EngineOptions& options,
                                             int ranks, const RanksSetting& setting = {});
  RankedEngine();
  ~RankedEngine();

  bool started() const { return engine_ != nullptr; }
  TestEngine& engine() { return *engine_; }
  // How many placements have been used.
  int placements() const { return static_cast<int>(leader_->placement().first->version()); }
  // How many steps there were.
  int steps() const;
  Leader& leader() { return *leader_; }
  const LoadWatch& watch() const { return watch_; }
  const ModelSpec& spec() const { return files_.checkpoint.spec; }

 private:
  class MovingLeader;

  std::unique_ptr<MessageExchange> exchange_;
  ExpertFiles files_;
  LoadWatch watch_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<MovingLeader> moving_;
  std::unique_ptr<TestEngine> engine_;
  std::vector<std::thread> followers_;
};

}  // namespace moeserve::testing
