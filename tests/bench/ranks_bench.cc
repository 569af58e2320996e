// Compares one process of several threads with ranks of one thread each.
//
//   ranks_bench [--model small] [--ranks 2] [--rounds 7] [--prompt 256] [--sequences 16]
//               [--steps 8] [--owner-sums auto|on|off] [--cores N] [--json FILE [--name TEXT]]
//               [--rebalance MIB] [--tiny]
//   mpirun -n 2 --bind-to none ranks_bench --ranks mpi [--mpi OBJECT] ...
//
// With a number of ranks, they are threads of this process that exchange bytes in memory, so the
// cost of a network is not included. With mpi, they are the processes that mpirun has started, and
// rank 0 also has the one process. That one has as many threads as there are ranks, but at most one
// for each core (--cores; default: those that this process may use). --mpi: libmoeserve_mpi.so, if
// it is not where the program's build has it.
//
// Every round runs the same steps once with one process, once with ranks that divide the rows of
// steps, and once with ranks that do not; the first of them alternates, and followers sleep while
// the one process runs. Two more runs, of the one process, measure where its time goes. Prints
// medians over the rounds, and medians of the ratios within a round: time of one process / time of
// the ranks. Fails if the logits differ in a bit, or if the ranks have sent another number of bytes
// than the plan says. --json appends a line for each comparison, which `scale_model.py --check`
// reads; --name tells how bytes were exchanged. --rebalance: measures instead how long a step takes
// at most while ranks exchange experts of so many MiB. --tiny: a small model and few steps, to test
// the program.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
#include "engine/model/model.h"
#include "engine/ranks/step_check.h"
#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/mpi_transport.h"
#include "server/bench/synthetic_model.h"
#include "tests/bench/ranks/must.h"
#include "tests/bench/ranks/rank_engine.h"
#include "tests/bench/ranks/rebalance_steps.h"
#include "tests/bench/ranks/routed_bytes.h"
#include "tests/bench/ranks/timed_steps.h"

namespace moeserve {
namespace {

struct Settings {
  std::string model = "small";
  int ranks = 2;
  int rounds = 7;
  int prompt = 256;
  int sequences = 16;
  int steps = 8;
  bool tiny = false;
  bool mpi = false;
  SplitChoice owner_sums = SplitChoice::kAuto;
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  int rebalance_mib = 0;  // 0: nothing is moved
  std::string json;       // a file
  std::string name;       // of the lines in it: how bytes are exchanged
  std::string mpi_object = MOESERVE_MPI_OBJECT;

