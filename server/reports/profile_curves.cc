#include "server/reports/profile_curves.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "base/error_text.h"
#include "engine/statistics/measures/collapse.h"
#include "server/reports/profile_diff.h"

namespace moeserve::server {
namespace {

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();

std::vector<double> LoadVector(const ExpertProfile& profile, size_t block) {
  const std::vector<uint64_t>& n = profile.stats.blocks[block].selections;
  return {n.begin(), n.end()};
}

double CollapseOf(const ExpertProfile& profile, size_t block) {
  if (profile.hidden.empty()) return kUndefined;
  const Result<Collapse> collapse = RepresentationCollapse(profile.hidden[block]);
  return collapse.ok() ? collapse->value : kUndefined;
}

BlockCurves CurvesOfRun(const ProfileRun& run, size_t block, bool fluctuates) {
  BlockCurves out;
  std::vector<std::vector<double>> loads;
  for (size_t c = 0; c < run.profiles.size(); ++c) {
    const ExpertProfile& profile = run.profiles[c];
    loads.push_back(LoadVector(profile, block));
    out.collapse.push_back(CollapseOf(profile, block));
    if (c > 0 && fluctuates) {
      out.fluctuation.push_back(RoutingFluctuation(run.profiles[c - 1].routes->blocks[block],
                                                   profile.routes->blocks[block]));
    }
  }
  out.consistency = InterRunConsistency(loads);
  return out;
}

// Returns the mean of value(block) over the blocks where it is finite.
template <typename F>
double MeanOver(const ProfileCurves& curves, const F& value) {
  double sum = 0.0;
  int count = 0;
  for (const ProfileCurves::Block& b : curves.blocks) {
    const double v = value(b);
    if (!std::isfinite(v)) continue;
    sum += v;
    ++count;
  }
  return count > 0 ? sum / count : kUndefined;
}

OrderedJson CurveValue(double v) {
  return std::isfinite(v) ? OrderedJson(v) : OrderedJson(nullptr);
}

template <typename F>
OrderedJson ListOf(size_t count, const F& value) {
  OrderedJson out = OrderedJson::array();
  for (size_t i = 0; i < count; ++i) out.push_back(value(i));
  return out;
}

// Returns the curves of run `r`; of(f) combines f(block) into one number.
template <typename F>
OrderedJson RunCurvesJson(const ProfileCurves& curves, size_t r, const F& of) {
  using Block = ProfileCurves::Block;
  const size_t checkpoints = curves.names[r].size();
  OrderedJson out;
  out["consistency"] = CurveValue(of([&](const Block& b) { return b.runs[r].consistency; }));
  const size_t steps = curves.blocks.empty() ? 0 : curves.blocks[0].runs[r].fluctuation.size();
  out["routing_fluctuation"] = ListOf(steps, [&](size_t c) {
    return OrderedJson{
        {"top1", CurveValue(of([&](const Block& b) { return b.runs[r].fluctuation[c].top1; }))},
        {"sets", CurveValue(of([&](const Block& b) { return b.runs[r].fluctuation[c].sets; }))}};
  });
  out["collapse"] = ListOf(checkpoints, [&](size_t c) {
    return CurveValue(of([&](const Block& b) { return b.runs[r].collapse[c]; }));
  });
  return out;
}

std::string CurveText(double v) {
  if (!std::isfinite(v)) return "-";
  char text[32];
  std::snprintf(text, sizeof(text), "%.4f", v);
  return text;
}

}  // namespace

Result<ProfileCurves> CurvesOf(const std::vector<ProfileRun>& runs) {
  ProfileCurves out;
  if (runs.empty() || runs.front().profiles.empty()) {
    return absl::InvalidArgumentError("expected a profile or more");
  }
  const ExpertProfile& first = runs.front().profiles.front();
  const size_t checkpoints = runs.front().profiles.size();
  std::vector<bool> fluctuates;
  for (const ProfileRun& run : runs) {
    if (run.profiles.size() != checkpoints) {
      return absl::InvalidArgumentError(Concat("expected as many checkpoints in every run, found ",
                                               checkpoints, " and ", run.profiles.size()));
    }
    fluctuates.push_back(true);
    for (size_t c = 0; c < checkpoints; ++c) {
      if (absl::Status same = CheckComparable(first, run.profiles[c]); !same.ok()) {
        return Prefixed(
            Concat(Quoted(runs.front().names.front()), " and ", Quoted(run.names[c]), ": "), same);
      }
      if (c == 0) continue;
      const std::string reason = ReasonAgainstFluctuation(run.profiles[c - 1], run.profiles[c]);
      if (reason.empty()) continue;
      fluctuates.back() = false;
      out.no_fluctuation = reason;
    }
    out.names.push_back(run.names);
  }
  for (size_t i = 0; i < first.stats.blocks.size(); ++i) {
    ProfileCurves::Block block;
    block.layer = first.stats.blocks[i].layer;
    block.kind = first.stats.blocks[i].block;
    for (size_t r = 0; r < runs.size(); ++r) {
      block.runs.push_back(CurvesOfRun(runs[r], i, fluctuates[r]));
    }
    for (size_t c = 0; c < checkpoints && runs.size() > 1; ++c) {
      std::vector<std::vector<double>> loads;
      for (const ProfileRun& run : runs) loads.push_back(LoadVector(run.profiles[c], i));
      block.consistency.push_back(InterRunConsistency(loads));
    }
    out.blocks.push_back(std::move(block));
  }
  return out;
}

OrderedJson CurvesJson(const ProfileCurves& curves) {
  using Block = ProfileCurves::Block;
  const size_t checkpoints = curves.names.front().size();
  const auto mean = [&](const auto& f) { return MeanOver(curves, f); };
  const bool several = curves.names.size() > 1;
  OrderedJson out;
  out["checkpoints"] = checkpoints;
  out["inter_run_consistency"] =
      several ? ListOf(checkpoints,
                       [&](size_t c) {
                         return CurveValue(mean([&](const Block& b) { return b.consistency[c]; }));
                       })
              : OrderedJson(nullptr);
  out["runs"] = ListOf(curves.names.size(), [&](size_t r) {
    OrderedJson run = {{"profiles", curves.names[r]}};
    run.update(RunCurvesJson(curves, r, mean));
    return run;
  });
  if (!curves.no_fluctuation.empty()) {
    out["routing_fluctuation_reason"] = curves.no_fluctuation;
  }
  out["layers"] = OrderedJson::array();
  for (const Block& block : curves.blocks) {
    const auto one = [&](const auto& f) { return f(block); };
    OrderedJson layer = {{"layer", block.layer}, {"block", Name(block.kind)}};
    layer["inter_run_consistency"] =
        several ? ListOf(checkpoints, [&](size_t c) { return CurveValue(block.consistency[c]); })
                : OrderedJson(nullptr);
    layer["runs"] =
        ListOf(curves.names.size(), [&](size_t r) { return RunCurvesJson(curves, r, one); });
    out["layers"].push_back(std::move(layer));
  }
  return out;
}

std::string CurvesTable(const ProfileCurves& curves) {
  using Block = ProfileCurves::Block;
  const size_t checkpoints = curves.names.front().size();
  std::string out =
      "means over blocks; RF: routing fluctuation since the checkpoint before; RC: representation "
      "collapse\n";
  char line[512];
  for (size_t r = 0; r < curves.names.size(); ++r) {
    const double together = MeanOver(curves, [&](const Block& b) { return b.runs[r].consistency; });
    out += Concat("\nrun ", r + 1, ", consistency of its checkpoints ", CurveText(together), '\n');
    std::snprintf(line, sizeof(line), "%8s  %8s  %8s  %s\n", "RF top-1", "RF sets", "RC",
                  "profile");
    out += line;
    for (size_t c = 0; c < checkpoints; ++c) {
      const auto fluctuation = [&](double Fluctuation::*field) {
        return MeanOver(curves, [&](const Block& b) {
          const auto& list = b.runs[r].fluctuation;
          return c > 0 && c <= list.size() ? list[c - 1].*field : kUndefined;
        });
      };
      std::snprintf(line, sizeof(line), "%8s  %8s  %8s  ",
                    CurveText(fluctuation(&Fluctuation::top1)).c_str(),
                    CurveText(fluctuation(&Fluctuation::sets)).c_str(),
                    CurveText(MeanOver(curves, [&](const Block& b) {
                      return b.runs[r].collapse[c];
                    })).c_str());
      out += line + Printable(curves.names[r][c], 256) + '\n';
    }
  }
  if (curves.names.size() > 1) {
    out += "\ninter-run consistency at each checkpoint:";
    for (size_t c = 0; c < checkpoints; ++c) {
      out += ' ' + CurveText(MeanOver(curves, [&](const Block& b) { return b.consistency[c]; }));
    }
    out += '\n';
  }
  if (!curves.no_fluctuation.empty()) {
    out += Concat("no routing fluctuation: ", curves.no_fluctuation, '\n');
  }
  return out;
}

}  // namespace moeserve::server
