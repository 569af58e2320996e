#include "server/reports/profile_diff.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "base/error_text.h"
#include "engine/statistics/measures/load_balance.h"

namespace moeserve::server {
namespace {

OrderedJson NumberOrNull(double v) {
  return std::isfinite(v) ? OrderedJson(v) : OrderedJson(nullptr);
}

// Returns the mean of `value` over the blocks where it is finite.
template <typename F>
double MeanOf(const std::vector<BlockDiff>& blocks, const F& value) {
  double sum = 0.0;
  int count = 0;
  for (const BlockDiff& b : blocks) {
    const double v = value(b);
    if (!std::isfinite(v)) continue;
    sum += v;
    ++count;
  }
  return count > 0 ? sum / count : std::nan("");
}

double Top1(const BlockDiff& b) { return b.fluctuation ? b.fluctuation->top1 : std::nan(""); }
double Sets(const BlockDiff& b) { return b.fluctuation ? b.fluctuation->sets : std::nan(""); }
double Consistency(const BlockDiff& b) { return b.consistency; }

std::string Shown(double v) {
  if (!std::isfinite(v)) return "-";
  char text[32];
  std::snprintf(text, sizeof(text), "%.4f", v);
  return text;
}

}  // namespace

std::string ReasonAgainstFluctuation(const ExpertProfile& a, const ExpertProfile& b) {
  if (!a.routes || !b.routes) return "not both profiles hold the routes of every row";
  if (a.routes->tokens != b.routes->tokens) return "the profiles are of different token sequences";
  for (size_t i = 0; i < a.routes->blocks.size(); ++i) {
    if (a.routes->blocks[i].rows() != b.routes->blocks[i].rows()) {
      return "the models split tokens differently";
    }
  }
  return "";
}

Result<ProfileDiff> Diff(const ExpertProfile& a, const ExpertProfile& b) {
  MOESERVE_RETURN_IF_ERROR(CheckComparable(a, b));
  ProfileDiff out;
  out.a = a.model;
  out.b = b.model;
  out.no_fluctuation = ReasonAgainstFluctuation(a, b);
  for (size_t i = 0; i < a.stats.blocks.size(); ++i) {
    const BlockExpertStats& x = a.stats.blocks[i];
    const BlockExpertStats& y = b.stats.blocks[i];
    BlockDiff block;
    block.layer = x.layer;
    block.block = x.block;
    block.share_a = LoadShares(x);
    block.share_b = LoadShares(y);
    block.movers.resize(block.share_a.size());
    std::iota(block.movers.begin(), block.movers.end(), 0);
    const auto change = [&](int e) { return std::abs(block.share_b[e] - block.share_a[e]); };
    std::stable_sort(block.movers.begin(), block.movers.end(),
                     [&](int s, int t) { return change(s) > change(t); });
    const std::vector<double> load_a(x.selections.begin(), x.selections.end());
    const std::vector<double> load_b(y.selections.begin(), y.selections.end());
    block.correlation = Correlation(load_a, load_b);
    block.consistency = InterRunConsistency({load_a, load_b});
    if (out.no_fluctuation.empty()) {
      block.fluctuation = RoutingFluctuation(a.routes->blocks[i], b.routes->blocks[i]);
    }
    out.blocks.push_back(std::move(block));
  }
  return out;
}

OrderedJson DiffJson(const ProfileDiff& diff) {
  OrderedJson out;
  out["a"] = diff.a;
  out["b"] = diff.b;
  out["inter_run_consistency"] = NumberOrNull(MeanOf(diff.blocks, Consistency));
  if (diff.no_fluctuation.empty()) {
    out["routing_fluctuation"] = {{"top1", NumberOrNull(MeanOf(diff.blocks, Top1))},
                                  {"sets", NumberOrNull(MeanOf(diff.blocks, Sets))}};
  } else {
    out["routing_fluctuation"] = nullptr;
    out["routing_fluctuation_reason"] = diff.no_fluctuation;
  }
  out["layers"] = OrderedJson::array();
  for (const BlockDiff& b : diff.blocks) {
    OrderedJson layer;
    layer["layer"] = b.layer;
    layer["block"] = Name(b.block);
    layer["load_share_a"] = b.share_a;
    layer["load_share_b"] = b.share_b;
    layer["movers"] = b.movers;
    layer["correlation"] = NumberOrNull(b.correlation);
    layer["inter_run_consistency"] = NumberOrNull(b.consistency);
    layer["routing_fluctuation"] = b.fluctuation ? OrderedJson{{"rows", b.fluctuation->rows},
                                                               {"top1", b.fluctuation->top1},
                                                               {"sets", b.fluctuation->sets}}
                                                 : OrderedJson(nullptr);
    out["layers"].push_back(std::move(layer));
  }
  return out;
}

std::string DiffTable(const ProfileDiff& diff, int top) {
  std::string out = Concat("a: ", diff.a, "\nb: ", diff.b, '\n');
  char line[160];
  const auto add = [&](auto... arguments) {
    std::snprintf(line, sizeof(line), arguments...);
    out += line;
  };
  add("%5s  %-12s  %8s  %8s  %8s  %s\n", "layer", "block", "IC", "RF top-1", "RF sets",
      "load share of a -> of b, largest changes first");
  for (const BlockDiff& b : diff.blocks) {
    add("%5d  %-12s  %8s  %8s  %8s ", b.layer, Name(b.block), Shown(b.consistency).c_str(),
        Shown(Top1(b)).c_str(), Shown(Sets(b)).c_str());
    for (size_t i = 0; i < b.movers.size() && i < static_cast<size_t>(top); ++i) {
      const size_t e = static_cast<size_t>(b.movers[i]);
      add(" %zu:%.1f%%->%.1f%%", e, 100.0 * b.share_a[e], 100.0 * b.share_b[e]);
    }
    out += "\n";
  }
  add("mean   IC %s, RF top-1 %s, RF sets %s\n", Shown(MeanOf(diff.blocks, Consistency)).c_str(),
      Shown(MeanOf(diff.blocks, Top1)).c_str(), Shown(MeanOf(diff.blocks, Sets)).c_str());
  if (!diff.no_fluctuation.empty()) {
    out += Concat("no routing fluctuation: ", diff.no_fluctuation, '\n');
  }
  return out;
}

}  // namespace moeserve::server
