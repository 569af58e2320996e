// Measures the policies of tiers (engine/tiers) with experts that do not fit into memory.
//
//   tier_bench [--mib 768] [--limit-mib N] [--rounds 10] [--steps 8] [--threads 2]
//              [--folder DIRECTORY]
//
// A model of 12 blocks with 36 experts each, `mib` in packed files, runs in a control group of a
// third of that (or N MiB). A step is one token with 4 experts per block; half of them are those of
// the token before, as long as there are so many, the others are drawn by Zipf's law (exponent 1.2,
// every block has an order of its own) or uniformly. A round runs `steps` steps with `map` and as
// many with `ahead`, on the same page cache; who begins alternates. Prints bytes of chosen experts
// per second, the share of bytes that were read, stalls, and the median over the rounds of
// `ahead` / `map`. Ends with status 77 without rights to limit memory.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/memory_group.h"
#include "tests/support/random.h"
#include "tests/support/tier_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr TierShape kTierShape{.layers = 12, .experts = 36, .chosen = 4};

struct TierSettings {
  int64_t mib = 768;
  int64_t limit_mib = 0;  // 0: a third
  int rounds = 10;
  int steps = 8;
  int threads = 2;
  fs::path folder = "/tmp";
};

[[noreturn]] void StopTiers(const std::string& message, int code) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(code);
}

// Draws the experts of each block for one token after the other.
class ExpertDraws {
 public:
  // exponent 0: uniform.
  explicit ExpertDraws(double exponent) : random_(5) {
    double sum = 0.0;
    for (int rank = 1; rank <= kTierShape.experts; ++rank) {
      sum += std::pow(rank, -exponent);
      cumulated_.push_back(sum);
    }
    for (int b = 0; b < kTierShape.layers; ++b) {
      std::vector<int32_t> order;
      for (int32_t e = 0; e < kTierShape.experts; ++e) {
        order.insert(order.begin() + random_.Below(e + 1), e);
      }
      orders_.push_back(std::move(order));
    }
    routes_.resize(orders_.size());
  }

  // One for each routed block.
  std::vector<const GivenRoutes*> Next() {
    std::vector<const GivenRoutes*> given;
    for (size_t b = 0; b < routes_.size(); ++b) {
      std::vector<int32_t> chosen = routes_[b].experts;
      while (std::ssize(chosen) > kTierShape.chosen / 2) {
        chosen.erase(chosen.begin() + random_.Below(static_cast<int>(chosen.size())));
      }
      while (std::ssize(chosen) < kTierShape.chosen) {
        const double at = cumulated_.back() * random_.Below(1 << 20) / (1 << 20);
        const auto rank = std::ranges::upper_bound(cumulated_, at) - cumulated_.begin();
        const int32_t e = orders_[b][static_cast<size_t>(rank)];
        if (std::ranges::find(chosen, e) == chosen.end()) chosen.push_back(e);
      }
      std::ranges::sort(chosen);
      routes_[b] = {.offsets = {0, kTierShape.chosen},
                    .experts = chosen,
                    .weights = std::vector<float>(chosen.size(), 0.25f)};
    }
    // A slot of the model is a block; dense ones have no routes.
    given.assign(2 * routes_.size(), nullptr);
    for (size_t b = 0; b < routes_.size(); ++b) given[2 * b + 1] = &routes_[b];
    return given;
  }

 private:
  Random random_;
  std::vector<double> cumulated_;
  std::vector<std::vector<int32_t>> orders_;
  std::vector<GivenRoutes> routes_;
};

struct Sum {
  double bytes = 0.0, seconds = 0.0, read = 0.0, stall = 0.0;
  double rate() const { return bytes / seconds; }
};

Sum RunTurn(TierModel& model, ExpertDraws& draws, int steps) {
  const TierCounts before = model.model().tier_counts();
  const auto start = Clock::now();
  for (int i = 0; i < steps; ++i) model.Step(1, draws.Next());
  const std::chrono::duration<double> time = Clock::now() - start;
  const TierCounts after = model.model().tier_counts();
  const double read = static_cast<double>(after.read_bytes - before.read_bytes);
  return {.bytes = read + static_cast<double>(after.hit_bytes - before.hit_bytes),
          .seconds = time.count(),
          .read = read,
          .stall = after.stall_seconds - before.stall_seconds};
}

