// Measures how much faster drafted tokens (engine/draft) make decoding.
//
//   speculation_bench [--pairs 10] [--tokens 256] [--dtype int8-channel] [--batches 1,4]
//                     [--synthetic small] [--folder MODEL]
//
// Two engines with the same model run in one process, one with drafts and one without. A pair of
// runs decodes once with each; the engine that runs first alternates. Prints the median over the
// pairs of the ratio of their tokens per second, its smallest and largest value; the median ratio
// of their times per output token (TPOT: from the first to the last token of a request, so without
// its prompt; above 1: drafts are faster); and with drafts, the mean numbers of tokens per sequence
// and step and of decoding rows per step. Cases of a synthetic model:
//
//   edit    the prompt is a text of random tokens. The answer repeats it with a change every 20
//           tokens or so (one to three tokens replaced, inserted or left out). A random model would
//           not do this by itself, so a constraint allows the next token of this answer only, and
//           forced tokens are switched off.
//   random  random prompts, answers drawn at temperature 1
//
// With --folder, a trained model with a tokenizer answers by a JSON schema, with drafts and forced
// tokens against neither.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/kinds.h"
#include "engine/text/structured/compile_constraint.h"
#include "engine/text/structured/vocabulary_index.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/bench/synthetic_model.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<TokenId>;

struct Settings {
  int pairs = 10;
  int tokens = 256;
  std::string dtype = "int8-channel";
  std::vector<int> batches = {1, 4};
  std::string synthetic = "small";
  std::string folder;
};

[[noreturn]] void Stop(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

// Allows one text.
class Script : public CompiledConstraint, public std::enable_shared_from_this<Script> {
 public:
  explicit Script(Tokens tokens) : tokens_(std::move(tokens)) {}
  std::unique_ptr<ConstraintState> NewState() const override {
    return std::make_unique<State>(shared_from_this());
  }
  size_t memory_bytes() const override { return tokens_.size() * sizeof(TokenId); }

 private:
  class State : public ConstraintState {
   public:
    explicit State(std::shared_ptr<const Script> script) : script_(std::move(script)) {}
    void AllowedTokens(std::span<uint32_t> mask, int64_t) override {
      std::fill(mask.begin(), mask.end(), 0);
      const auto token = static_cast<size_t>(script_->tokens_[next_]);
      mask[token / 32] |= uint32_t{1} << (token % 32);
    }
    bool Accept(TokenId token) override {
      if (complete() || script_->tokens_[next_] != token) return false;
      ++next_;
      return true;
    }
    int64_t work() const override { return 0; }
    bool overworked() const override { return false; }
    bool complete() const override { return next_ == script_->tokens_.size(); }
    bool can_continue() const override { return !complete(); }
    uint64_t StateHash() const override { return next_; }
    std::unique_ptr<ConstraintState> Clone() const override {
      return std::make_unique<State>(*this);
    }

   private:
    std::shared_ptr<const Script> script_;
    size_t next_ = 0;
  };
  const Tokens tokens_;
};

Tokens RandomTokens(Random& random, int count, int vocab) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(random.Below(vocab));
  return tokens;
}

// Returns `text` with changes, `count` tokens long.
Tokens Edited(const Tokens& text, size_t count, Random& random, int vocab) {
  Tokens out;
  size_t at = 0;
  while (out.size() < count) {
    const size_t same = static_cast<size_t>(10 + random.Below(20));
    for (size_t i = 0; i < same && at < text.size(); ++i) out.push_back(text[at++]);
    const int kind = random.Below(3), length = 1 + random.Below(3);
    if (kind != 0) at += static_cast<size_t>(length);
    if (kind != 1 || at >= text.size()) {
      for (const TokenId t : RandomTokens(random, length, vocab)) out.push_back(t);
    }
  }
  out.resize(count);
  return out;
}

struct Served {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Engine> engine;
};

struct Work {
  Tokens prompt;
  SamplingParams sampling;
};

// Also takes the times of the first and the last token.
class TimedSink : public CollectingSink {
 public:
  void OnDelta(OutputDelta delta) override {
    const auto now = Clock::now();
    if (tokens().empty()) first_ = now;
    last_ = now;
    CollectingSink::OnDelta(std::move(delta));
  }
  // Only after Wait().
  double SecondsPerToken() const {
    return std::chrono::duration<double>(last_ - first_).count() /
           std::max<double>(1.0, static_cast<double>(tokens().size()) - 1.0);
  }

 private:
  Clock::time_point first_, last_;
};

