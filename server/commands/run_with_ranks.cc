#include "server/commands/run_with_ranks.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>

#include "base/error_text.h"
#include "engine/weights/place_experts.h"
#include "server/base/commit.h"
#include "server/base/version.h"
#include "server/commands/checked_options.h"
#include "server/commands/model_parts.h"
#include "server/commands/ranks/rank_session.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

// A reader of the log that has stopped reading delays the end of the process by so much.
constexpr std::chrono::seconds kFlushTime{1};

// Returns the options on which results depend, and the version of the program.
StartFacts ProgramFacts(const ModelOptionsText& options) {
  StartFacts facts = {{"version", std::string(kVersion)},
                      {"commit", std::string(Commit())},
                      {"--device", options.device},
                      {"--dtype", options.dtype},
                      {"--kv-cache-dtype", options.kv_cache_dtype},
                      {"--draft-mtp", options.draft_mtp ? "on" : "off"},
                      {"--pooling", options.pooling},
                      {"--split-head", options.ranks.split_head},
                      {"--owner-sums", options.ranks.owner_sums},
                      {"--no-rank-checksums", options.ranks.no_checksums ? "on" : "off"},
                      {"--rebalance", options.ranks.rebalance_seconds > 0.0 ? "on" : "off"}};
  std::string ignored;
  for (const std::string& key : options.ignored_keys) {
    ignored += Concat(ignored.empty() ? "" : " ", Quoted(key));
  }
  facts.emplace_back("--ignore-config", std::move(ignored));
  return facts;
}

// mpirun without --ranks mpi is an easy mistake.
void WarnOfMpirun() {
  const char* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (ranks == nullptr || rank == nullptr || std::atoi(ranks) < 2 || std::atoi(rank) != 0) return;
  std::fprintf(stderr,
               "warning: mpirun has started %d processes, but without --ranks mpi each of them "
               "works alone\n",
               std::atoi(ranks));
}

// Without --ranks, a process that shall be one of several would compute and serve alone.
absl::Status CheckAlone(const RankOptions& options) {
  const char* const given = options.rank >= 0            ? "--rank"
                            : options.of != 0            ? "--of"
                            : !options.key_file.empty()  ? "--rank-key-file"
                            : !options.link.empty()      ? "--rank-link"
                            : !options.placement.empty() ? "--placement"
                                                         : nullptr;
  if (given == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat(given, ": expected --ranks mpi, tcp or nccl beside it, found --ranks off"));
}

// Returns the exit status. Of an error that all ranks return, only the leader prints it, unless the
// ranks have logs of their own.
int FailOnce(const RankSession& session, const absl::Status& status) {
  const bool prints = session.leads() || session.logs_alone() || !session.status().ok();
  return prints ? Fail(status) : 1;
}

// Loads the part of the model and runs the leader's steps until it stops.
int FollowModel(const ModelOptionsText& options) {
  // The leader says when to stop. mpirun passes these signals to all ranks.
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) signal(signal_number, SIG_IGN);
  const Result<ModelParts> parts =
      LoadModelParts(options, {.draft = {.max_tokens = kMostDraftTokens}}, ProgressOutput::kNone,
                     std::numeric_limits<int64_t>::max());
  if (!parts.ok()) return FailOnce(*options.session, parts.status());
  return options.session->Follow(*parts->model).ok() ? 0 : kRankLostStatus;
}

}  // namespace

