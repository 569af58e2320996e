// Compares one process of two threads with ranks of one thread each.
//
//   ranks_bench [--model small] [--ranks 2] [--rounds 7] [--prompt 256] [--sequences 16] [--steps
//   8]
//               [--owner-sums auto|on|off] [--tiny]
//
// The ranks are threads of this process that exchange bytes in memory, so the cost of a network is
// not included. Every round runs the same steps once with one process (of as many threads as there
// are ranks), once with ranks that divide the rows of steps, and once with ranks that do not. The
// first of them alternates. Prints medians over the rounds, and medians of the ratios within a
// round: time of one process / time of the ranks. Fails if the logits differ in a bit, or if the
// ranks have sent another number of bytes than the plan says. --tiny: a small model and few steps,
// to test the program.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
#include "engine/layers/routed/owner_sums.h"
#include "engine/model/model.h"
#include "engine/routes/route_layout.h"
#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "kernels/registry.h"
#include "server/bench/synthetic_model.h"

namespace moeserve {
namespace {

using Clock = std::chrono::steady_clock;

struct Settings {
  std::string model = "small";
  int ranks = 2;
  int rounds = 7;
  int prompt = 256;
  int sequences = 16;
  int steps = 8;
  bool tiny = false;
  SplitChoice owner_sums = SplitChoice::kAuto;
};

template <typename T>
T Must(Result<T> result) {
  MOESERVE_CHECK(result.ok(), std::string(result.status().message()).c_str());
  return *std::move(result);
}

// The steps that are timed. All sequences have the same tokens; a page belongs to one of them.
struct Work {
  std::vector<std::vector<int32_t>> tables;
  std::vector<Batch> batches = {};
  int64_t tokens = 0;

  void AddStep(int sequences, int begin, int tokens_of_sequence) {
    Batch& batch = batches.emplace_back();
    for (int s = 0; s < sequences; ++s) {
      batch.page_tables.emplace_back(tables[static_cast<size_t>(s)]);
      for (int t = begin; t < begin + tokens_of_sequence; ++t) {
        batch.tokens.push_back((t * 31 + s * 7) % 251);
        batch.positions.push_back(t);
        batch.sequence.push_back(s);
        batch.phase.push_back(Phase::kPrefill);
      }
      batch.logit_rows.push_back(batch.num_tokens() - 1);
    }
    tokens += batch.num_tokens();
  }
};

std::vector<std::vector<int32_t>> TablesOf(int sequences, int positions) {
  const int pages = (positions + kPageTokens - 1) / kPageTokens;
  std::vector<std::vector<int32_t>> tables(static_cast<size_t>(sequences));
  for (int32_t i = 0; i < sequences * pages; ++i) tables[i % sequences].push_back(i);
  return tables;
}

struct Timed {
  double seconds = 0;
  std::vector<float> logits;
  uint64_t bytes = 0;  // sent by all ranks
  // Of the leader and of the last rank: the part of the time in which it waited for others.
  double leader_waits = 0, last_waits = 0;
};

// Bytes that all ranks together send for the results of routed blocks, if these have neither shared
// experts nor projections.
struct RoutedBytes {
  int64_t sent = 0;
  // (k d b / P + 4 d) (P - 1) per token where owners add, as if results were spread evenly.
  int64_t expected = 0;