  int threads() const { return std::min(ranks, cores); }  // of the one process
};

// Returns the bytes that all ranks together send, `experts` for the results of experts: every
// gathered row goes to all ranks but the one that has computed it. After a step, followers send a
// check to the leader.
uint64_t BytesOfPlan(const ModelSpec& spec, const Work& work, int ranks, bool rows, bool head,
                     int64_t experts) {
  const int64_t d = spec.hidden_size;
  int64_t of_token = 0;
  for (const BlockSpec& block : spec.blocks) {
    if (const AttentionSpec* const attention = block.attention(); attention != nullptr && rows) {
      const int64_t kv = attention->num_kv_heads * attention->head_dim + attention->value_width();
      of_token += 4 * (kv + d);
    }
    if (block.feed_forward() != nullptr && block.routing() == nullptr && rows) of_token += 4 * d;
  }
  int64_t bytes = 0;
  for (const Batch& batch : work.batches) {
    bytes += batch.num_tokens() * of_token;
    const int64_t width = (int64_t{spec.vocab_size} / ranks + 15) / 16 * 16;
    MOESERVE_CHECK(spec.vocab_size % ranks == 0, "a vocabulary of equal ranges");
    if (head) bytes += std::ssize(batch.logit_rows) * width * 4;
    bytes += static_cast<int64_t>(sizeof(StepCheck));
  }
  return static_cast<uint64_t>(bytes * (ranks - 1) + experts);
}

// One way in which ranks run the work, and what was measured in the rounds.
struct Way {
  const char* name = "";
  bool divide_rows = false;
  std::vector<double> seconds, ratios, leader_waits, last_waits;
  std::vector<double> gather_seconds;       // of the leader
  StepTimes times;                          // of the leader, all rounds; only if rows are divided
  RankFigures leader;                       // of the last round
  uint64_t bytes = 0, bytes_to_leader = 0;  // by all ranks, in a round
};

// What the rounds of one kind of work have measured.
struct Comparison {
  explicit Comparison(const char* of) : name(of) {
    ways[0].name = "rows divided";
    ways[0].divide_rows = true;
    ways[1].name = "rows not divided";
  }
  const char* const name;
  std::vector<double> alone;  // seconds of the one process
  std::vector<double> apart;  // the same when its parts are computed one by one
  StepTimes parts;            // of the latter, all rounds
  StepTimes few;              // the same with the rows that a rank has of divided ones
  Way ways[2];
  RoutedBytes experts;
  bool good = true;
};

void ExpectEqual(Comparison& c, const char* way, const Timed& timed, const Timed& alone) {
  if (timed.logits.size() == alone.logits.size() &&
      std::memcmp(timed.logits.data(), alone.logits.data(), alone.logits.size() * sizeof(float)) ==
          0) {
    return;
  }
  std::printf("%s, %s: the logits differ from those of one process\n", c.name, way);
  c.good = false;
}

// Adds what ranks did in a round, if it was as expected.
void AddRound(Comparison& c, Way& way, const Timed& timed, const Timed& alone,
              const std::vector<RankFigures>& figures, uint64_t expected) {
  way.seconds.push_back(timed.seconds);
  way.ratios.push_back(alone.seconds / timed.seconds);
  way.leader = figures.front();
  way.leader_waits.push_back(figures.front().longest_wait / timed.seconds);
  way.last_waits.push_back(figures.back().longest_wait / timed.seconds);
  way.gather_seconds.push_back(figures.front().gather_seconds);
  way.bytes = way.bytes_to_leader = 0;
  for (const RankFigures& rank : figures) {
    way.bytes += rank.bytes;
    way.bytes_to_leader += rank.bytes_to_leader;
  }
  if (const uint64_t found = way.bytes + way.bytes_to_leader; found != expected) {
    std::printf("%s, %s: expected %llu bytes, found %llu\n", c.name, way.name,
                static_cast<unsigned long long>(expected), static_cast<unsigned long long>(found));
    c.good = false;
  }
  ExpectEqual(c, way.name, timed, alone);
}

// Times the work in all ways. `few` has the first of its rows, one for each rank.
Comparison Compare(const char* name, const ModelSpec& spec, const Settings& s, const Work& work,
                   const Work& few, BenchModel& one, RankEngine& ranks) {
  Comparison c(name);
  c.experts = BytesOfExperts(*one.model, *one.cache, work, s.ranks, s.owner_sums);
  for (int round = -1; round < s.rounds; ++round) {
    Timed timed[3];
    std::vector<RankFigures> figures[2];
    StepTimes times[2];
    for (int i = 0; i < 3; ++i) {
      const int way = (i + std::max(round, 0)) % 3;
      if (way == 2) {
        timed[way] = RunSteps(*one.model, *one.cache, work, false);
        continue;
      }
      const bool divide = c.ways[way].divide_rows;
      figures[way] = ranks.Run([&](Model& model, KvCacheStorage& cache) {
        timed[way] = RunSteps(model, cache, work, divide, divide ? &times[way] : nullptr);
      });
    }
    StepTimes parts;
    const Timed apart = RunSteps(*one.model, *one.cache, work, false, &parts);
    ExpectEqual(c, "parts one by one", apart, timed[2]);
    StepTimes of_few;
    RunSteps(*one.model, *one.cache, few, false, &of_few);
    if (round < 0) continue;  // the first run allocates memory
    c.alone.push_back(timed[2].seconds);
    c.apart.push_back(apart.seconds);
    Add(c.parts, parts);
    Add(c.few, of_few);
    for (int w = 0; w < 2; ++w) {
      Way& way = c.ways[w];
      AddRound(
          c, way, timed[w], timed[2], figures[w],
          BytesOfPlan(spec, work, s.ranks, way.divide_rows, ranks.divides_head(), c.experts.sent));
      Add(way.times, times[w]);
    }
  }
  return c;
}

void Print(const Comparison& c, const Settings& s, const Work& work) {
  std::printf("%s: one process, %d threads, %.1f tokens/s\n", c.name, s.threads(),
              static_cast<double>(work.tokens) / Median(c.alone));
  for (const Way& way : c.ways) {
    std::printf(
        "%s, %d ranks, %s: %.1f tokens/s, ratio %.3f (%.3f to %.3f), the leader waits %.1f %%, the "
        "last rank %.1f %%, %.2f MB per step\n",
        c.name, s.ranks, way.name, static_cast<double>(work.tokens) / Median(way.seconds),
        Median(way.ratios), *std::ranges::min_element(way.ratios),
        *std::ranges::max_element(way.ratios), 100 * Median(way.leader_waits),
        100 * Median(way.last_waits),
        static_cast<double>(way.bytes + way.bytes_to_leader) / 1e6 /
            static_cast<double>(work.batches.size()));
  }
  const double steps = static_cast<double>(work.batches.size());
  std::printf(
      "%s, %d ranks: results of experts and their sums %.3f MB per step, by the formula %.3f\n",
      c.name, s.ranks, static_cast<double>(c.experts.sent) / 1e6 / steps,
      static_cast<double>(c.experts.expected) / 1e6 / steps);
}

// What an exchange of a gather costs, measured with gathers alone.
struct ExchangeCost {
  double alpha = 0.0;  // seconds of the smallest one
  double beta = 0.0;   // bytes that a rank sends in a second in those of the work's mean size
};

ExchangeCost ProbeExchange(RankEngine& ranks, const Way& way) {
  constexpr int kCount = 101;
  const auto messages = static_cast<double>(ranks.ranks() - 1);
  const auto sent = static_cast<double>(way.bytes) / ranks.ranks() /
                    static_cast<double>(std::max<uint64_t>(way.leader.gathers, 1));
  const double alpha = ranks.TimeGathers(8, kCount);
  const double whole = ranks.TimeGathers(static_cast<int64_t>(sent / messages), kCount);
  return {.alpha = alpha, .beta = sent / std::max(whole - alpha, 1e-9)};
}

// Says where the time of ranks that divide rows goes, in milliseconds of a step at the leader, and
// appends what scale_model.py needs to the file. Gathers of the work are repeated without it.
void Explain(const Comparison& c, const Settings& s, const Work& work, RankEngine& ranks) {
  const auto steps = static_cast<double>(work.batches.size());
  const double rounds = s.rounds;
  const Way& divided = c.ways[0];
  const double imbalance = divided.times.imbalance / std::max(divided.times.blocks, 1);
  const double apart = Mean(c.apart), total = Mean(divided.seconds);
  std::FILE* const json = s.json.empty() ? nullptr : std::fopen(s.json.c_str(), "a");
  MOESERVE_CHECK(s.json.empty() || json != nullptr, "a file that can be written");
  for (const Way& way : c.ways) {
    const ExchangeCost cost = ProbeExchange(ranks, way);
    const auto gathers = static_cast<double>(way.leader.gathers);
    // A rank's share of the gathers; parts of logits all go to the leader.
    const double sent =
        static_cast<double>(way.bytes) / s.ranks + static_cast<double>(way.bytes_to_leader);
    if (way.divide_rows) {
      const auto ms = [&](double seconds) { return 1e3 * seconds / steps; };
      const double gathering = Mean(way.gather_seconds);
      const double experts = way.times.experts / rounds, rows = way.times.rows / rounds,
                   head = way.times.head / rounds;
      std::printf(
          "%s, a step of the leader, %.2f ms: experts %.2f, divided by rows %.2f, head %.2f, not "
          "divided %.2f, in exchanges %.2f; predicted of these: unequal experts %.2f (imbalance "
          "%.3f), transfer %.2f (%.0f exchanges of %.1f us, %.2f MB at %.2f GB/s)\n",
          c.name, ms(total), ms(experts), ms(rows), ms(head),
          ms(total - experts - rows - head - gathering), ms(gathering),
          ms(experts * (imbalance - 1)), imbalance, ms(gathers * cost.alpha + sent / cost.beta),
          gathers / steps, 1e6 * cost.alpha, sent / steps / 1e6, cost.beta / 1e9);
    }
    if (json == nullptr) continue;
    std::fprintf(
        json,
        "{\"name\": \"%s, %s, %s, %d ranks, %s\", \"ranks\": %d, \"cores\": %d, \"threads\": %d, "
        "\"alone_seconds\": %.6g, \"experts_share\": %.5f, \"rows_share\": %.5f, "
        "\"few_rows_share\": %.5f, "
        "\"head_share\": %.5f, \"divides_rows\": %s, \"divides_head\": %s, \"imbalance\": %.5f, "
        "\"steps\": %.0f, \"exchanges\": %.0f, \"bytes\": %.0f, \"alpha\": %.4g, \"beta\": %.4g, "
        "\"seconds\": %.6g, \"ratio\": %.4f, \"least_ratio\": %.4f, \"most_ratio\": %.4f}\n",
        s.model.c_str(), c.name, s.name.c_str(), s.ranks, way.name, s.ranks, s.cores, s.threads(),
        Median(c.alone), c.parts.experts / rounds / apart, c.parts.rows / rounds / apart,
        c.few.rows / rounds / apart, c.parts.head / rounds / apart,
        way.divide_rows ? "true" : "false", ranks.divides_head() ? "true" : "false", imbalance,
        steps, gathers, sent, cost.alpha, cost.beta, Median(way.seconds), Median(way.ratios),
        *std::ranges::min_element(way.ratios), *std::ranges::max_element(way.ratios));
  }
  if (json != nullptr) std::fclose(json);
}

// Runs the benchmark as the leader; returns whether all results were as expected.
bool Lead(const Settings& s, const RankSetup& setup, std::unique_ptr<Transport> transport) {
  constexpr int kContext = 64;  // positions of a sequence before the steps that are timed
  Work prompt{.tables = Work::Tables(1, s.prompt)};
  prompt.AddStep(1, 0, s.prompt);
  Work context{.tables = Work::Tables(s.sequences, kContext + s.steps)};
  Work decode{.tables = context.tables};
  context.AddStep(s.sequences, 0, kContext);
  for (int i = 0; i < s.steps; ++i) decode.AddStep(s.sequences, kContext + i, 1);
  Work short_prompt{.tables = prompt.tables}, few{.tables = decode.tables};
  short_prompt.AddStep(1, 0, std::max(s.prompt / s.ranks, 1));
  for (int i = 0; i < s.steps; ++i)
    few.AddStep(std::max(s.sequences / s.ranks, 1), kContext + i, 1);
  const auto fill = [&](Model& model, KvCacheStorage& cache) {
    RunSteps(model, cache, context, true);
  };
  if (s.rebalance_mib > 0) {
    RankEngine ranks(setup, std::move(transport));
    ranks.Run(fill);
    return MeasureRebalancing(ranks, setup.spec, decode, s.rounds, s.rebalance_mib);
  }
  RankSetup alone = setup;
  alone.threads = s.threads();
  BenchModel one(alone, nullptr, nullptr, nullptr);
  RankEngine ranks(setup, std::move(transport));
  const Comparison of_prompt = Compare("prompt", setup.spec, s, prompt, short_prompt, one, ranks);
  Print(of_prompt, s, prompt);
  Explain(of_prompt, s, prompt, ranks);
  fill(*one.model, *one.cache);
  ranks.Run(fill);
  const Comparison of_decode = Compare("decode", setup.spec, s, decode, few, one, ranks);
  Print(of_decode, s, decode);
  Explain(of_decode, s, decode, ranks);
  return of_prompt.good && of_decode.good;
}

int Main(Settings s) {
  std::vector<std::unique_ptr<Transport>> transports;
  if (s.mpi) {
    transports.push_back(Must(OpenMpiTransport(s.mpi_object)));
    s.ranks = transports[0]->ranks();
  } else {
    transports = LoopbackTransports(s.ranks);
  }
  if (s.tiny) s.sequences = s.ranks;
  if (s.name.empty()) s.name = s.mpi ? "processes" : "threads";
  ModelSpec spec = Must(SyntheticSpec(s.model));
  if (s.tiny) {
    // The last layers are dropped.
    std::erase_if(spec.blocks, [](const BlockSpec& block) { return block.layer > 1; });
  }
  constexpr int kContext = 64;
  const int positions = std::max(s.prompt, kContext + s.steps);
  const RankSetup setup{
      .spec = spec,
      .pages = int64_t{s.sequences} * ((positions + kPageTokens - 1) / kPageTokens),
      .shares_cores = s.ranks > s.cores,
      .owner_sums = s.owner_sums};
  if (s.mpi && transports[0]->rank() > 0) {
    Follow(setup, std::move(transports[0]));
    return 0;
  }
  if (s.mpi && s.cores < 2 && s.ranks > 1) {
    std::fprintf(stderr, "one core for all: mpirun needs --bind-to none\n");
  }
  std::vector<std::thread> followers;
  for (size_t r = 1; r < transports.size(); ++r) {
    followers.emplace_back([&setup, &transports, r] { Follow(setup, std::move(transports[r])); });
  }
  const bool good = Lead(s, setup, std::move(transports[0]));
  for (std::thread& follower : followers) follower.join();
  return good ? 0 : 1;
}

}  // namespace
}  // namespace moeserve

