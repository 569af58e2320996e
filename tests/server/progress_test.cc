// Reports of how far long work is.

#include "server/commands/progress/progress.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "engine/spec/weights.h"
#include "server/commands/progress/load_progress.h"

namespace moeserve::server {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

ProgressState Loading(double done, double seconds) {
  return {.what = "loading",
          .unit = kByteUnit,
          .done = done * kGiB,
          .total = 4.0 * kGiB,
          .seconds = seconds};
}

TEST(ProgressTextTest, TellsAmountsRateAndTimeLeft) {
  EXPECT_EQ(ProgressText(Loading(1.0, 3.0)), "1.0 GiB of 4.0 GiB, 341.3 MiB/s, 9 s left");
  EXPECT_EQ(ProgressText(Loading(4.0, 2.0)), "4.0 GiB of 4.0 GiB, 2.0 GiB/s, 0 s left");
  // Before the first piece, nothing can be said about the time.
  EXPECT_EQ(ProgressText(Loading(0.0, 0.0)), "0 B of 4.0 GiB");
  // A tensor that is fetched twice must not give more than the whole.
  EXPECT_EQ(ProgressText(Loading(6.0, 2.0)), "4.0 GiB of 4.0 GiB, 2.0 GiB/s, 0 s left");
  const ProgressState tokens = {"scoring", kTokenUnit, 500.0, 1000.0, 250.0};
  EXPECT_EQ(ProgressText(tokens), "500 of 1000 tokens, 2 tokens/s, 4 min 10 s left");
  const ProgressState seconds = {"load", kSecondUnit, 10.0, 30.0, 10.0};
  EXPECT_EQ(ProgressText(seconds), "10 of 30 seconds, 20 s left");
}

TEST(ProgressTextTest, Durations) {
  EXPECT_EQ(DurationText(-1.0), "0 s");
  EXPECT_EQ(DurationText(0.2), "1 s");
  EXPECT_EQ(DurationText(59.5), "1 min 0 s");
  EXPECT_EQ(DurationText(3600.0 * 2 + 60.0 * 5), "2 h 5 min");
  EXPECT_EQ(DurationText(1e300), DurationText(1e9));
}

TEST(ProgressBarTest, FitsIntoEveryWidth) {
  EXPECT_EQ(ProgressBar(Loading(1.0, 3.0), 70, false),
            "loading  25 % [##--------]  1.0 GiB of 4.0 GiB, 341.3 MiB/s, 9 s left");
  EXPECT_EQ(ProgressBar(Loading(1.0, 3.0), 40, false), "loading  25 % [#####------------------]");
  EXPECT_EQ(ProgressBar(Loading(1.0, 3.0), 16, false), "loading  25 %");
  for (size_t columns = 0; columns < 200; ++columns) {
    const std::string bar = ProgressBar(Loading(1.0, 3.0), columns, false);
    EXPECT_TRUE(bar.empty() || bar.size() < columns) << columns << ": " << bar;
  }
  const std::string coloured = ProgressBar(Loading(1.0, 3.0), 70, true);
  EXPECT_EQ(coloured.size(), ProgressBar(Loading(1.0, 3.0), 70, false).size() + 9);
}

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

// What is written to a file that is no terminal.
class LinesTest : public ::testing::Test {
 protected:
  std::unique_ptr<Progress> Start(ProgressOutput output = ProgressOutput::kTerminal) {
    return std::make_unique<Progress>(
        "work", kTokenUnit, 100.0, output,
        Progress::Environment{.file = file_.get(), .now = [this] { return now_; }});
  }
  std::string Written() {
    std::fflush(file_.get());
    std::rewind(file_.get());
    std::string text;
    for (int c; (c = std::fgetc(file_.get())) != EOF;) text.push_back(static_cast<char>(c));
    return text;
  }

