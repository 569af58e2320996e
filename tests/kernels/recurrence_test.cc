// Recurrences compared with double arithmetic, and their states: however a text is split into
// steps, whatever rows of others are between, and however its state was made, its rows have the
// same bits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kPendingTokens = 5;

// Where the columns of a row of the inputs begin.
struct RowLayout {
  explicit RowLayout(const RecurrentShape& s)
      : key(s.key_width()),
        value(2 * s.key_width()),
        decay(value + s.value_width()),
        strength(decay + s.decay_width()),
        width(strength + s.heads) {}
  int64_t key, value, decay, strength, width;
};

// One recurrence with the inputs of a text.
struct RecurrenceCase {
  RecurrentShape shape;
  RecurrenceSettings settings;
  bool skips = false;
  int rows = 0;
  std::vector<float> text;  // [rows, RowLayout::width]
  std::vector<float> rate, bias, skip;
};

RecurrenceCase MakeCase(int rows, const RecurrentShape& shape, const RecurrenceSettings& settings,
                        bool skips) {
  Random random(static_cast<uint64_t>(rows * 1000 + shape.key_dim * 7 + shape.heads));
  RecurrenceCase c{.shape = shape,
                   .settings = settings,
                   .skips = skips,
                   .rows = rows,
                   .text = random.Normals(rows * RowLayout(shape).width),
                   .rate = random.Normals(shape.heads),
                   .bias = random.Normals(shape.decay_width()),
                   .skip = random.Normals(shape.heads)};
  for (float& rate : c.rate) rate = std::exp(rate);
  return c;
}

double Softplus(double x) { return std::log1p(std::exp(x)); }
double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// The recurrence in double arithmetic, [rows, value_width()].
std::vector<double> Expected(const RecurrenceCase& c) {
  const RecurrentShape& s = c.shape;
  const RowLayout at(s);
  std::vector<double> state(static_cast<size_t>(s.heads * s.key_dim * s.value_dim)), out;
  for (int t = 0; t < c.rows; ++t) {
    const float* const row = &c.text[static_cast<size_t>(t * at.width)];
    for (int h = 0; h < s.heads; ++h) {
      const int key_head = h / (s.heads / s.key_heads);
      std::vector<double> q(row + key_head * s.key_dim, row + (key_head + 1) * s.key_dim);
      std::vector<double> k(row + at.key + key_head * s.key_dim,
                            row + at.key + (key_head + 1) * s.key_dim);
      const auto unit = [](std::vector<double>& x, double factor) {
        double square = 1e-6;
        for (const double v : x) square += v * v;
        for (double& v : x) v *= factor / std::sqrt(square);
      };
      if (s.delta) {
        unit(q, 1.0 / std::sqrt(s.key_dim));
        unit(k, 1.0);
      }
      const auto input = [&](int i) {
        const auto n = static_cast<size_t>(s.decays_keys ? h * s.key_dim + i : h);
        return double{row[at.decay + static_cast<int64_t>(n)]} + c.bias[n];
      };
      const double rate = c.rate[static_cast<size_t>(h)];
      const double step =
          std::clamp<double>(Softplus(input(0)), c.settings.step_low, c.settings.step_high);
      const double strength = s.delta ? Sigmoid(row[at.strength + h]) : step;
      const auto decay = [&](int i) {
        if (c.settings.form == DecayForm::kBounded) {
          return std::exp(c.settings.bound * Sigmoid(rate * input(i)));
        }
        return std::exp(-rate * (s.delta ? Softplus(input(i)) : step));
      };
      for (int j = 0; j < s.value_dim; ++j) {
        const double v = row[at.value + h * s.value_dim + j];
        double* const column = &state[static_cast<size_t>(h * s.key_dim * s.value_dim + j)];
        double known = 0.0, read = 0.0;
        for (int i = 0; i < s.key_dim; ++i) {
          double& element = column[i * s.value_dim];
          element *= decay(i);
          known += element * k[static_cast<size_t>(i)];
        }
        const double written = strength * (s.delta ? v - known : v);
        for (int i = 0; i < s.key_dim; ++i) {
          double& element = column[i * s.value_dim];
          element += k[static_cast<size_t>(i)] * written;
          read += element * q[static_cast<size_t>(i)];
        }
        out.push_back(read + (c.skips ? c.skip[static_cast<size_t>(h)] * v : 0.0));
      }
    }
  }
  return out;
}

