// Measures the CUDA kernels on the papers' shapes. The results are compared with the device's best
// rates.
//
//   cuda_bench [--json FILE] [--filter SUBSTRING] [--list] [--seconds N]
//              [--rates FILE | --bf16-tflops X] [--tiny]
//
// The first case measures the device: copy bandwidth, read bandwidth, the rate of bf16 products and
// the time of an empty kernel in a graph. Every other case first compares some values with a plain
// computation on the host. It then times replays of a captured graph whose items access different
// sets of random data; together, these sets exceed the L2 cache. With --json, cases that FILE
// already contains are skipped, so that an interrupted run can be continued. Cases that crashed the
// process are skipped, too.

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>

#include "kernels/cuda/device/device.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr char kDeviceCase[] = "device/rates";
// The exit status if this process can no longer use the device. A new process can continue the run.
constexpr int kDeviceLost = 3;

struct Options {
  std::string json_file;
  std::string rates_file;
  std::vector<std::string> filters;
  double seconds = 1e9;
  double bf16_tflops = 0;
  bool list = false;
  bool tiny = false;
};

// A file with the results of this run and of earlier runs, one JSON object per line.
class ResultFile {
 public:
  absl::Status Open(const std::string& path) {
    if (path.empty()) return absl::OkStatus();
    std::ifstream old(path);
    for (std::string line; std::getline(old, line);) {
      // The last line may be incomplete.
      const json result = json::parse(line, nullptr, false);
      if (!result.is_object() || !result.contains("name")) continue;
      const std::string name = result["name"];
      if (result.contains("started")) {
        started_.insert(name);
      } else {
        results_[name] = result;
      }
    }
    file_.open(path, std::ios::app);
    if (!file_.good()) return absl::UnavailableError("cannot write " + path);
    file_ << "\n";
    return absl::OkStatus();
  }
  const json* Find(const std::string& name) const {
    const auto it = results_.find(name);
    return it == results_.end() ? nullptr : &it->second;
  }
  // Returns whether an earlier run began the case but wrote no result for it.
  bool StoppedProcess(const std::string& name) const {
    return started_.count(name) > 0 && Find(name) == nullptr;
  }
  void Write(const json& result) {
    if (!file_.is_open()) return;
    file_ << result.dump() << "\n" << std::flush;
  }

 private:
  std::map<std::string, json> results_;
  std::set<std::string> started_;
  std::ofstream file_;
};

// Returns the rate of matrix products that another program measured, from a line such as {"name":
// "rate/bf16", "tflops": 790}.
double RateFrom(const std::string& path) {
  std::ifstream file(path);
  double rate = 0;
  for (std::string line; std::getline(file, line);) {
    const json result = json::parse(line, nullptr, false);
    if (result.is_object() && result.value("name", "") == "rate/bf16" &&
        result.contains("tflops")) {
      rate = result["tflops"].get<double>() * 1e12;
    }
  }
  return rate;
}

