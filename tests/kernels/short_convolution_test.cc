// Gated short convolutions compared with double arithmetic, and their states: however a text is
// split into steps, whatever rows of others are between, and however its state was made, its rows
// have the same bits.

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

constexpr int kPending = 4;

// A part of a step: rows [begin, end) of the text, with the state in `slot`. The last `drafted` of
// them are pending; a snapshot is taken after row `snapshot_after` of the part, if it is not -1.
struct TextPart {
  int32_t slot = 0;
  int begin = 0;
  int end = 0;
  int drafted = 0;
  int snapshot_after = -1;
  int32_t snapshot = -1;
};

class ShortConvolutionTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }

  // Draws a text of `rows` rows and the weights of a convolution. Block 0 has another shape, so
  // that the convolution's block does not begin at the start of the memory.
  void Make(int rows, int cols, int taps, bool bias, DType output) {
    Random random(static_cast<uint64_t>(rows * 1000 + cols * 10 + taps));
    cols_ = cols;
    taps_ = taps;
    output_ = output;
    text_ = random.Normals(static_cast<int64_t>(rows) * input_parts() * cols);
    weight_ = random.Normals(static_cast<int64_t>(taps) * cols);
    bias_ = bias ? random.Normals(cols) : std::vector<float>();
    device_weight_ = std::move(backend_->Upload(weight_)).value();
    device_bias_ = bias ? std::move(backend_->Upload(bias_)).value() : nullptr;
    states_ = std::move(backend_->NewStates({{1, 3}, {taps - 1, cols}}, 6, kPending)).value();
  }

  // Runs one step and returns its output rows.
  std::vector<float> Step(const std::vector<TextPart>& parts) {
    std::vector<float> input;
    std::vector<int32_t> ids, position, sequence, slots, keep, snapshot, pending;
    for (size_t s = 0; s < parts.size(); ++s) {
      const TextPart& part = parts[s];
      slots.push_back(part.slot);
      const auto begin = text_.begin() + int64_t{part.begin} * input_parts() * cols_;
      input.insert(input.end(), begin,
                   begin + int64_t{part.end - part.begin} * input_parts() * cols_);
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
    const DeviceRows in = MakeRows(*backend_, input, input_parts() * cols_);
    const DeviceRows out =
        MakeRows(*backend_, static_cast<int64_t>(ids.size()), cols_, cols_ + 8, output_, nullptr);
    backend_->RunStep([&] {
      backend_->ShortConvolution({.states = states_.get(),
                                  .block = 1,
                                  .gated = gated_,
                                  .taps = taps_,
                                  .weight = static_cast<const float*>(device_weight_->data()),
                                  .bias = device_bias_ == nullptr
                                              ? nullptr
                                              : static_cast<const float*>(device_bias_->data()),
                                  .input = in.view,
                                  .output = out.view});
    });
    const std::vector<float> rows = HostRows(*backend_, out.view);
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
  std::vector<float> Part(const std::vector<float>& rows, int begin, int end) const {
    return {rows.begin() + int64_t{begin} * cols_, rows.begin() + int64_t{end} * cols_};
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StateStorage> states_;
  std::unique_ptr<DeviceBuffer> device_weight_, device_bias_;
  std::vector<float> text_, weight_, bias_;
  // Columns of the input for each one of the output.
  int input_parts() const { return gated_ ? 3 : 1; }

  bool gated_ = true;
  int cols_ = 0;
  int taps_ = 0;
  DType output_ = DType::kF32;
};

TEST_P(ShortConvolutionTest, MatchesDoubleArithmetic) {
  constexpr int kRows = 9;
  for (const int cols : {1, 7, 64, 300}) {
    for (const int taps : {1, 2, 3, 4}) {
      for (const bool bias : {false, true}) {
        for (const DType output : {DType::kF32, DType::kBF16}) {
          SCOPED_TRACE(::testing::Message() << cols << " columns, " << taps << " taps");
          Make(kRows, cols, taps, bias, output);
          states_->Clear(2);
          const std::vector<float> rows = Rest(0, kRows, 4, 2);
          for (int t = 0; t < kRows; ++t) {
            std::vector<double> expected;
            for (int i = 0; i < cols; ++i) {
              double sum = bias ? bias_[static_cast<size_t>(i)] : 0.0;
              for (int j = std::max(0, taps - 1 - t); j < taps; ++j) {
                const float* const row = &text_[static_cast<size_t>((t - taps + 1 + j) * 3 * cols)];
                sum +=
                    double{weight_[static_cast<size_t>(j * cols + i)]} * row[i] * row[2 * cols + i];
              }
              expected.push_back(sum * text_[static_cast<size_t>(t * 3 * cols + cols + i)]);
            }
            const std::vector<float> row = Part(rows, t, t + 1);
            ASSERT_TRUE(
                RowNear({row.begin(), row.end()}, expected, output == DType::kF32 ? 1e-6 : 0x1p-8));
          }
        }
      }
    }
  }
}

TEST_P(ShortConvolutionTest, ChunksAndCompanyChangeNoBit) {
  constexpr int kRows = 23;
  for (const int taps : {1, 3, 4}) {
    Make(kRows, 40, taps, true, DType::kF32);
    states_->Clear(0);
    const std::vector<float> whole = Rest(0, kRows, kRows, 0);
    for (const int chunk : {1, 2, 3, 7, 16}) {
      states_->Clear(1);
      EXPECT_EQ(Rest(0, kRows, chunk, 1), whole) << chunk;
    }
    // Three sequences at different places of the text share steps.
    for (const int32_t slot : {1, 2, 3}) states_->Clear(slot);
    Rest(0, 5, 2, 2);
    Rest(0, 11, 3, 3);
    for (int t = 0; t + 12 <= kRows; ++t) {
      const std::vector<float> rows =
          Step({{.slot = 2, .begin = 5 + t, .end = 6 + t},
                {.slot = 1, .begin = 2 * t, .end = std::min(2 * t + 2, kRows)},
                {.slot = 3, .begin = 11 + t, .end = 12 + t}});
      const int last = static_cast<int>(std::ssize(rows)) / 40 - 1;
      ASSERT_EQ(Part(rows, 0, 1), Part(whole, 5 + t, 6 + t));
      if (2 * t < kRows) {
        ASSERT_EQ(Part(rows, 1, 2), Part(whole, 2 * t, 2 * t + 1));
      }
      ASSERT_EQ(Part(rows, last, last + 1), Part(whole, 11 + t, 12 + t));
    }
  }
}

TEST_P(ShortConvolutionTest, DraftedRowsAdvanceTheStateOnlyIfAccepted) {
  constexpr int kRows = 12;
  for (const int taps : {1, 2, 3, 4}) {
    Make(kRows, 33, taps, false, DType::kF32);
    states_->Clear(0);
    const std::vector<float> whole = Rest(0, kRows, kRows, 0);
    for (int accepted = 0; accepted <= kPending; ++accepted) {
      for (const int known : {1, 2, 4}) {
        states_->Clear(4);
        Rest(0, 3, 3, 4);
        const int end = 3 + known + kPending;
        const std::vector<float> rows =
            Step({{.slot = 4, .begin = 3, .end = end, .drafted = kPending}});
        ASSERT_EQ(rows, Part(whole, 3, end));
        states_->Advance(4, accepted, 4);
        const int next = 3 + known + accepted;
        ASSERT_EQ(Rest(next, kRows, 2, 4), Part(whole, next, kRows)) << accepted;
      }
    }
  }
}

TEST_P(ShortConvolutionTest, SnapshotsAndCopiesContinueTheText) {
  constexpr int kRows = 20;
  for (const int taps : {2, 3, 4}) {
    Make(kRows, 70, taps, true, DType::kBF16);
    states_->Clear(0);
    const std::vector<float> whole = Rest(0, kRows, kRows, 0);
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

TEST_P(ShortConvolutionTest, WithoutGatesTheRowsAreTheInput) {
  constexpr int kRows = 9;
  for (const int cols : {1, 7, 64, 300}) {
    for (const int taps : {1, 4}) {
      gated_ = false;
      Make(kRows, cols, taps, taps > 1, DType::kF32);
      states_->Clear(2);
      const std::vector<float> rows = Rest(0, kRows, 4, 2);
      for (int t = 0; t < kRows; ++t) {
        std::vector<double> expected;
        for (int i = 0; i < cols; ++i) {
          double sum = bias_.empty() ? 0.0 : bias_[static_cast<size_t>(i)];
          for (int j = std::max(0, taps - 1 - t); j < taps; ++j) {
            sum += double{weight_[static_cast<size_t>(j * cols + i)]} *
                   text_[static_cast<size_t>((t - taps + 1 + j) * cols + i)];
          }
          expected.push_back(sum / (1.0 + std::exp(-sum)));
        }
        const std::vector<float> row = Part(rows, t, t + 1);
        ASSERT_TRUE(RowNear({row.begin(), row.end()}, expected, 2e-5));  // sums cancel
      }
      states_->Clear(3);
      EXPECT_EQ(Rest(0, kRows, 1, 3), rows);
      states_->Clear(4);
      Rest(0, 3, 3, 4);
      Step({{.slot = 4, .begin = 3, .end = 7, .drafted = 3}});
      states_->Advance(4, 2, 4);
      EXPECT_EQ(Rest(6, kRows, 1, 4), Part(rows, 6, kRows));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ShortConvolutionTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
