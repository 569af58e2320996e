#include "server/commands/ranks/rank_session.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/weights/place_experts.h"
#include "model_loaders/profiles/placement_file.h"
#include "server/commands/ranks/rank_timeout.h"

namespace moeserve::server {
namespace {

// A start report has some kilobytes.
constexpr uint64_t kMostTextBytes = 1 << 24;
// How long the leader waits for followers to close their links, once they were told to stop.
constexpr absl::Duration kStopTime = absl::Seconds(30);
constexpr absl::Duration kConnectTime = absl::Seconds(30);
// How long a follower waits before it tells of a loss if it does not know whose, or if it seems to
// be the leader's, which its link would have told.
constexpr absl::Duration kUnknownLossTime = absl::Milliseconds(400);
// How long a rank that waits for others in a step keeps its core. A step waits less, unless a rank
// is late.
constexpr absl::Duration kSpinTime = absl::Milliseconds(5);
// As much as options of the engine allow.
constexpr StepLimits kStepLimits{
    .tokens = 1 << 20, .sequences = 1 << 20, .pages = 1 << 24, .changes = 1 << 24};

SplitChoice SplitNamed(std::string_view name) {
  return name == "on" ? SplitChoice::kOn : name == "off" ? SplitChoice::kOff : SplitChoice::kAuto;
}

std::span<char> BytesOf(uint64_t& value) {
  return {reinterpret_cast<char*>(&value), sizeof(value)};
}

// Returns whether a thread of this rank may share its core with one of another rank, as far as
// mpirun tells. `threads`: of a rank; 0: one for each of its cores.
bool SharesCores(int threads) {
  const char* const ranks_here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (ranks_here == nullptr) return true;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());  // it may use
  const int own = threads > 0 ? threads : cores;
  const bool bound = std::getenv("OMPI_MCA_orte_bound_at_launch") != nullptr;
  return own > cores || (!bound && own * std::atoi(ranks_here) > cores);
}

// Ends the process without destructors, which could wait for the rank that is lost.
[[noreturn]] void EndLost(const std::string& reason) {
  std::fprintf(stderr, "error: %s\n", Printable(reason, 2000).c_str());
  std::fflush(nullptr);
  _exit(kRankLostStatus);
}

}  // namespace

RankSession::RankSession(const RankOptions& options, OpenedExchange opened)
    : options_(options),
      host_(HostName()),
      link_host_(std::move(opened.link_host)),
      opened_(std::move(opened.status)),
      open_facts_(std::move(opened.facts)),
      exchange_(std::move(opened.exchange)) {
  if (leads()) leader_ = std::make_unique<Leader>(*exchange_);
  const MutexLock lock(mutex_);
  lost_.resize(static_cast<size_t>(ranks()));
}

Result<std::unique_ptr<RankSession>> RankSession::Open(const RankOptions& options,
                                                       const std::string& device) {
  MOESERVE_ASSIGN_OR_RETURN(OpenedExchange opened, OpenExchange(options, device));
  return std::unique_ptr<RankSession>(new RankSession(options, std::move(opened)));
}

absl::Status RankSession::Join(StartFacts facts) {
  if (ranks() > kMaxRanks) {
    return absl::InvalidArgumentError(
        Concat("--ranks: expected at most ", kMaxRanks, " processes, found ", ranks()));
  }
  // The first thing that ranks tell are their hosts, so that losses are reported with them.
  MOESERVE_ASSIGN_OR_RETURN(hosts_, GatherTexts(host_));
  exchange_->SetNames(hosts_);
  const absl::Status linked = OpenLink();
  facts.insert(facts.end(), open_facts_.begin(), open_facts_.end());
  return Agree(opened_.ok() ? linked : opened_, std::move(facts));
}

absl::Status RankSession::ConnectDevices() {
  if (!exchange_->reads_device_memory()) return absl::OkStatus();
  return Agree(exchange_->ConnectDevices());
}

RankSession::~RankSession() {
  std::unique_ptr<Rebalancer> rebalancer;
  {
    const MutexLock lock(mutex_);
    rebalancer = std::move(rebalancer_);
  }
  rebalancer.reset();
  if (!exchange_->status().ok()) {
    link_.reset();
    // The transport would wait for a rank that does not exist any more.
    [[maybe_unused]] MessageExchange* const kept = exchange_.release();
    [[maybe_unused]] Leader* const leader = leader_.release();
    [[maybe_unused]] ExpertFiles* const files = expert_files_.release();
    return;
  }
  if (leads() && following_) leader_->StopFollowers();
  if (link_ != nullptr && !link_->Stop(kStopTime) && following_) {
    // The transport would wait for it without end.
    const int silent = link_->SilentRank();
    EndLost(Concat(silent < 0 ? std::string("a rank") : Concat("rank ", silent),
                   " was lost: it does not end"));
  }
  link_.reset();
}