absl::Status DeviceRates(const Options& options, Bench& bench, ResultFile& file) {
  Rates& rates = bench.rates();
  if (const json* known = file.Find(kDeviceCase); known != nullptr) {
    if ((*known)["device"] != rates.device) {
      return absl::FailedPreconditionError(options.json_file + " has results of " +
                                           (*known)["device"].get<std::string>() + ", this is " +
                                           rates.device + "; expected another file");
    }
    rates.copy = (*known)["copy_gbps"].get<double>() * 1e9;
    rates.read = (*known)["read_gbps"].get<double>() * 1e9;
    rates.bf16 = known->value("bf16_tflops", 0.0) * 1e12;
    rates.bf16_method = known->value("bf16_method", "");
    rates.node = (*known)["graph_node_us"].get<double>() * 1e-6;
  } else {
    MOESERVE_RETURN_IF_ERROR(bench.MeasureRates());
    file.Write({{"name", kDeviceCase},
                {"device", rates.device},
                {"copy_gbps", rates.copy / 1e9},
                {"read_gbps", rates.read / 1e9},
                {"bf16_tflops", rates.bf16 / 1e12},
                {"bf16_method", rates.bf16_method},
                {"bf16_sustained_tflops", rates.bf16_sustained / 1e12},
                {"graph_node_us", rates.node * 1e6},
                {"l2_bytes", rates.l2_bytes},
                {"multiprocessors", rates.multiprocessors}});
  }
  const double other = options.rates_file.empty() ? 0 : RateFrom(options.rates_file);
  if (other > rates.bf16) {
    rates.bf16 = other;
    rates.bf16_method = "PyTorch";
  }
  if (options.bf16_tflops > 0) {
    rates.bf16 = options.bf16_tflops * 1e12;
    rates.bf16_method = "given";
  }
  std::printf(
      "%s: copy %.0f GB/s, read %.0f GB/s, empty graph node %.2f us, %d multiprocessors, "
      "L2 %.0f MB, bf16 %.0f TFLOP/s (%s)\n",
      rates.device.c_str(), rates.copy / 1e9, rates.read / 1e9, rates.node * 1e6,
      rates.multiprocessors, static_cast<double>(rates.l2_bytes) / 1e6, rates.bf16 / 1e12,
      rates.bf16_method.c_str());
  return absl::OkStatus();
}

json Describe(const Case& c, const Measured& m, const Rates& rates) {
  const double t = m.timing.median;
  json line = m.more;
  line["name"] = c.name;
  line["method"] = "moeserve";
  line["device"] = rates.device;
  line["median_us"] = t * 1e6;
  line["p10_us"] = m.timing.p10 * 1e6;
  line["p90_us"] = m.timing.p90 * 1e6;
  line["items"] = m.timing.items;
  line["replays"] = m.timing.replays;
  line["bytes"] = m.work.bytes;
  line["flops"] = m.work.flops;
  line["bytes_written"] = m.work.written;
  const double floor = Floor(rates, m.work);
  const double latency_floor = LatencyFloor(rates, m.work);
  line["floor_us"] = floor * 1e6;
  line["phases"] = m.work.phases;
  line["latency_floor_us"] = latency_floor * 1e6;
  line["times_latency_floor"] = t / latency_floor;
  line["bound"] = latency_floor > 2 * floor                        ? "latency"
                  : MemorySeconds(rates, m.work) >= floor * 0.9999 ? "memory"
                                                                   : "compute";
  line["bf16_rate_tflops"] = rates.bf16 / 1e12;
  line["share_of_floor"] = floor / t;
  line["share_of_copy"] = m.work.bytes / t / rates.copy;
  line["share_of_read"] = m.work.bytes / t / rates.read;
  if (m.work.flops > 0) {
    line["tflops"] = m.work.flops / t / 1e12;
    if (rates.bf16 > 0) line["share_of_bf16"] = m.work.flops / t / rates.bf16;
  }
  // If the items together access less than twice the L2 cache, they may read from the cache.
  // rotated_bytes is 0 in cases that do not depend on this, such as prompts.
  line["may_be_cached"] =
      m.rotated_bytes > 0 && m.rotated_bytes < 2.0 * static_cast<double>(rates.l2_bytes);
  return line;
}

