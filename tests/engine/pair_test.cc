// Encoder-decoders: agreement with the PyTorch reference, and answers that depend neither on what
// else is computed nor on how much memory there is.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "absl/algorithm/container.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/write/convert_folder.h"
#include "model_loaders/write/quantize_folder.h"
#include "tests/support/beam_runs.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

// One pair of a source and the beginning of the decoder's text.
struct PairCase {
  std::vector<int32_t> source, prompt;
  std::vector<int32_t> top_ids;     // [T, top]
  std::vector<float> top_logprobs;  // [T, top]
  std::vector<int32_t> greedy;
  std::vector<float> margin;
  std::vector<int32_t> beam_tokens;  // [beams, tokens], padded with -1
  std::vector<float> beam_scores;    // [beams]
};

constexpr size_t kTop = 8;
constexpr int kBeams = 4;
constexpr int kBeamTokens = 10;

template <typename T>
std::vector<T> PairValues(const SafetensorsFile& file, const char* name) {
  const TensorEntry* const entry = file.Find(name);
  EXPECT_NE(entry, nullptr) << name;
  const std::string_view bytes = file.Bytes(*entry);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<PairCase> ReadPairs(const std::filesystem::path& path) {
  const auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  const auto part = [](const auto& values, int64_t begin, int64_t end) {
    return std::vector(values.begin() + begin, values.begin() + end);
  };
  const auto sources = PairValues<int32_t>(**file, "sources");
  const auto source_offsets = PairValues<int32_t>(**file, "source_offsets");
  const auto tokens = PairValues<int32_t>(**file, "tokens");
  const auto offsets = PairValues<int32_t>(**file, "offsets");
  const auto top_ids = PairValues<int32_t>(**file, "top_ids");
  const auto top_logprobs = PairValues<float>(**file, "top_logprobs");
  const auto greedy = PairValues<int32_t>(**file, "greedy");
  const auto margin = PairValues<float>(**file, "greedy_margin");
  const auto beam_tokens = PairValues<int32_t>(**file, "beam_tokens");
  const auto beam_scores = PairValues<float>(**file, "beam_scores");
  std::vector<PairCase> pairs(offsets.size() - 1);
  const auto count = std::ssize(greedy) / std::ssize(pairs);
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    pairs[i] = {part(sources, source_offsets[i], source_offsets[i + 1]),
                part(tokens, offsets[i], offsets[i + 1]),
                part(top_ids, offsets[i] * kTop, offsets[i + 1] * kTop),
                part(top_logprobs, offsets[i] * kTop, offsets[i + 1] * kTop),
                part(greedy, n * count, (n + 1) * count),
                part(margin, n * count, (n + 1) * count),
                part(beam_tokens, n * kBeams * kBeamTokens, (n + 1) * kBeams * kBeamTokens),
                part(beam_scores, n * kBeams, (n + 1) * kBeams)};
  }
  return pairs;
}

std::vector<GoldenModel> PairModels() {
  std::vector<GoldenModel> models;
  for (const auto& entry : std::filesystem::directory_iterator(SourcePath("tests/golden/pairs"))) {
    const std::filesystem::path golden = entry.path() / "golden.safetensors";
    if (std::filesystem::exists(golden)) {
      models.push_back({entry.path().filename().string(), entry.path(), golden});
    }
  }
  std::ranges::sort(models, {}, &GoldenModel::name);
  return models;
}

class PairTest : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override { pairs_ = ReadPairs(GetParam().golden); }

  // Returns a greedy request for pair i.
  Request RequestFor(size_t i) const {
    Request request;
    request.id = "pair-" + std::to_string(i);
    request.source = pairs_[i].source;
    request.prompt = pairs_[i].prompt;
    request.sampling.temperature = 0.0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = static_cast<int>(pairs_[i].greedy.size());
    request.sampling.logprobs = 0;
    return request;
  }

  // Returns what an engine with these options answers to each request alone.
  std::vector<AnswerBits> Alone(DType compute) const {
    auto engine = TestEngine::Start(GetParam().model, {.max_num_seqs = 8}, compute);
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return {};
    std::vector<AnswerBits> answers;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      answers.push_back(BitsOf(*(*engine)->Submit(RequestFor(i))));
    }
    return answers;
  }

  std::vector<PairCase> pairs_;
};