struct Run {
  double tokens_per_second = 0.0;
  double seconds_per_token = 0.0;  // TPOT, the mean of all requests
  double tokens_per_step = 0.0;    // of a sequence
  double rows_per_step = 0.0;      // decoding rows
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

Run Decode(Engine& engine, const std::vector<Work>& work) {
  std::vector<std::shared_ptr<TimedSink>> sinks;
  const EngineStats before = engine.Stats();
  const auto begin = Clock::now();
  for (size_t i = 0; i < work.size(); ++i) {
    Request r;
    r.id = std::to_string(i);
    r.prompt = work[i].prompt;
    r.sampling = work[i].sampling;
    sinks.push_back(std::make_shared<TimedSink>());
    if (const absl::Status s = engine.Submit(std::move(r), sinks.back()); !s.ok()) Stop(s);
  }
  double tokens = 0.0;
  for (const auto& sink : sinks) {
    if (!sink->Wait().ok()) Stop(sink->Wait());
    tokens += static_cast<double>(sink->tokens().size());
  }
  Run run;
  run.tokens_per_second = tokens / std::chrono::duration<double>(Clock::now() - begin).count();
  const auto sequences = static_cast<double>(work.size());
  for (const auto& sink : sinks) run.seconds_per_token += sink->SecondsPerToken() / sequences;
  const EngineStats after = engine.Stats();
  const auto steps = static_cast<double>(after.steps - before.steps);
  run.tokens_per_step = tokens / sequences / steps;
  // A token that was not an accepted draft took a row of its own.
  const auto accepted = static_cast<double>(after.accepted_tokens - before.accepted_tokens);
  const auto drafted = static_cast<double>(after.drafted_tokens - before.drafted_tokens);
  run.rows_per_step = (tokens - accepted + drafted) / steps;
  return run;
}

// Runs pairs with the work that `make(round)` returns, and prints the result.
template <typename Make>
void Compare(const char* name, int batch, int pairs, Served (&served)[2], const Make& make) {
  std::vector<double> ratios, decoding;
  double per_step = 0.0, rows = 0.0, speed[2] = {};
  for (int pair = -1; pair < pairs; ++pair) {  // the first pair is warm-up
    const std::vector<Work> work = make(pair + 1);
    Run runs[2];
    for (const int turn : {0, 1}) {
      const int on = (pair + turn) % 2 == 0 ? 1 : 0;
      runs[on] = Decode(*served[on].engine, work);
    }
    if (pair < 0) continue;
    ratios.push_back(runs[1].tokens_per_second / runs[0].tokens_per_second);
    decoding.push_back(runs[0].seconds_per_token / runs[1].seconds_per_token);
    per_step += runs[1].tokens_per_step / pairs;
    rows += runs[1].rows_per_step / pairs;
    for (const int on : {0, 1}) speed[on] += runs[on].tokens_per_second / pairs;
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%-8s %6d %10.0f %10.0f %8.3f %8.3f to %6.3f %8.3f %12.2f %10.2f\n", name, batch,
              speed[0], speed[1], Median(ratios), *least, *most, Median(decoding), per_step, rows);
  std::fflush(stdout);
}

ModelOptions TypesOf(const std::string& dtype) {
  ModelOptions types{.compute = DType::kBF16};
  if (dtype == "f32") types.compute = DType::kF32;
  if (dtype == "f32" || dtype == "bf16") return types;
  const auto quantization = KindNamed<Quantization>(dtype);
  if (!quantization.has_value()) Stop(absl::InvalidArgumentError("--dtype: unknown type"));
  types.quantization = *quantization;
  return types;
}

void Synthetic(const Settings& settings) {
  auto spec = SyntheticSpec(settings.synthetic);
  if (!spec.ok()) Stop(spec.status());
  const int vocab = spec->vocab_size;
  Served served[2];
  for (const int on : {0, 1}) {
    served[on].backend = *CreateBackend({.device = "cpu", .threads = 0});
    auto source = MakeSyntheticWeights(DType::kBF16);
    auto model = Model::Create(*spec, TypesOf(settings.dtype), *source, *served[on].backend);
    if (!model.ok()) Stop(model.status());
    EngineOptions options{.max_model_len = 2 * settings.tokens + 64, .max_num_seqs = 32};
    options.prefix_cache = false;
    options.forced_tokens = false;
    options.draft.max_tokens = on == 1 ? kDefaultDraftTokens : 0;
    auto engine = Engine::Create(options, *std::move(model), nullptr, {});
    if (!engine.ok()) Stop(engine.status());
    served[on].engine = *std::move(engine);
  }
  for (const int batch : settings.batches) {
    const auto make = [&](int round, bool edit) {
      Random random(static_cast<uint64_t>(1000 * round + batch));
      std::vector<Work> work(static_cast<size_t>(batch));
      for (Work& w : work) {
        w.prompt = RandomTokens(random, settings.tokens, vocab);
        w.sampling.max_tokens = settings.tokens;
        w.sampling.ignore_eos = true;
        w.sampling.seed = random.Below(1 << 30);
        if (!edit) continue;
        w.sampling.constraint = std::make_shared<Script>(
            Edited(w.prompt, static_cast<size_t>(settings.tokens) + 1, random, vocab));
      }
      return work;
    };
    Compare("edit", batch, settings.pairs, served, [&](int round) { return make(round, true); });
    Compare("random", batch, settings.pairs, served, [&](int round) { return make(round, false); });
  }
}

constexpr const char* kSchema = R"({"type": "object", "additionalProperties": false,
  "properties": {
    "name": {"type": "string", "maxLength": 20},
    "occupation": {"enum": ["shepherd", "fisherman", "carpenter", "physician"]},
    "age_in_years": {"type": "integer", "minimum": 1, "maximum": 120},
    "is_a_descendant_of_abraham": {"type": "boolean"},
    "number_of_children": {"type": "integer", "minimum": 0, "maximum": 20}},
  "required": ["name", "occupation", "age_in_years", "is_a_descendant_of_abraham",
               "number_of_children"]})";