  File file_{std::tmpfile()};
  double now_ = 1000.0;
};

TEST_F(LinesTest, ShortWorkIsSilent) {
  const auto progress = Start();
  for (int i = 1; i <= 100; ++i) {
    now_ += 0.0099;
    progress->Set(i);
  }
  progress->Finish();
  EXPECT_EQ(Written(), "");
}

TEST_F(LinesTest, LongWorkHasALineEveryFiveSeconds) {
  const auto progress = Start();
  for (int i = 1; i <= 80; ++i) {
    now_ += 0.125;
    progress->Set(1.25 * i);
  }
  progress->Finish();
  const std::string text = Written();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
  EXPECT_NE(text.find("work: 10 of 100 tokens, 10 tokens/s, 9 s left\n"), std::string::npos);
  EXPECT_NE(text.find("work: 100 tokens in 10 s\n"), std::string::npos) << text;
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST_F(LinesTest, QuietIsSilent) {
  const auto progress = Start(ProgressOutput::kNone);
  now_ += 100.0;
  progress->Set(50.0);
  progress->Finish();
  EXPECT_EQ(Written(), "");
}

// What is written to a terminal.
class TerminalTest : public ::testing::Test {
 protected:
  TerminalTest() {
    setenv("TERM", "xterm", 1);
    unsetenv("NO_COLOR");
    winsize size{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
    int terminal = -1;
    EXPECT_EQ(openpty(&master_, &terminal, nullptr, nullptr, &size), 0);
    file_.reset(fdopen(terminal, "w"));
  }
  ~TerminalTest() override { close(master_); }

  std::string Run() {
    {
      Progress progress("work", kTokenUnit, 100.0, ProgressOutput::kTerminal,
                        {.file = file_.get(), .now = [this] { return now_; }});
      for (int i = 1; i <= 50; ++i) {
        now_ += 0.05;
        progress.Set(i);
      }
    }
    // A read returns what has arrived so far; after the other side is closed, one fails at the end.
    file_.reset();
    std::string text;
    char bytes[4096];
    for (ssize_t size; (size = read(master_, bytes, sizeof(bytes))) > 0;) {
      text.append(bytes, static_cast<size_t>(size));
    }
    return text;
  }

  int master_ = -1;
  File file_;
  double now_ = 1000.0;
};

TEST_F(TerminalTest, TheBarIsThrottledAndRemoved) {
  const std::string text = Run();
  // 2.5 s of work: half a second without a bar, then at most ten a second.
  const auto drawn = std::count(text.begin(), text.end(), '\r');
  EXPECT_GE(drawn, 15);
  EXPECT_LE(drawn, 22);
  EXPECT_TRUE(text.ends_with("\r\x1b[K")) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_NE(text.find("\x1b[36m"), std::string::npos);
}

TEST_F(TerminalTest, NoColorHasABarWithoutColours) {
  setenv("NO_COLOR", "1", 1);
  const std::string text = Run();
  EXPECT_NE(text.find("##"), std::string::npos);
  EXPECT_EQ(text.find("\x1b[36m"), std::string::npos);
  unsetenv("NO_COLOR");
}

TEST_F(TerminalTest, ADumbTerminalGetsLines) {
  setenv("TERM", "dumb", 1);
  const std::string text = Run();
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("work: "), std::string::npos);
  setenv("TERM", "xterm", 1);
}

// A source that counts calls.
class Source final : public WeightSource {
 public:
  Result<HostTensor> Get(std::string_view, const std::vector<int64_t>& shape) override {
    ++gets;
    return HostTensor{.data = nullptr, .dtype = DType::kF16, .shape = shape, .owner = nullptr};
  }
  Quantization StoredQuantization() const override { return Quantization::kInt4; }
  DType DominantDType() const override { return DType::kF16; }
  int gets = 0;
};

TEST(ReportedWeightsTest, PassesTensorsOn) {
  Source source;
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 4;
  ReportedWeights weights(source, spec, 1000, ProgressOutput::kTerminal);
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    const auto got = weights.Get(tensor.name, tensor.shape);
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(got->shape, tensor.shape);
    const auto integers = weights.GetQuantized(tensor.name, tensor.shape, Quantization::kInt4);
    ASSERT_TRUE(integers.ok());
    EXPECT_FALSE(integers->has_value());
  }
  EXPECT_GT(source.gets, 0);
  EXPECT_EQ(weights.StoredQuantization(), Quantization::kInt4);
  EXPECT_EQ(weights.DominantDType(), DType::kF16);
}

}  // namespace
}  // namespace moeserve::server