// A part of a step: rows [begin, end) of the text, with the state in `slot`. The last `drafted` of
// them are pending; a snapshot is taken after row `snapshot_after` of the part, if it is not -1.
struct RecurrentPart {
  int32_t slot = 0;
  int begin = 0;
  int end = 0;
  int drafted = 0;
  int snapshot_after = -1;
  int32_t snapshot = -1;
};

class RecurrenceTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }

  // Block 0 has another shape, so that the block does not begin at the start of the memory.
  void Make(RecurrenceCase c) {
    case_ = std::move(c);
    rate_ = std::move(backend_->Upload(case_.rate)).value();
    bias_ = std::move(backend_->Upload(case_.bias)).value();
    skip_ = std::move(backend_->Upload(case_.skip)).value();
    const StateShape other{.rows = 2, .cols = 3, .recurrence = {.heads = 1, .key_dim = 2}};
    states_ =
        std::move(backend_->NewStates({other, {.rows = 1, .cols = 5, .recurrence = case_.shape}}, 6,
                                      kPendingTokens))
            .value();
  }

  // Runs one step and returns its output rows.
  std::vector<float> Step(const std::vector<RecurrentPart>& parts) {
    const RowLayout at(case_.shape);
    std::vector<float> input;
    std::vector<int32_t> ids, position, sequence, slots, keep, snapshot, pending;
    for (size_t s = 0; s < parts.size(); ++s) {
      const RecurrentPart& part = parts[s];
      slots.push_back(part.slot);
      input.insert(input.end(), case_.text.begin() + part.begin * at.width,
                   case_.text.begin() + part.end * at.width);
      for (int i = part.begin; i < part.end; ++i) {
        const int behind = i - (part.end - part.drafted);
        ids.push_back(0);
        position.push_back(i);
        sequence.push_back(static_cast<int32_t>(s));
        keep.push_back(behind == -1 ? part.slot : -1);
        pending.push_back(behind >= 0 ? behind : -1);
        snapshot.push_back(i - part.begin == part.snapshot_after ? part.snapshot : -1);
      }
    }
    const std::vector<std::span<const int32_t>> tables(parts.size());
    backend_->BeginStep({.token_ids = ids,
                         .position = position,
                         .sequence = sequence,
                         .page_tables = tables,
                         .state_storage = states_.get(),
                         .states = {slots, keep, snapshot, pending}},
                        nullptr, false);
    const DeviceRows in = MakeRows(*backend_, input, static_cast<int>(at.width));
    const RecurrentShape& s = case_.shape;
    const RowsView values = in.view.Columns(at.value, s.value_width());
    backend_->RunStep([&] {
      backend_->Recurrence(
          {.states = states_.get(),
           .block = 1,
           .settings = case_.settings,
           .rate = static_cast<const float*>(rate_->data()),
           .bias = static_cast<const float*>(bias_->data()),
           .skip = case_.skips ? static_cast<const float*>(skip_->data()) : nullptr,
           .queries = in.view.Columns(0, s.key_width()),
           .keys = in.view.Columns(at.key, s.key_width()),
           .values = values,
           .decays = in.view.Columns(at.decay, s.decay_width()),
           .strengths = in.view.Columns(at.strength, s.heads),
           .output = values});
    });
    const std::vector<float> rows = HostRows(*backend_, values);
    backend_->FinishStep();
    return rows;
  }

  // Returns the rows of the text from `begin` on, in steps of at most `chunk` rows; the state is in
  // `slot`.
  std::vector<float> Rest(int begin, int end, int chunk, int32_t slot) {
    std::vector<float> rows;
    for (int at = begin; at < end; at += chunk) {
      const std::vector<float> part =
          Step({{.slot = slot, .begin = at, .end = std::min(end, at + chunk)}});
      rows.insert(rows.end(), part.begin(), part.end());
    }
    return rows;
  }
  std::vector<float> Whole() {
    states_->Clear(0);
    return Rest(0, case_.rows, case_.rows, 0);
  }
  std::vector<float> Part(const std::vector<float>& rows, int begin, int end) const {
    const int64_t width = case_.shape.value_width();
    return {rows.begin() + begin * width, rows.begin() + end * width};
  }

  RecurrenceCase case_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StateStorage> states_;
  std::unique_ptr<DeviceBuffer> rate_, bias_, skip_;
};