void Json(const Settings& settings) {
  Served served[2];
  std::shared_ptr<const CompiledConstraint> constraint;
  std::shared_ptr<const Tokenizer> tokenizer;
  for (const int on : {0, 1}) {
    auto checkpoint = LoadCheckpoint(settings.folder, {});
    if (!checkpoint.ok()) Stop(checkpoint.status());
    served[on].backend = *CreateBackend({.device = "cpu", .threads = 0});
    auto model = Model::Create(checkpoint->spec, TypesOf(settings.dtype), *checkpoint->weights,
                               *served[on].backend);
    if (!model.ok()) Stop(model.status());
    EngineOptions options{.max_model_len = 1024, .max_num_seqs = 32};
    options.forced_tokens = on == 1;
    options.draft.max_tokens = on == 1 ? kDefaultDraftTokens : 0;
    tokenizer = checkpoint->tokenizer;
    if (constraint == nullptr) {
      auto vocabulary = VocabularyIndex::Build(*tokenizer, checkpoint->eos_token_ids,
                                               checkpoint->spec.vocab_size);
      if (!vocabulary.ok()) Stop(vocabulary.status());
      ConstraintSpec spec;
      spec.kind = ConstraintSpec::Kind::kJsonSchema;
      spec.text = kSchema;
      auto compiled = CompileConstraint(spec, *vocabulary);
      if (!compiled.ok()) Stop(compiled.status());
      constraint = *compiled;
    }
    auto engine = Engine::Create(options, *std::move(model), tokenizer, checkpoint->eos_token_ids);
    if (!engine.ok()) Stop(engine.status());
    served[on].engine = *std::move(engine);
  }
  for (const int batch : settings.batches) {
    Compare("json", batch, settings.pairs, served, [&](int round) {
      std::vector<Work> work(static_cast<size_t>(batch));
      for (Work& w : work) {
        w.prompt = *tokenizer->Encode(
            "And there was a man whose name was in the book, and this is what is written of him: ",
            true);
        w.sampling.max_tokens = 200;
        w.sampling.seed = round * 100 + (&w - work.data());
        w.sampling.temperature = 0.7;
        w.sampling.constraint = constraint;
      }
      return work;
    });
  }
}

}  // namespace
}  // namespace moeserve::testing

int main(int argc, char** argv) {
  moeserve::testing::Settings s;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--pairs") s.pairs = std::max(1, std::atoi(value.c_str()));
    if (flag == "--tokens") s.tokens = std::max(16, std::atoi(value.c_str()));
    if (flag == "--dtype") s.dtype = value;
    if (flag == "--synthetic") s.synthetic = value;
    if (flag == "--folder") s.folder = value;
    if (flag == "--batches") {
      s.batches.clear();
      for (size_t at = 0; at < value.size(); at = value.find(',', at) + 1) {
        s.batches.push_back(std::max(1, std::atoi(value.c_str() + at)));
        if (value.find(',', at) == std::string::npos) break;
      }
    }
  }
  std::printf("%-8s %6s %10s %10s %8s %18s %8s %12s %10s\n", "case", "batch", "without", "with",
              "ratio", "range", "TPOT", "tokens/step", "rows/step");
  if (s.folder.empty()) {
    moeserve::testing::Synthetic(s);
  } else {
    moeserve::testing::Json(s);
  }
  return 0;
}