int RunCase(const ModelSpec& spec, const TierSettings& settings, const fs::path& folder,
            int64_t limit, const char* name, double exponent) {
  const auto group = MemoryGroup::Enter(limit);
  if (!group.ok()) StopTiers(std::string(group.status().message()), 77);
  std::unique_ptr<TierModel> models[2];
  for (const TierPolicy policy : {TierPolicy::kMap, TierPolicy::kAhead}) {
    auto model =
        TierModel::Load(spec, folder, {.policy = policy, .memory = limit}, settings.threads);
    if (!model.ok()) StopTiers(std::string(model.status().message()), 1);
    models[static_cast<size_t>(policy)] = *std::move(model);
  }
  ExpertDraws draws(exponent);
  // All experts are compared with their checksums, and the page cache is filled.
  for (auto& model : models) {
    for (int i = 0; i < 8; ++i) model->Step(64);
    RunTurn(*model, draws, 2 * settings.steps);
  }
  Sum sums[2];
  std::vector<double> ratios;
  for (int round = 0; round < settings.rounds; ++round) {
    Sum turns[2];
    for (int i = 0; i < 2; ++i) {
      const int policy = (round + i) % 2;
      turns[policy] = RunTurn(*models[policy], draws, settings.steps);
      sums[policy].bytes += turns[policy].bytes;
      sums[policy].seconds += turns[policy].seconds;
      sums[policy].read += turns[policy].read;
      sums[policy].stall += turns[policy].stall;
    }
    ratios.push_back(turns[1].rate() / turns[0].rate());
  }
  std::ranges::sort(ratios);
  for (int policy = 0; policy < 2; ++policy) {
    const Sum& s = sums[policy];
    std::printf("%-8s %-6s %7.3f GB/s, %4.1f %% read, stalled %4.1f %% of the time\n", name,
                policy == 0 ? "map" : "ahead", 1e-9 * s.rate(), 100.0 * s.read / s.bytes,
                100.0 * s.stall / s.seconds);
  }
  std::printf("%-8s ahead / map: median %.2f, from %.2f to %.2f, of all rounds together %.2f\n",
              name, ratios[ratios.size() / 2], ratios.front(), ratios.back(),
              sums[1].rate() / sums[0].rate());
  std::fflush(stdout);
  return 0;
}

int InChild(const std::function<int()>& run) {
  const pid_t child = fork();
  if (child == 0) std::exit(run());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

int Main(const TierSettings& settings) {
  TierShape shape = kTierShape;
  // An expert has three matrices of 512 x width, in bf16.
  shape.width =
      static_cast<int>((settings.mib << 20) / (shape.layers * shape.experts) / 3072) / 16 * 16;
  const ModelSpec spec = TierSpec(shape);
  const fs::path folder = settings.folder / ("moeserve-tiers-" + std::to_string(getpid()));
  const auto write = [&] { return TierModel::Load(spec, folder, {}).ok() ? 0 : 1; };
  int code = InChild(write);
  int64_t packed = 0;
  if (code == 0) {
    for (const auto& file : fs::directory_iterator(folder)) {
      packed += static_cast<int64_t>(file.file_size());
    }
  }
  const int64_t limit = settings.limit_mib > 0 ? settings.limit_mib << 20 : packed / 3;
  std::printf("packed files %.0f MiB, memory %.0f MiB, experts of %d x 3 x 512\n",
              std::ldexp(static_cast<double>(packed), -20),
              std::ldexp(static_cast<double>(limit), -20), shape.width);
  std::fflush(stdout);
  for (const auto& [name, exponent] : {std::pair("zipf 1.2", 1.2), std::pair("uniform", 0.0)}) {
    if (code != 0) break;
    for (const auto& file : fs::directory_iterator(folder)) DropPages(file.path());
    code = InChild([&, name = name, exponent = exponent] {
      return RunCase(spec, settings, folder, limit, name, exponent);
    });
  }
  fs::remove_all(folder);
  return code;
}

TierSettings ParseTiers(int argc, char** argv) {
  TierSettings s;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--mib") {
      s.mib = std::stoll(value);
    } else if (name == "--limit-mib") {
      s.limit_mib = std::stoll(value);
    } else if (name == "--rounds") {
      s.rounds = std::stoi(value);
    } else if (name == "--steps") {
      s.steps = std::stoi(value);
    } else if (name == "--threads") {
      s.threads = std::stoi(value);
    } else if (name == "--folder") {
      s.folder = value;
    } else {
      StopTiers("unknown option " + name, 2);
    }
  }
  if (argc % 2 == 0) StopTiers("an option lacks its value", 2);
  return s;
}

}  // namespace
}  // namespace moeserve::testing

int main(int argc, char** argv) {
  return moeserve::testing::Main(moeserve::testing::ParseTiers(argc, argv));
}