constexpr RecurrentShape Shape(int heads, int key_heads, int key_dim, int value_dim,
                               bool decays_keys, bool delta) {
  return {.heads = heads,
          .key_heads = key_heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .decays_keys = decays_keys,
          .delta = delta};
}

// The mixers of the families, small and with odd sizes: decays of heads and of channels, bounded
// decays, state-space layers.
std::vector<RecurrenceCase> Cases(int rows) {
  const RecurrenceSettings delta{.delta = true};
  const RecurrenceSettings bounded{.delta = true, .form = DecayForm::kBounded, .bound = -3.0f};
  const RecurrenceSettings steps{.step_low = 0.2f, .step_high = 1.0f};
  return {MakeCase(rows, Shape(4, 2, 12, 20, false, true), delta, false),
          MakeCase(rows, Shape(2, 2, 33, 7, true, true), delta, false),
          MakeCase(rows, Shape(2, 1, 16, 64, true, true), bounded, false),
          MakeCase(rows, Shape(3, 1, 9, 40, false, false), {}, true),
          MakeCase(rows, Shape(4, 2, 20, 16, false, false), steps, true)};
}

TEST_P(RecurrenceTest, MatchesDoubleArithmetic) {
  std::vector<RecurrenceCase> cases = Cases(21);
  // The sizes of released models.
  const RecurrenceSettings delta{.delta = true};
  cases.push_back(MakeCase(9, Shape(2, 1, 128, 128, false, true), delta, false));
  cases.push_back(MakeCase(9, Shape(1, 1, 256, 64, false, false), {}, true));
  for (RecurrenceCase& c : cases) {
    Make(c);
    SCOPED_TRACE(::testing::Message() << c.shape.heads << " heads, keys of " << c.shape.key_dim);
    const std::vector<double> expected = Expected(c);
    const std::vector<float> rows = Whole();
    const auto width = static_cast<size_t>(c.shape.value_width());
    for (int t = 0; t < c.rows; ++t) {
      const auto begin = static_cast<size_t>(t) * width;
      ASSERT_TRUE(RowNear({rows.begin() + static_cast<int64_t>(begin),
                           rows.begin() + static_cast<int64_t>(begin + width)},
                          {expected.begin() + static_cast<int64_t>(begin),
                           expected.begin() + static_cast<int64_t>(begin + width)},
                          4e-6))
          << "row " << t;
    }
  }
}