int main(int argc, char** argv) {
  moeserve::Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--tiny") {
      settings.tiny = true;
      settings.rounds = 1;
      settings.prompt = 40;
      settings.steps = 2;
      continue;
    }
    int* const number = option == "--ranks"       ? &settings.ranks
                        : option == "--rounds"    ? &settings.rounds
                        : option == "--prompt"    ? &settings.prompt
                        : option == "--sequences" ? &settings.sequences
                        : option == "--steps"     ? &settings.steps
                        : option == "--cores"     ? &settings.cores
                        : option == "--rebalance" ? &settings.rebalance_mib
                                                  : nullptr;
    std::string* const text = option == "--model"  ? &settings.model
                              : option == "--json" ? &settings.json
                              : option == "--mpi"  ? &settings.mpi_object
                              : option == "--name" ? &settings.name
                                                   : nullptr;
    const bool sums = option == "--owner-sums";
    if (i + 1 == argc || (number == nullptr && text == nullptr && !sums)) {
      std::fprintf(stderr, "unknown option or no value: %s\n", argv[i]);
      return 2;
    }
    ++i;
    if (text != nullptr) {
      *text = argv[i];
    } else if (sums) {
      const std::string_view choice = argv[i];
      settings.owner_sums = choice == "on"    ? moeserve::SplitChoice::kOn
                            : choice == "off" ? moeserve::SplitChoice::kOff
                                              : moeserve::SplitChoice::kAuto;
    } else if (option == "--ranks" && std::string_view(argv[i]) == "mpi") {
      settings.mpi = true;
    } else {
      *number = std::atoi(argv[i]);
    }
  }
  return moeserve::Main(settings);
}
