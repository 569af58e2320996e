// Models with recurrent layers: whatever a text is computed in, its logits have the same bits. Each
// schedule computes some texts at the same time, in steps of random lengths with accepted and
// rejected drafts, preemptions, forks, and snapshots that the prefix cache finds.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/memory/memory_pool.h"
#include "engine/model/model.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/backends.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kTexts = 3;
constexpr int kTextTokens = 75;
constexpr int kMostDrafts = 8;
constexpr int kSharedTokens = 40;  // with which all texts begin

// A model with its memory, for one instruction set and number of threads.
class RecurrentRun {
 public:
  RecurrentRun(const std::filesystem::path& folder, const std::string& isa, int threads) {
    auto checkpoint = *LoadCheckpoint(folder, {.require_tokenizer = false});
    backend_ = *CreateBackend({.device = "cpu", .threads = threads, .cpu_isa = isa});
    model_ = *Model::Create(checkpoint.spec, {}, *checkpoint.weights, *backend_);
    cache_ = *backend_->NewKvCache(CacheShapes(checkpoint.spec), KvCacheType::kF32, {64});
    states_ = *backend_->NewStates(StateShapes(checkpoint.spec), 2 * kTexts + 6, kMostDrafts);
    routes_ = std::make_unique<RouteLog>(RouteLayout(checkpoint.spec), 64, false);
    pool_ = std::make_unique<StatePool>(*states_, 2 * kTexts);
    memory_ =
        std::make_unique<MemoryPool>(*cache_, *routes_, pool_.get(), true, std::vector<PageUse>(1),
                                     SnapshotUse{.interval = kPageTokens});
    Random random(7);
    for (int text = 0; text < kTexts; ++text) {
      std::vector<TokenId>& tokens = texts_.emplace_back();
      for (int i = 0; i < kTextTokens; ++i) {
        tokens.push_back(text > 0 && i < kSharedTokens ? texts_[0][static_cast<size_t>(i)]
                                                       : random.Below(model_->spec().vocab_size));
      }
      expected_.push_back(Whole(text));
    }
  }

  // Computes all texts by a random schedule. Returns the number of rows with other logits.
  int Differences(uint64_t seed) {
    Random random(seed);
    std::vector<SequenceMemory> sequences(kTexts);
    std::vector<bool> admitted(kTexts, false), done(kTexts, false);
    int differences = 0;
    while (std::ranges::find(done, false) != done.end()) {
      std::vector<Piece> pieces;
      for (int s = 0; s < kTexts; ++s) {
        const auto i = static_cast<size_t>(s);
        if (done[i] || random.Below(3) == 0) continue;
        if (!admitted[i]) {
          EXPECT_TRUE(memory_->Admit(sequences[i], texts_[i], "", kTextTokens - 1, false));
          admitted[i] = true;
        }
        pieces.push_back(Next(s, sequences[i], random));
      }
      if (!pieces.empty()) differences += Step(pieces, sequences, done);
      for (int s = 0; s < kTexts; ++s) {
        const auto i = static_cast<size_t>(s);
        if (!admitted[i]) continue;
        const int event = random.Below(10);
        if (event == 0 || done[i]) {  // a preemption, or the end
          memory_->Release(sequences[i]);
          admitted[i] = false;
        } else if (event == 1) {  // a copy goes on
          SequenceMemory copy = memory_->Fork(sequences[i]);
          memory_->Release(sequences[i]);
          sequences[i] = std::move(copy);
        }
      }
    }
    return differences;
  }

 private:
  // Rows of one text in a step; of the last `drafted` ones, `right` are those of the text.
  struct Piece {
    int text = 0;
    int begin = 0, end = 0;
    int drafted = 0, right = 0;
  };

  Piece Next(int text, const SequenceMemory& sequence, Random& random) const {
    Piece piece{.text = text, .begin = sequence.computed};
    const int left = kTextTokens - sequence.computed;
    const int most = random.Below(2) == 0 ? 3 : 30;
    const int known = 1 + random.Below(std::min(most, left));
    piece.drafted = std::min({random.Below(kMostDrafts + 1), left - known, kMostDrafts});
    piece.right = random.Below(piece.drafted + 1);
    piece.end = piece.begin + known + piece.drafted;
    return piece;
  }