TEST_P(RecurrenceTest, ChunksAndCompanyChangeNoBit) {
  constexpr int kRows = 23;
  for (RecurrenceCase& c : Cases(kRows)) {
    Make(std::move(c));
    const std::vector<float> whole = Whole();
    for (const int chunk : {1, 2, 3, 7, 16}) {
      states_->Clear(1);
      EXPECT_EQ(Rest(0, kRows, chunk, 1), whole) << chunk;
    }
    // Three sequences at different places of the text share steps.
    for (const int32_t slot : {1, 2, 3}) states_->Clear(slot);
    Rest(0, 5, 2, 2);
    Rest(0, 11, 3, 3);
    for (int t = 0; t + 12 <= kRows; ++t) {
      const int end = std::min(2 * t + 2, kRows);
      const std::vector<float> rows = Step({{.slot = 2, .begin = 5 + t, .end = 6 + t},
                                            {.slot = 1, .begin = 2 * t, .end = end},
                                            {.slot = 3, .begin = 11 + t, .end = 12 + t}});
      const int last = 1 + end - 2 * t;
      ASSERT_EQ(Part(rows, 0, 1), Part(whole, 5 + t, 6 + t));
      ASSERT_EQ(Part(rows, 1, last), Part(whole, 2 * t, end));
      ASSERT_EQ(Part(rows, last, last + 1), Part(whole, 11 + t, 12 + t));
    }
  }
}

TEST_P(RecurrenceTest, DraftedRowsAdvanceTheStateOnlyIfAccepted) {
  constexpr int kRows = 12;
  for (RecurrenceCase& c : Cases(kRows)) {
    Make(std::move(c));
    const std::vector<float> whole = Whole();
    for (int accepted = 0; accepted <= kPendingTokens; ++accepted) {
      for (const int known : {0, 1, 3}) {
        states_->Clear(4);
        Rest(0, 3, 3, 4);
        const int end = 3 + known + kPendingTokens;
        const std::vector<float> rows =
            Step({{.slot = 4, .begin = 3, .end = end, .drafted = kPendingTokens}});
        ASSERT_EQ(rows, Part(whole, 3, end));
        // What was accepted is also kept elsewhere.
        const int next = 3 + known + accepted;
        states_->Advance(4, accepted, 5);
        ASSERT_EQ(Rest(next, kRows, 3, 5), Part(whole, next, kRows)) << accepted;
        states_->Advance(4, accepted, 4);
        ASSERT_EQ(Rest(next, kRows, 2, 4), Part(whole, next, kRows)) << accepted;
      }
    }
  }
}

TEST_P(RecurrenceTest, SnapshotsAndCopiesContinueTheText) {
  constexpr int kRows = 20;
  for (RecurrenceCase& c : Cases(kRows)) {
    Make(std::move(c));
    const std::vector<float> whole = Whole();
    for (int after = 0; after < 9; ++after) {
      states_->Clear(1);
      states_->Clear(2);  // has no part in the step
      Step({{.slot = 1, .begin = 0, .end = 1}});
      Step({{.slot = 1, .begin = 1, .end = 10, .snapshot_after = after, .snapshot = 5}});
      states_->Advance(5, 0, 3);
      const int next = after + 2;
      ASSERT_EQ(Rest(next, kRows, 5, 3), Part(whole, next, kRows)) << after;
      ASSERT_EQ(Rest(next, kRows, 3, 5), Part(whole, next, kRows)) << after;
      ASSERT_EQ(Rest(10, kRows, 4, 1), Part(whole, 10, kRows)) << after;
      ASSERT_EQ(Rest(0, kRows, 6, 2), whole);
    }
  }
}

TEST_P(RecurrenceTest, ANumberThatIsNotFiniteStaysInItsSequence) {
  constexpr int kRows = 8;
  RecurrenceCase c = Cases(kRows).front();
  Make(c);
  const std::vector<float> whole = Whole();
  c.text[static_cast<size_t>(2 * RowLayout(c.shape).width)] = std::nanf("");
  Make(c);
  states_->Clear(1);
  states_->Clear(2);
  Step({{.slot = 1, .begin = 0, .end = 2}});
  const std::vector<float> rows =
      Step({{.slot = 2, .begin = 0, .end = 2}, {.slot = 1, .begin = 2, .end = 3}});
  EXPECT_EQ(Part(rows, 0, 2), Part(whole, 0, 2));
  EXPECT_TRUE(std::isnan(rows[static_cast<size_t>(2 * c.shape.value_width())]));
}

INSTANTIATE_TEST_SUITE_P(Backends, RecurrenceTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
