// Rotary position embedding.

#include <cmath>

#include "base/check.h"
#include "kernels/cpu/attention.h"

namespace moeserve::cpu {

const float* AttentionOps::RopeAngles(const RopeSettings& settings) {
  const int pairs = settings.dimensions / 2;
  RopeTable* table = nullptr;
  for (RopeTable& t : rope_tables_) {
    if (SameAngles(t.settings, settings)) table = &t;
  }
  if (table == nullptr) {
    table = &rope_tables_.emplace_back();
    table->settings = settings;
    table->frequencies = RopeFrequencies(settings);
    if (settings.has_long()) table->long_frequencies = RopeFrequencies(settings, true);
    table->xpos_rates = XposRates(settings);
  }
  if (table->laid_out) return table->angles.data();
  table->laid_out = true;
  const auto tokens = static_cast<int64_t>(step_.position.size());
  table->angles.resize(static_cast<size_t>(tokens * 2 * pairs));
  const bool has_long = settings.has_long() && !step_.long_sequence.empty();
  workers_.ForEachRow(tokens, pairs * 80, [&](int64_t t) {
    const bool is_long = has_long && step_.long_sequence[t] != 0;
    const std::vector<double>& frequencies = is_long ? table->long_frequencies : table->frequencies;
    const double magnitude = is_long ? settings.scaling->long_magnitude : settings.magnitude();
    float* cosine = table->angles.data() + t * 2 * pairs;
    for (int i = 0; i < pairs; ++i) {
      const double angle = step_.position[t] * frequencies[i];
      double factor = magnitude;
      if (!table->xpos_rates.empty()) factor *= std::exp(step_.position[t] * table->xpos_rates[i]);
      cosine[i] = static_cast<float>(std::cos(angle) * factor);
      cosine[pairs + i] = static_cast<float>(std::sin(angle) * factor);
    }
  });
  return table->angles.data();
}

void AttentionOps::Rope(const RopeArgs& args) {
  const RopeSettings& s = args.settings;
  const int pairs = s.dimensions / 2;
  const int distance = s.pair_distance();
  const int64_t heads = args.rows.cols / s.head_dim;
  MOESERVE_CHECK(heads * s.head_dim == args.rows.cols, "rope rows hold whole heads");
  const float* angles = RopeAngles(s);
  workers_.ForEachRow(args.rows.rows, args.rows.cols * 4, [&](int64_t r) {
    const int64_t token =
        args.plan == nullptr ? args.first_token + r : args.plan->row_of_assignment[r];
    const float* __restrict cosine = angles + token * 2 * pairs;
    const float* __restrict sine = cosine + pairs;
    float* row = reinterpret_cast<float*>(args.rows.row(r)) + s.first;
    for (int64_t h = 0; h < heads; ++h, row += s.head_dim) {
      // There are two loops because the compiler vectorises constant strides only.
      if (s.interleaved) {
        for (int i = 0; i < pairs; ++i) {
          const float a = row[2 * i], b = row[2 * i + 1];
          row[2 * i] = a * cosine[i] - b * sine[i];
          row[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
        continue;
      }
      float* __restrict first = row;
      float* __restrict second = row + distance;
      for (int i = 0; i < pairs; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * cosine[i] - b * sine[i];
        second[i] = b * cosine[i] + a * sine[i];
      }
    }
  });
}

void AttentionOps::ScaleByPosition(const PositionScaleArgs& args) {
  workers_.ForEachRow(args.rows.rows, args.rows.cols, [&](int64_t r) {
    const auto factor = static_cast<float>(args.scale.Of(step_.position[args.first_token + r]));
    float* const row = reinterpret_cast<float*>(args.rows.row(r));
    for (int64_t i = 0; i < args.rows.cols; ++i) row[i] *= factor;
  });
}

}  // namespace moeserve::cpu