TEST_P(PairTest, Reference) {
  auto engine = TestEngine::Start(GetParam().model, {.max_num_seqs = 2});
  ASSERT_TRUE(engine.ok()) << engine.status();
  double worst = 0.0;
  int compared = 0;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    const PairCase& pair = pairs_[i];
    Request request = RequestFor(i);
    request.sampling.prompt_logprobs = kTop;
    request.sampling.logprobs = kTop;
    const auto sink = (*engine)->Submit(request);
    ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
    const auto note = [&](const TokenLogprob& found, size_t row) {
      ASSERT_EQ(found.top.size(), kTop);
      for (size_t k = 0; k < kTop; ++k) {
        const double error = std::abs(found.top[k].second - pair.top_logprobs[row * kTop + k]);
        if (!(error <= worst)) worst = error;
      }
    };
    for (size_t t = 1; t < pair.prompt.size(); ++t) note(*sink->prompt_logprobs()[t], t - 1);
    note(sink->logprobs().front(), pair.prompt.size() - 1);
    for (size_t t = 0; t < pair.greedy.size() && pair.margin[t] > 1e-4; ++t, ++compared) {
      ASSERT_EQ(sink->tokens()[t], pair.greedy[t]) << "pair " << i << ", step " << t;
    }
  }
  std::printf("%s f32: worst difference %.2e, %d greedy tokens\n", GetParam().name.c_str(), worst,
              compared);
  EXPECT_LE(worst, 1e-4);
  EXPECT_GE(compared, 20);
  (*engine)->ExpectIdle();
}

// Together, with small steps, and with so little memory that sequences are preempted and sources
// computed again.
TEST_P(PairTest, CompanyAndMemoryChangeNothing) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const std::vector<AnswerBits> alone = Alone(compute);
    ASSERT_EQ(alone.size(), pairs_.size());
    for (const int step_tokens : {8, 50, 512}) {
      for (const int64_t sequences : {3, 8}) {
        EngineOptions options{
            .max_model_len = 160, .max_num_seqs = 8, .max_step_tokens = step_tokens};
        auto probe = TestEngine::Start(GetParam().model, options, compute);
        ASSERT_TRUE(probe.ok()) << probe.status();
        options.kv_cache_bytes = (*probe)->get().Stats().kv_cache_bytes * sequences / 8;
        auto engine = TestEngine::Start(GetParam().model, options, compute);
        ASSERT_TRUE(engine.ok()) << engine.status();
        std::vector<std::shared_ptr<CollectingSink>> sinks;
        for (int round = 0; round < 3; ++round) {
          for (size_t i = 0; i < pairs_.size(); ++i) {
            Request request = RequestFor(i);
            request.id += "-" + std::to_string(round);
            sinks.push_back((*engine)->Submit(request));
          }
        }
        for (size_t i = 0; i < sinks.size(); ++i) {
          EXPECT_TRUE(BitsOf(*sinks[i]) == alone[i % pairs_.size()]) << i;
        }
        (*engine)->ExpectIdle();
      }
    }
  }
}

TEST_P(PairTest, SamplesShareTheSource) {
  auto engine = TestEngine::Start(GetParam().model, {.max_num_seqs = 8});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::vector<AnswerBits> alone = Alone(DType::kF32);
  ASSERT_EQ(alone.size(), pairs_.size());
  std::vector<Request> requests;
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  std::vector<std::shared_ptr<TokenSink>> as_sinks;
  for (int n = 0; n < 3; ++n) {
    requests.push_back(RequestFor(4));
    requests.back().id += "-" + std::to_string(n);
    sinks.push_back(std::make_shared<CollectingSink>());
    as_sinks.push_back(sinks.back());
  }
  ASSERT_TRUE((*engine)->get().Submit(std::move(requests), as_sinks).ok());
  for (const auto& sink : sinks) EXPECT_TRUE(BitsOf(*sink) == alone[4]);
  const ExpertRecorder* const encoder = (*engine)->get().encoder_experts();
  ASSERT_NE(encoder, nullptr);
  EXPECT_EQ(encoder->Snapshot().tokens, pairs_[4].source.size());  // computed once
  (*engine)->ExpectIdle();
}