  int Step(const std::vector<Piece>& pieces, std::vector<SequenceMemory>& sequences,
           std::vector<bool>& done) {
    const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
    Batch batch;
    for (const Piece& piece : pieces) {
      const auto text = static_cast<size_t>(piece.text);
      SequenceMemory& sequence = sequences[text];
      EXPECT_TRUE(memory_->Reserve(sequence, piece.end));
      memory_->AddStates(sequence, piece.end - piece.begin, piece.drafted, kSharedTokens,
                         batch.states);
    }
    for (size_t p = 0; p < pieces.size(); ++p) {
      const Piece& piece = pieces[p];
      const auto text = static_cast<size_t>(piece.text);
      batch.page_tables.emplace_back(sequences[text].pages());
      for (int i = piece.begin; i < piece.end; ++i) {
        const bool wrong = i >= piece.end - piece.drafted + piece.right;
        const TokenId token = texts_[text][static_cast<size_t>(i)];
        batch.logit_rows.push_back(batch.num_tokens());
        batch.tokens.push_back(wrong ? (token + 1) % static_cast<TokenId>(vocab) : token);
        batch.positions.push_back(i);
        batch.sequence.push_back(static_cast<int32_t>(p));
        batch.phase.push_back(Phase::kPrefill);
      }
    }
    std::vector<float> logits(batch.logit_rows.size() * vocab);
    model_->Forward(batch, *cache_, {}, {.logits = logits});
    int differences = 0;
    size_t row = 0;
    for (const Piece& piece : pieces) {
      const auto text = static_cast<size_t>(piece.text);
      const int certain = piece.end - piece.begin - piece.drafted + piece.right;
      for (int i = 0; i < certain; ++i) {
        const auto begin = logits.begin() + static_cast<int64_t>((row + i) * vocab);
        const auto expected =
            expected_[text].begin() + static_cast<int64_t>(piece.begin + i) * vocab;
        if (!std::equal(begin, begin + static_cast<int64_t>(vocab), expected)) ++differences;
      }
      row += static_cast<size_t>(piece.end - piece.begin);
      memory_->Advance(sequences[text], certain, texts_[text], "");
      done[text] = sequences[text].computed == kTextTokens;
    }
    return differences;
  }

  std::vector<float> Whole(int text) {
    const auto i = static_cast<size_t>(text);
    expected_.resize(i);
    const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
    SequenceMemory sequence;
    EXPECT_TRUE(memory_->Admit(sequence, texts_[i], std::to_string(text), 0, false));
    std::vector<float> logits(kTextTokens * vocab);
    Batch batch;
    EXPECT_TRUE(memory_->Reserve(sequence, kTextTokens));
    memory_->AddStates(sequence, kTextTokens, 0, kTextTokens, batch.states);
    batch.page_tables.emplace_back(sequence.pages());
    for (int t = 0; t < kTextTokens; ++t) {
      batch.logit_rows.push_back(t);
      batch.tokens.push_back(texts_[i][static_cast<size_t>(t)]);
      batch.positions.push_back(t);
      batch.sequence.push_back(0);
      batch.phase.push_back(Phase::kPrefill);
    }
    model_->Forward(batch, *cache_, {}, {.logits = logits});
    memory_->Advance(sequence, kTextTokens, texts_[i], std::to_string(text));
    memory_->Release(sequence);
    return logits;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvCacheStorage> cache_;
  std::unique_ptr<StateStorage> states_;
  std::unique_ptr<RouteLog> routes_;
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<MemoryPool> memory_;
  std::vector<std::vector<TokenId>> texts_;
  std::vector<std::vector<float>> expected_;  // [texts] logits of all rows
};

// Models with each kind of recurrent layer, and of layers beside them.
constexpr const char* kRecurrentModels[] = {
    "tiny-delta",          "tiny-state-space",
    "families/qwen3-next", "families/kimi-linear",
    "families/nemotron-h", "families/granitemoehybrid-mamba-groups-biases",
    "families/lfm2-moe",   "families/bailing-hybrid"};

TEST(RecurrentSchedulesTest, NoScheduleChangesABit) {
  constexpr int kSchedules = 21;  // for each model, instruction set and number of threads
  int schedules = 0;
  for (const char* const model : kRecurrentModels) {
    for (const std::string& isa : CpuInstructionSets()) {
      for (const int threads : {1, 4}) {
        RecurrentRun run(SourcePath("tests/golden") / model, isa, threads);
        for (int i = 0; i < kSchedules; ++i) {
          ASSERT_EQ(run.Differences(static_cast<uint64_t>(++schedules)), 0)
              << model << ", " << isa << ", " << threads << " threads, schedule " << schedules;
        }
      }
    }
  }
  EXPECT_GT(schedules, 300);
}

}  // namespace
}  // namespace moeserve::testing