  void Add(const ModelSpec& spec, int slot, const RoutingPlan& plan,
           const ExpertPlacement& placement, SplitChoice owner_sums) {
    const int ranks = placement.ranks();
    const int64_t d = spec.hidden_size, tokens = plan.rows;
    const int64_t all = int64_t{plan.num_assignments} * d * 2, sums = tokens * d * 4;
    const bool owners_add = OwnersAdd(owner_sums, {.ranks = ranks,
                                                   .results = plan.num_assignments,
                                                   .result_bytes = d * 2,
                                                   .tokens = tokens,
                                                   .sum_bytes = d * 4});
    if (!owners_add) {
      sent += all * (ranks - 1);
      expected += all * (ranks - 1);
      return;
    }
    std::vector<int32_t> rows;
    for (int e = 0; e < plan.num_experts; ++e) {
      rows.push_back(plan.expert_offsets[e + 1] - plan.expert_offsets[e]);
    }
    const std::vector<int> owners =
        OwnersOf(rows, PlaceParameters(spec.blocks[static_cast<size_t>(slot)]),
                 placement.holders(spec.stack, slot), ranks);
    for (int32_t a = 0; a < plan.num_assignments; ++a) {
      const int64_t owner = owners[static_cast<size_t>(plan.expert_of_assignment[a])];
      const int64_t token = plan.row_of_assignment[a];
      const bool kept = token >= tokens * owner / ranks && token < tokens * (owner + 1) / ranks;
      if (!kept) sent += d * 2;
    }
    sent += sums * (ranks - 1);
    expected += all * (ranks - 1) / ranks + sums * (ranks - 1);
  }
};

// A model that is computed by one process, or by ranks on threads of one process.
class Side {
 public:
  // ranks = 0: one process with `threads` threads.
  Side(const ModelSpec& spec, int ranks, int threads, int64_t pages,
       SplitChoice owner_sums = SplitChoice::kOff) {
    members_.resize(static_cast<size_t>(std::max(ranks, 1)));
    std::vector<std::unique_ptr<Transport>> transports;
    if (ranks > 0) transports = LoopbackTransports(ranks);
    placement_ = ExpertPlacement::Balanced(spec, std::max(ranks, 1));
    std::vector<std::thread> loaders;
    for (size_t r = 0; r < members_.size(); ++r) {
      Member& m = members_[r];
      ModelOptions options{.compute = DType::kBF16};
      if (ranks > 0) {
        m.exchange =
            std::make_unique<MessageExchange>(std::move(transports[r]), MessageExchange::Options{});
        options.exchange = m.exchange.get();
        options.placement = &placement_;
        options.owner_sums = owner_sums;
      }
      loaders.emplace_back([&m, &spec, options, threads, pages] {
        m.backend = Must(CreateBackend({.device = "cpu", .threads = threads}));
        const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
        m.model = Must(Model::Create(spec, options, *weights, *m.backend));
        m.cache = Must(m.backend->NewKvCache(CacheShapes(spec), KvCacheType::kBF16, {pages}));
      });
    }
    for (std::thread& loader : loaders) loader.join();
  }

  bool divides_head() const { return members_[0].model->divides_head(); }

  // Runs the work with one process. Returns the bytes that ranks send for the results of experts.
  RoutedBytes BytesOfExperts(const Work& work, int ranks, SplitChoice owner_sums) {
    Member& m = members_[0];
    const ModelSpec& spec = m.model->spec();
    const ExpertPlacement placement = ExpertPlacement::Balanced(spec, ranks);
    const RouteLayout layout(spec);
    RoutedBytes bytes;
    for (const Batch& batch : work.batches) {
      std::vector<float> logits(batch.logit_rows.size() * static_cast<size_t>(spec.vocab_size));
      StepOptions step;
      step.report.plans = true;
      const StepReport report = m.model->Forward(batch, *m.cache, step, {.logits = logits});
      for (const BlockReport& block : report.blocks) {
        const int slot = layout.blocks[static_cast<size_t>(block.index)].slot;
        bytes.Add(spec, slot, block.plan, placement, owner_sums);
      }
    }
    return bytes;
  }

