// Runs constraints from JSON lines, for the comparison with Python's jsonschema (schema_parity.py).
//
//   structured_cli MODEL_DIR
//
// Each line of stdin is an object: "schema" (or "regex", or "json_object": true), optionally
// "strict", "instances" (texts that are fed token by token; each token is checked against the
// mask), "walks" (number of completions to draw), "limit" (tokens per completion) and "seed". For
// each line, stdout gets one line: "error", or "accepted", "drawn" ("text", whether the limit can
// be kept and so "limited" it, whether it "ended"), "mask_us" and "mask_us_max" (mean and longest
// CPU time of a mask so far).
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/text/structured/compile_constraint.h"
#include "engine/text/structured/compiled.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "model_loaders/tokenizer/tokenizer_json.h"
#include "tests/support/random.h"

namespace {

using moeserve::TokenId;
using nlohmann::json;

// Returns the CPU time of this thread, which other programs on the machine do not affect.
double CpuMicroseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

class Runner {
 public:
  explicit Runner(const std::string& model_dir) {
    auto tokenizer = moeserve::LoadTokenizerJson(model_dir);
    Require(tokenizer.status());
    tokenizer_ = *std::move(tokenizer);
    const auto config = moeserve::LoadTokenizerConfig(model_dir);
    Require(config.status());
    const auto eos = tokenizer_->TokenToId(config->eos_token.value_or(""));
    MOESERVE_CHECK(eos.has_value(), "the model has an end-of-sequence token");
    eos_ = *eos;
    auto vocabulary =
        moeserve::VocabularyIndex::Build(*tokenizer_, {eos_}, tokenizer_->vocab_size());
    Require(vocabulary.status());
    vocabulary_ = *std::move(vocabulary);
  }

  // `line` is the text of `request`, from which the order of the schema's properties is read.
  json Answer(const json& request, const std::string& line) {
    using Kind = moeserve::ConstraintSpec::Kind;
    moeserve::ConstraintSpec spec;
    spec.strict = request.value("strict", false);
    if (request.contains("schema")) {
      spec.kind = Kind::kJsonSchema;
      spec.text = nlohmann::ordered_json::parse(line)["schema"].dump();
    } else if (request.contains("regex")) {
      spec.kind = Kind::kRegex;
      spec.text = request["regex"];
    }
    const auto compiled = moeserve::CompileConstraint(spec, vocabulary_);
    if (!compiled.ok()) return {{"error", std::string(compiled.status().message())}};
    json accepted = json::array();
    for (const std::string text : request.value("instances", json::array())) {
      accepted.push_back(Accepts(**compiled, text));
    }
    json drawn = json::array();
    moeserve::testing::Random random(request.value("seed", uint64_t{1}));
    for (int i = 0; i < request.value("walks", 0); ++i) {
      drawn.push_back(Draw(**compiled, request.value("limit", int64_t{512}), &random));
    }
    return {{"accepted", accepted},
            {"drawn", drawn},
            {"mask_us", masks_ == 0 ? 0.0 : mask_us_ / static_cast<double>(masks_)},
            {"mask_us_max", mask_us_max_}};
  }

 private:
  static void Require(const absl::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(1);
  }

  std::vector<uint32_t> Mask(moeserve::ConstraintState* state, int64_t left) {
    std::vector<uint32_t> mask(vocabulary_->mask_words());
    const double start = CpuMicroseconds();
    state->AllowedTokens(mask, left);
    const double us = CpuMicroseconds() - start;
    mask_us_ += us;
    mask_us_max_ = std::max(mask_us_max_, us);
    ++masks_;
    return mask;
  }

  bool Accepts(const moeserve::CompiledConstraint& compiled, const std::string& text) {
    const auto ids =
        tokenizer_->Encode(text, /*add_special_tokens=*/false, /*parse_special=*/false);
    Require(ids.status());
    const auto state = compiled.NewState();
    for (const TokenId id : *ids) {
      const std::vector<uint32_t> mask = Mask(state.get(), int64_t{1} << 40);
      const bool set = (mask[id / 32] >> (id % 32)) & 1;
      const bool accepted = state->Accept(id);
      MOESERVE_CHECK(set == accepted, "the mask and Accept agree");
      if (!accepted) return false;
    }
    const std::vector<uint32_t> mask = Mask(state.get(), int64_t{1} << 40);
    MOESERVE_CHECK(((mask[eos_ / 32] >> (eos_ % 32)) & 1) == (state->complete() ? 1u : 0u),
                   "the end is allowed where the text is complete");
    return state->complete();
  }

  // Draws uniformly random allowed tokens; EOS is drawn like any other token. If the limit can be
  // kept, the text must be complete at the limit. Otherwise the text must be a prefix of a valid
  // text, so more tokens are drawn to complete it.
  json Draw(const moeserve::CompiledConstraint& compiled, int64_t limit,
            moeserve::testing::Random* random) {
    constexpr int64_t kMore = 20000;
    const auto state = compiled.NewState();
    bool limited = ShortestAnswer(compiled) <= limit;
    json drawn = {{"text", ""}, {"limited", limited}, {"ended", false}};
    std::string text;
    for (int64_t left = limit; left > 0; --left) {
      const std::vector<uint32_t> mask = Mask(state.get(), left);
      std::vector<TokenId> allowed;
      for (TokenId id = 0; id < vocabulary_->vocab_size(); ++id) {
        if ((mask[id / 32] >> (id % 32)) & 1) allowed.push_back(id);
      }
      MOESERVE_CHECK(!allowed.empty(), "a mask is never empty");
      const TokenId id = allowed[random->Below(static_cast<int>(allowed.size()))];
      MOESERVE_CHECK(state->Accept(id), "an allowed token is accepted");
      if (id == eos_) break;
      text += tokenizer_->TokenBytes(id);
      if (left == 1 && !limited) {
        limited = true;
        left = kMore;
      }
    }
    drawn["text"] = text;
    drawn["ended"] = state->complete() && !state->can_continue();
    return drawn;
  }

  // Returns the length of the shortest completion in tokens of one byte.
  static int64_t ShortestAnswer(const moeserve::CompiledConstraint& constraint) {
    const auto& matcher = dynamic_cast<const moeserve::structured::Compiled&>(constraint).matcher();
    return matcher.Distance(matcher.Start(), moeserve::structured::StackPool());
  }

  std::unique_ptr<moeserve::Tokenizer> tokenizer_;
  std::shared_ptr<const moeserve::VocabularyIndex> vocabulary_;
  TokenId eos_ = 0;
  double mask_us_ = 0;
  double mask_us_max_ = 0;
  int64_t masks_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: structured_cli MODEL_DIR < requests\n");
    return 2;
  }
  Runner runner(argv[1]);
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << runner.Answer(json::parse(line), line)
                     .dump(-1, ' ', false, json::error_handler_t::replace)
              << "\n"
              << std::flush;
  }
  return 0;
}