absl::Status RankSession::Place(const ModelSpec& spec, ModelOptions& options,
                                std::unique_ptr<ExpertFiles> files) {
  if (placement_.has_value()) {
    return absl::FailedPreconditionError("--ranks: expected one model, found another");
  }
  std::string text;
  absl::Status chosen;
  if (leads()) {
    const auto placement = ChoosePlacement(spec);
    chosen = placement.status();
    if (placement.ok()) text = EncodePlacement(*placement, spec, "");
  }
  MOESERVE_RETURN_IF_ERROR(BroadcastText(text));
  MOESERVE_RETURN_IF_ERROR(chosen);
  if (text.empty()) return absl::InternalError("rank 0 has no placement");
  MOESERVE_ASSIGN_OR_RETURN(placement_, DecodePlacement(text, spec, ranks()));
  options.split_rows = SplitNamed(options_.split_rows);
  options.split_head = SplitNamed(options_.split_head);
  options.owner_sums = SplitNamed(options_.owner_sums);
  options.rank_checksums = !options_.no_checksums;
  expert_files_ = std::move(files);
  ExpertSource source;
  if (expert_files_ != nullptr) {
    WeightSource& weights = *expert_files_->checkpoint.weights;
    source.weights = &weights;
    source.backend = expert_files_->backend.get();
    const DType type = options.compute == DType::kBF16 ? DType::kBF16 : weights.DominantDType();
    rebalance_ = {.interval = absl::Seconds(options_.rebalance_seconds),
                  .limits = {.bytes = int64_t{options_.rebalance_mib} << 20},
                  .parameters = ExpertParameters(spec),
                  .bytes = ExpertBytes(spec, options.quantization, type)};
  }
  if (leads()) {
    leader_->SetSource(source);
    options.load_watch = &load_watch_;
  } else {
    follower_ = std::make_unique<Follower>(*exchange_, kStepLimits, source);
  }
  options.exchange = exchange_.get();
  options.placement = &*placement_;
  options.listener = leads() ? static_cast<StepListener*>(leader_.get()) : follower_.get();
  return absl::OkStatus();
}

Result<ExpertPlacement> RankSession::ChoosePlacement(const ModelSpec& spec) const {
  if (!options_.placement.empty()) {
    auto placement = LoadPlacement(options_.placement, spec, ranks());
    if (!placement.ok()) return Prefixed("--placement: ", placement.status());
    return placement;
  }
  return PlaceExperts(spec, {.ranks = ranks(), .copies_percent = options_.copies_percent});
}

absl::Status RankSession::BroadcastText(std::string& text) {
  uint64_t size = text.size();
  exchange_->Broadcast(BytesOf(size));
  MOESERVE_RETURN_IF_ERROR(exchange_->status());
  if (size > kMostTextBytes) return absl::InternalError("a text of rank 0 is too long");
  text.resize(size);
  exchange_->Broadcast(text);
  return exchange_->status();
}

Result<std::vector<std::string>> RankSession::GatherTexts(const std::string& own) {
  uint64_t size = own.size();
  std::vector<uint64_t> sizes(leads() ? static_cast<size_t>(ranks()) : 0);
  const auto bytes_of = [](auto& numbers) {
    return std::span<char>(reinterpret_cast<char*>(numbers.data()),
                           numbers.size() * sizeof(numbers[0]));
  };
  exchange_->GatherAtLeader(BytesOf(size), bytes_of(sizes));
  // All ranks send as many bytes as the longest text has.
  uint64_t longest = leads() ? *std::max_element(sizes.begin(), sizes.end()) : 0;
  exchange_->Broadcast(BytesOf(longest));
  MOESERVE_RETURN_IF_ERROR(exchange_->status());
  if (longest > kMostTextBytes) return absl::InternalError("a text of a rank is too long");
  std::string padded = own;
  padded.resize(longest);
  std::string all(leads() ? longest * static_cast<size_t>(ranks()) : 0, '\0');
  exchange_->GatherAtLeader(padded, all);
  MOESERVE_RETURN_IF_ERROR(exchange_->status());
  std::vector<std::string> texts;
  for (size_t r = 0; r < sizes.size(); ++r) {
    texts.push_back(all.substr(r * longest, std::min(sizes[r], longest)));
  }
  return texts;
}

absl::Status RankSession::OpenLink() {
  if (ranks() == 1) return absl::OkStatus();
  absl::Status listening;
  std::string invitation;
  if (leads()) {
    auto link = Link::Listen(link_host_, ranks(), {});
    listening = link.status();
    if (link.ok()) {
      link_ = *std::move(link);
      invitation = link_->invitation();
    }
  }
  MOESERVE_RETURN_IF_ERROR(BroadcastText(invitation));
  if (!listening.ok()) return Prefixed("--rank-link: ", listening);
  if (invitation.empty()) return absl::OkStatus();  // the leader tells why
  if (leads()) {
    MOESERVE_RETURN_IF_ERROR(link_->Accept(kConnectTime));
    exchange_->SetOptions(
        {.timeout = absl::Seconds(options_.start_seconds), .wake = [this] { link_->Wake(); }});
  } else {
    MOESERVE_ASSIGN_OR_RETURN(link_,
                              Link::Connect(invitation, exchange_->rank(), kConnectTime, {}));
    exchange_->SetOptions({.timeout = absl::Seconds(options_.start_seconds),
                           .sleep = [this](absl::Duration time) { link_->WaitForWake(time); }});
  }
  link_->Watch([this](int rank, const std::string& reason) { Lost(rank, reason); });
  return absl::OkStatus();
}