// Beams of width 4, whose scores divide by the number of tokens. The engine computes all searches
// together, and once more with so little memory that they are preempted. Where padding has no
// position, a search that generated the padding token is not compared: the reference with a cache
// then gives the tokens behind it other positions than the reference without one.
TEST_P(PairTest, BeamsOfTheReference) {
  EngineOptions options{.max_model_len = 160, .max_num_seqs = 8};
  for (const bool small : {false, true}) {
    auto engine = TestEngine::Start(GetParam().model, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    if (small) {
      options.kv_cache_bytes = (*engine)->get().Stats().kv_cache_bytes * 3 / 8;
      engine = TestEngine::Start(GetParam().model, options);
      ASSERT_TRUE(engine.ok()) << engine.status();
    }
    const ModelSpec& spec = (*engine)->get().spec();
    const bool skips_padding = !spec.position.count_padding && spec.pad_token_id.has_value();
    int compared = 0;
    std::vector<SinkList> searches;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      Request request = RequestFor(i);
      request.sampling = SamplingParams();
      request.sampling.max_tokens = kBeamTokens;
      request.sampling.beam = BeamParams{.num_beams = kBeams};
      searches.push_back(SubmitBeams(**engine, request, kBeams));
    }
    for (size_t i = 0; i < pairs_.size(); ++i) {
      const auto found = HypothesesOf(searches[i]);
      const std::vector<float>& scores = pairs_[i].beam_scores;
      ASSERT_EQ(found.size(), static_cast<size_t>(kBeams));
      const std::vector<TokenId>& generated = pairs_[i].beam_tokens;
      if (skips_padding && absl::c_linear_search(generated, *spec.pad_token_id)) continue;
      ++compared;
      for (size_t b = 0; b < found.size(); ++b) {
        EXPECT_NEAR(found[b].score, scores[b], 1e-4) << "pair " << i << ", hypothesis " << b;
        const bool tie = (b > 0 && scores[b - 1] - scores[b] < 1e-4) ||
                         (b + 1 < found.size() && scores[b] - scores[b + 1] < 1e-4);
        if (tie) continue;
        const auto row = pairs_[i].beam_tokens.begin() + static_cast<int64_t>(b) * kBeamTokens;
        const std::vector<TokenId> expected(row, std::find(row, row + kBeamTokens, -1));
        EXPECT_EQ(found[b].tokens, expected) << "pair " << i << ", hypothesis " << b;
      }
    }
    EXPECT_GT(compared, 2);
    (*engine)->ExpectIdle();
  }
}

TEST_P(PairTest, RefusesWhatIsNoPair) {
  auto engine = TestEngine::Start(GetParam().model, {.max_num_seqs = 2});
  ASSERT_TRUE(engine.ok()) << engine.status();
  Request request = RequestFor(0);
  request.source.clear();
  EXPECT_TRUE(absl::IsInvalidArgument((*engine)->Submit(request)->Wait()));
  request = RequestFor(0);
  request.source.assign(static_cast<size_t>((*engine)->get().max_model_len()) + 1, 5);
  EXPECT_TRUE(absl::IsInvalidArgument((*engine)->Submit(request)->Wait()));
  request = RequestFor(0);
  request.source = {-1};
  EXPECT_TRUE(absl::IsInvalidArgument((*engine)->Submit(request)->Wait()));
  (*engine)->ExpectIdle();
}

// A folder of integers has the answers of its source with the same type of weights. Tables of
// relative positions stay floating-point numbers.
TEST(QuantizedPair, AnswersAsItsSource) {
  for (const std::string name : {"tiny-pair-t5", "tiny-pair-moa", "umt5"}) {
    SCOPED_TRACE(name);
    TempFolder parent;
    std::filesystem::path source = SourcePath("tests/golden/pairs/" + name);
    if (name == "umt5") {
      const auto native = ConvertFolder(source, parent.path() / "native", {});
      ASSERT_TRUE(native.ok()) << native.status();
      source = parent.path() / "native";
    }
    const auto written = QuantizeFolder(source, parent.path() / "int8", Quantization::kInt8);
    ASSERT_TRUE(written.ok()) << written.status();
    std::vector<AnswerBits> answers;
    for (const auto& folder : {source, parent.path() / "int8"}) {
      auto engine = TestEngine::Start(folder, {.max_num_seqs = 2}, DType::kBF16, TestDevice(),
                                      Quantization::kInt8);
      ASSERT_TRUE(engine.ok()) << engine.status();
      Request request;
      request.id = "pair";
      request.source = {3, 14, 15, 92, 65};
      request.prompt = {0};
      request.sampling.temperature = 0.0;
      request.sampling.ignore_eos = true;
      request.sampling.max_tokens = 20;
      request.sampling.logprobs = 0;
      answers.push_back(BitsOf(*(*engine)->Submit(request)));
    }
    EXPECT_EQ(answers[0].tokens.size(), 20u);
    EXPECT_TRUE(answers[0] == answers[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PairTest, ::testing::ValuesIn(PairModels()), [](const auto& info) {
  std::string name = info.param.name;
  std::ranges::replace(name, '-', '_');
  return name;
});

}  // namespace
}  // namespace moeserve::testing