  Timed Run(const Work& work, bool divide_rows) {
    const ExchangeTotals before = Totals();
    Timed timed;
    const auto start = Clock::now();
    std::vector<std::thread> threads;
    for (size_t r = 1; r < members_.size(); ++r) {
      threads.emplace_back([&, r] { RunMember(members_[r], work, divide_rows); });
    }
    timed.logits = RunMember(members_[0], work, divide_rows);
    timed.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    for (std::thread& thread : threads) thread.join();
    const ExchangeTotals after = Totals();
    timed.bytes = after.bytes - before.bytes;
    timed.leader_waits = (after.leader_waits - before.leader_waits) / timed.seconds;
    timed.last_waits = (after.last_waits - before.last_waits) / timed.seconds;
    return timed;
  }

 private:
  struct Member {
    std::unique_ptr<MessageExchange> exchange;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
    std::unique_ptr<KvCacheStorage> cache;
  };
  struct ExchangeTotals {
    uint64_t bytes = 0;
    double leader_waits = 0, last_waits = 0;  // seconds
  };

  ExchangeTotals Totals() const {
    ExchangeTotals totals;
    for (const Member& m : members_) {
      if (m.exchange == nullptr) return {};
      MOESERVE_CHECK(m.exchange->status().ok(), "no rank is lost");
      totals.bytes += m.exchange->counts().bytes_sent;
    }
    // For the rank that took longest in most gathers.
    const auto longest = [](const Member& m) {
      return std::ranges::max(m.exchange->counts().wait_seconds);
    };
    totals.leader_waits = longest(members_.front());
    totals.last_waits = longest(members_.back());
    return totals;
  }