RankStatus RankSession::Ranks() const {
  RankStatus status;
  status.exchange = exchange_->counts();
  status.expert_imbalance = load_watch_.imbalance();
  if (leader_ != nullptr) {
    const auto placement = leader_->placement().first;
    if (placement != nullptr) status.placement_version = placement->version();
  }
  if (Rebalancer* const moves = rebalancer()) status.moved_bytes = moves->moved_bytes();
  const MutexLock lock(mutex_);
  for (size_t r = 0; r < hosts_.size(); ++r) {
    status.ranks.push_back({.host = hosts_[r], .up = !lost_[r]});
  }
  return status;
}

absl::Status RankSession::status() const {
  // The leader's own error, such as a damaged file, can be why the exchange has failed.
  absl::Status status = leader_ == nullptr ? absl::OkStatus() : leader_->status();
  status.Update(exchange_->status());
  return status;
}

void RankSession::Lost(int rank, const std::string& reason) {
  exchange_->Lose(rank, reason);
  const absl::Status status = exchange_->status();
  if (!leads()) EndLost(std::string(status.message()));
  const MutexLock lock(mutex_);
  lost_[static_cast<size_t>(rank)] = true;
  if (const std::shared_ptr<Engine> engine = engine_.lock()) engine->Break(status);
  if (on_loss_) on_loss_();
}

absl::Status RankSession::Agree(const absl::Status& own, StartFacts facts) {
  const StartReport mine{.status = own, .host = host_, .facts = std::move(facts)};
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(Serialize(mine)));
  absl::Status verdict;
  if (leads()) {
    std::vector<StartReport> reports;
    for (const std::string& text : texts) {
      auto report = ParseStartReport(text);
      if (report.ok()) {
        reports.push_back(*std::move(report));
      } else {
        reports.push_back({.status = report.status(), .host = "", .facts = {}});
      }
    }
    verdict = CompareReports(reports);
  }
  std::string bytes =
      leads() ? Serialize(StartReport{.status = verdict, .host = "", .facts = {}}) : std::string();
  MOESERVE_RETURN_IF_ERROR(BroadcastText(bytes));
  MOESERVE_ASSIGN_OR_RETURN(const StartReport judged, ParseStartReport(bytes));
  return judged.status;
}

std::string RankSession::Lead(std::weak_ptr<Engine> engine) {
  RankTimeout chosen = ChooseRankTimeout(options_.timeout_seconds, leader_->longest_step());
  leader_->LimitWaits(chosen.timeout);
  load_watch_.Clear();
  const MutexLock lock(mutex_);
  engine_ = std::move(engine);
  return ranks() > 1 ? std::move(chosen.warning) : std::string();
}

Rebalancer* RankSession::rebalancer() const {
  const MutexLock lock(mutex_);
  return rebalancer_.get();
}

void RankSession::StopMoves() {
  if (Rebalancer* const moves = rebalancer()) moves->Stop();
}

void RankSession::BeginSteps() {
  following_ = true;
  if (leads() && ranks() > 1 && expert_files_ != nullptr) {
    const MutexLock lock(mutex_);
    rebalancer_ = std::make_unique<Rebalancer>(*leader_, load_watch_, rebalance_);
  }
  MessageExchange::Options options{
      .timeout = absl::Seconds(options_.start_seconds),
      .spin = SharesCores(options_.threads) ? absl::ZeroDuration() : kSpinTime};
  if (link_ != nullptr) {
    if (leads()) {
      options.wake = [this] { link_->Wake(); };
    } else {
      options.sleep = [this](absl::Duration time) { link_->WaitForWake(time); };
    }
    options.silent_rank = [this] { return link_->SilentRank(); };
  }
  exchange_->SetOptions(std::move(options));
}

void RankSession::OnLoss(std::function<void()> lost) {
  const MutexLock lock(mutex_);
  on_loss_ = std::move(lost);
}

absl::Status RankSession::Follow(Model& model) {
  absl::Status status;
  try {
    status = follower_->Run(model);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("not enough memory for a step");
  }
  if (status.ok()) return status;
  const std::string message(status.message());
  const int lost = exchange_->lost_rank();
  const bool own = status != exchange_->status() || lost == exchange_->rank();
  // The leader has learnt in the meantime which rank has ended, or which one it waits for itself.
  if (!own && lost <= 0) absl::SleepFor(kUnknownLossTime);
  if (link_ != nullptr && !own && lost > 0) {
    constexpr std::string_view kLost = " was lost: ";
    const size_t found = message.find(kLost);
    link_->SendLoss(lost,
                    found == std::string::npos ? message : message.substr(found + kLost.size()));
  } else if (link_ != nullptr) {
    link_->SendError(message);
  }
  EndLost(Concat("rank ", exchange_->rank(), " on ", host_, ": ", message));
}

}  // namespace moeserve::server