int RunCases(const Options& options) {
  std::vector<Case> cases;
  AddExpertCases(options.tiny, cases);
  AddBlockCases(options.tiny, cases);
  AddRoutingCases(options.tiny, cases);
  AddAttentionCases(options.tiny, cases);
  AddRowCases(options.tiny, cases);
  AddCountingCases(options.tiny, cases);
  std::stable_sort(cases.begin(), cases.end(),
                   [](const Case& a, const Case& b) { return a.priority < b.priority; });
  std::erase_if(cases, [&](const Case& c) {
    return !options.filters.empty() &&
           std::none_of(options.filters.begin(), options.filters.end(),
                        [&](const std::string& f) { return c.name.find(f) != c.name.npos; });
  });
  if (options.list) {
    for (const Case& c : cases) std::printf("%s\n", c.name.c_str());
    return 0;
  }
  const auto fail = [](const absl::Status& status) {
    std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
    return 1;
  };
  const auto start = Clock::now();
  if (const absl::Status status = cuda::CheckDevice(); !status.ok()) return fail(status);
  Result<std::unique_ptr<Bench>> created = Bench::Create(options.tiny);
  if (!created.ok()) return fail(created.status());
  Bench& bench = **created;
  ResultFile file;
  if (const absl::Status status = file.Open(options.json_file); !status.ok()) return fail(status);
  if (const absl::Status status = DeviceRates(options, bench, file); !status.ok()) {
    return fail(status);
  }
  const Rates& rates = bench.rates();
  std::printf("%-30s %10s %10s %10s %9s %7s %8s %7s %7s %8s\n", "case", "median us", "p10", "p90",
              "floor us", "floor%", "latency", "copy%", "bf16%", "TFLOP/s");
  int failed = 0, left_out = 0;
  for (const Case& c : cases) {
    if (file.Find(c.name) != nullptr) continue;
    if (file.StoppedProcess(c.name)) {
      file.Write({{"name", c.name}, {"method", "moeserve"}, {"error", "it stopped the process"}});
      std::printf("%-30s stopped an earlier run\n", c.name.c_str());
      ++failed;
      continue;
    }
    if (std::chrono::duration<double>(Clock::now() - start).count() > options.seconds) {
      ++left_out;
      continue;
    }
    file.Write({{"name", c.name}, {"started", true}});
    const Result<Measured> measured = c.run(bench);
    if (!measured.ok()) {
      ++failed;
      const std::string message(measured.status().message());
      file.Write({{"name", c.name}, {"method", "moeserve"}, {"error", message}});
      std::printf("%-30s error: %s\n", c.name.c_str(), message.c_str());
      std::fflush(stdout);
      bench.Forget();
      static_cast<void>(cudaGetLastError());
      if (!bench.Synchronize().ok() || cudaDeviceSynchronize() != cudaSuccess) {
        std::fprintf(stderr, "error: the device does not answer any more\n");
        return kDeviceLost;
      }
      continue;
    }
    const json line = Describe(c, *measured, rates);
    file.Write(line);
    const auto percent = [&](const char* field) {
      return line.contains(field) ? 100.0 * line[field].get<double>() : 0.0;
    };
    std::printf("%-30s %10.2f %10.2f %10.2f %9.2f %7.1f %7.2fx %7.1f %7.1f %8.1f%s\n",
                c.name.c_str(), line["median_us"].get<double>(), line["p10_us"].get<double>(),
                line["p90_us"].get<double>(), line["floor_us"].get<double>(),
                percent("share_of_floor"), line["times_latency_floor"].get<double>(),
                percent("share_of_copy"), percent("share_of_bf16"),
                measured->work.flops / measured->timing.median / 1e12,
                line["may_be_cached"].get<bool>() ? " (cached)" : "");
    std::fflush(stdout);
  }
  if (left_out > 0) std::printf("%d cases were left out for lack of time\n", left_out);
  if (failed > 0) std::printf("%d cases failed\n", failed);
  return failed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace moeserve::bench

int main(int argc, char** argv) {
  moeserve::bench::Options options;
  CLI::App app("Speed of the CUDA kernels as a share of what the device does at best");
  app.add_option("--json", options.json_file, "Results, a JSON object to a line; appended");
  app.add_option("--filter", options.filters, "Cases whose name has one of these in it")
      ->delimiter(',');
  app.add_option("--seconds", options.seconds, "Start no case after this time");
  app.add_option(
      "--rates", options.rates_file,
      "File with a line \"rate/bf16\"; the higher of this rate and that measured counts");
  app.add_option("--bf16-tflops", options.bf16_tflops,
                 "Rate of matrix products to use in place of that measured");
  app.add_flag("--list", options.list, "Print the cases' names");
  app.add_flag("--tiny", options.tiny, "Small shapes, to try the program itself");
  CLI11_PARSE(app, argc, argv);
  return moeserve::bench::RunCases(options);
}