void AddRankOptions(CLI::App& app, RankOptions& options) {
  AddChoiceOption(app, "--ranks", options.transport,
                  "Compute one model by several processes, each with a part of the experts; all "
                  "are started with the same options. mpi: by mpirun, with Open MPI; tcp: one by "
                  "one, with --rank, --of, --rank-link and --rank-key-file; nccl: the same, with "
                  "--device cuda and results exchanged by NCCL, which has not run on GPUs yet",
                  {"off", "mpi", "tcp", "nccl"});
  AddNumberOption(app, "--rank", options.rank,
                  "With --ranks tcp or nccl: the number of this process, from 0; process 0 answers "
                  "requests (-1: none is given)",
                  -1, kMaxRanks - 1);
  AddNumberOption(app, "--of", options.of,
                  "With --ranks tcp or nccl: the number of processes (0: none is given)", 0,
                  kMaxRanks);
  app.add_option("--rank-key-file", options.key_file,
                 "With --ranks tcp or nccl: file with a key of 16 or more random characters, the "
                 "same for all processes");
  AddNumberOption(app, "--rank-timeout", options.timeout_seconds,
                  "Seconds after which a process that others wait for in a step is lost, and with "
                  "it the service; process 0 decides; 0: 10, or 20 times the longest step as "
                  "predicted at the start, if that is more",
                  0.0, 86400.0);
  AddNumberOption(app, "--rank-start-timeout", options.start_seconds,
                  "Seconds that all processes have to load the model and to try it", 1.0, 86400.0);
  AddChoiceOption(app, "--split-rows", options.split_rows,
                  "With --ranks: whether processes divide the rows of steps where rows do not "
                  "depend on each other; auto: in steps of at least 8 rows for each process",
                  {"auto", "on", "off"});
  AddChoiceOption(app, "--split-head", options.split_head,
                  "With --ranks: whether each process computes a part of the vocabulary; auto: if "
                  "the head is not the embedding matrix",
                  {"auto", "on", "off"});
  AddChoiceOption(app, "--owner-sums", options.owner_sums,
                  "With --ranks: whether each process adds the results of experts for its share of "
                  "the rows only, and gets the sums of the others; auto: in steps in which that "
                  "sends clearly fewer bytes",
                  {"auto", "on", "off"});
  app.add_option("--placement", options.placement,
                 "With --ranks: file of moeserve experts place, read by the first process, that "
                 "says which process has which experts; default: equal numbers of parameters");
  AddNumberOption(app, "--expert-copies", options.copies_percent,
                  "With --ranks, without --placement: experts that two processes have, in percent "
                  "of those of a layer, so that each step can choose between them",
                  0, kMostCopiesPercent);
  AddNumberOption(app, "--rebalance", options.rebalance_seconds,
                  "With --ranks: seconds between rounds in which processes exchange experts, while "
                  "the model runs, if their loads have become unequal; 0: experts stay",
                  0.0, 86400.0);
  AddNumberOption(app, "--rebalance-mib", options.rebalance_mib,
                  "MiB of experts that processes load in such a round, all together", 1, 1 << 20);
  app.add_flag("--no-rank-checksums", options.no_checksums,
               "With --ranks: do not compare the results of the processes after each step");
  app.add_option("--rank-link", options.link,
                 "With --ranks tcp or nccl: HOST:PORT at which process 0 listens and others "
                 "connect to it. With --ranks mpi: name or address of the first process; default: "
                 "all addresses of its machine. Connections are not encrypted");
}

int RunWithRanks(ModelOptionsText& options, const std::function<int()>& run) {
  if (options.ranks.transport == "off") {
    WarnOfMpirun();
    const absl::Status alone = CheckAlone(options.ranks);
    return alone.ok() ? run() : Fail(alone);
  }
  // mpirun passes SIGUSR1 on: it ends nothing, unless the command handles it.
  signal(SIGUSR1, SIG_IGN);
  options.ranks.threads = options.threads;
  auto session = RankSession::Open(options.ranks, options.device);
  if (!session.ok()) return Fail(session.status());
  options.session = session->get();
  const absl::Status joined = options.session->Join(ProgramFacts(options));
  if (!joined.ok()) return FailOnce(*options.session, joined);
  if (!options.session->leads()) return FollowModel(options);
  const int status = run();
  const absl::Status ranks = options.session->status();
  if (!ranks.ok()) {
    Fail(ranks);
    FlushLog(kFlushTime);
    std::fflush(nullptr);
    // Destructors of the transport's library could wait for the rank that is lost.
    _exit(kRankLostStatus);
  }
  options.session = nullptr;
  session->reset();
  return status;
}

}  // namespace moeserve::server