  static std::vector<float> RunMember(Member& m, const Work& work, bool divide_rows) {
    std::vector<float> all;
    const auto vocabulary = static_cast<size_t>(m.model->spec().vocab_size);
    for (Batch batch : work.batches) {
      if (m.exchange != nullptr) batch.divide_rows = divide_rows;
      std::vector<float> logits(batch.logit_rows.size() * vocabulary);
      m.model->Forward(batch, *m.cache, {}, {.logits = logits});
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  ExpertPlacement placement_;
  std::vector<Member> members_;
};

// Returns the bytes that all ranks together send, `experts` for the results of experts: every
// gathered row goes to all ranks but the one that has computed it.
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
  }
  return static_cast<uint64_t>(bytes * (ranks - 1) + experts);
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

// Times the work in all ways. Returns whether bits and bytes are as expected.
bool Compare(const char* name, const ModelSpec& spec, const Settings& s, const Work& work,
             Side& one, Side& ranks) {
  bool good = true;
  struct Way {
    const char* name;
    bool divide_rows;
    std::vector<double> seconds, ratios, leader_waits, last_waits;
  };
  std::vector<double> alone;
  const RoutedBytes experts = one.BytesOfExperts(work, s.ranks, s.owner_sums);
  const auto bytes_of = [&](const Way& way) {
    return BytesOfPlan(spec, work, s.ranks, way.divide_rows, ranks.divides_head(), experts.sent);
  };
  Way ways[] = {{"rows divided", true, {}, {}, {}, {}},
                {"rows not divided", false, {}, {}, {}, {}}};
  for (int round = -1; round < s.rounds; ++round) {
    Timed timed[3];
    for (int i = 0; i < 3; ++i) {
      const int way = (i + std::max(round, 0)) % 3;
      timed[way] = way == 2 ? one.Run(work, false) : ranks.Run(work, ways[way].divide_rows);
    }
    if (round < 0) continue;  // the first run allocates memory
    alone.push_back(timed[2].seconds);
    for (int w = 0; w < 2; ++w) {
      ways[w].seconds.push_back(timed[w].seconds);
      ways[w].ratios.push_back(timed[2].seconds / timed[w].seconds);
      ways[w].leader_waits.push_back(timed[w].leader_waits);
      ways[w].last_waits.push_back(timed[w].last_waits);
      const uint64_t expected = bytes_of(ways[w]);
      if (timed[w].bytes != expected) {
        std::printf("%s, %s: expected %llu bytes, found %llu\n", name, ways[w].name,
                    static_cast<unsigned long long>(expected),
                    static_cast<unsigned long long>(timed[w].bytes));
        good = false;
      }
      if (std::memcmp(timed[w].logits.data(), timed[2].logits.data(),
                      timed[2].logits.size() * sizeof(float)) != 0) {
        std::printf("%s, %s: the logits differ from those of one process\n", name, ways[w].name);
        good = false;
      }
    }
  }
  std::printf("%s: one process %.1f tokens/s\n", name,
              static_cast<double>(work.tokens) / Median(alone));
  for (const Way& way : ways) {
    std::printf(
        "%s, %d ranks, %s: %.1f tokens/s, ratio %.3f (%.3f to %.3f), the leader waits %.1f %%, the "
        "last rank %.1f %%, %.2f MB per step\n",
        name, s.ranks, way.name, static_cast<double>(work.tokens) / Median(way.seconds),
        Median(way.ratios), *std::ranges::min_element(way.ratios),
        *std::ranges::max_element(way.ratios), 100 * Median(way.leader_waits),
        100 * Median(way.last_waits),
        static_cast<double>(bytes_of(way)) / 1e6 / static_cast<double>(work.batches.size()));
  }
  std::printf(
      "%s, %d ranks: results of experts and their sums %.3f MB per step, by the formula "
      "%.3f\n",
      name, s.ranks,
      static_cast<double>(experts.sent) / 1e6 / static_cast<double>(work.batches.size()),
      static_cast<double>(experts.expected) / 1e6 / static_cast<double>(work.batches.size()));
  return good;
}

int Main(const Settings& s) {
  ModelSpec spec = Must(SyntheticSpec(s.model));
  if (s.tiny) {
    // The last layers are dropped.
    std::erase_if(spec.blocks, [](const BlockSpec& block) { return block.layer > 1; });
  }
  constexpr int kContext = 64;  // positions of a sequence before the steps that are timed
  const int positions = std::max(s.prompt, kContext + s.steps);
  Work prompt{.tables = TablesOf(1, s.prompt)};
  prompt.AddStep(1, 0, s.prompt);
  Work context{.tables = TablesOf(s.sequences, kContext + s.steps)};
  Work decode{.tables = context.tables};
  context.AddStep(s.sequences, 0, kContext);
  for (int i = 0; i < s.steps; ++i) decode.AddStep(s.sequences, kContext + i, 1);
  const int64_t pages = int64_t{s.sequences} * ((positions + kPageTokens - 1) / kPageTokens);

  Side one(spec, 0, s.ranks, pages);
  Side ranks(spec, s.ranks, 1, pages, s.owner_sums);
  bool good = Compare("prompt", spec, s, prompt, one, ranks);
  one.Run(context, false);
  ranks.Run(context, true);
  good = Compare("decode", spec, s, decode, one, ranks) && good;
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
      settings.sequences = settings.ranks;
      settings.steps = 2;
      continue;
    }
    int* const number = option == "--ranks"       ? &settings.ranks
                        : option == "--rounds"    ? &settings.rounds
                        : option == "--prompt"    ? &settings.prompt
                        : option == "--sequences" ? &settings.sequences
                        : option == "--steps"     ? &settings.steps
                                                  : nullptr;
    const bool sums = option == "--owner-sums";
    if (i + 1 == argc || (number == nullptr && !sums && option != "--model")) {
      std::fprintf(stderr, "unknown option or no value: %s\n", argv[i]);
      return 2;
    }
    ++i;
    if (sums) {
      const std::string_view choice = argv[i];
      settings.owner_sums = choice == "on"    ? moeserve::SplitChoice::kOn
                            : choice == "off" ? moeserve::SplitChoice::kOff
                                              : moeserve::SplitChoice::kAuto;
    } else if (number == nullptr) {
      settings.model = argv[i];
    } else {
      *number = std::atoi(argv[i]);
    }
  }
  return moeserve::Main(settings);
}
