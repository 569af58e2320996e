#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/inspect.h"
#include "model_loaders/profiles/profile_file.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/report_options.h"
#include "server/commands/run_with_ranks.h"
#include "server/commands/score/profile_texts.h"
#include "server/reports/page/report_page.h"
#include "server/reports/statistics_report.h"
#include "server/reports/word_report.h"

namespace moeserve::server {
namespace {

struct ScoreArguments {
  ModelOptionsText model;
  ProfilingOptions profiling;
  ProfileReportOptions report;
  std::string profile_file;
  bool profile_hidden = false;
  bool profile_routes = true;
  std::string stack = "decoder";
  std::string mask_rule;  // a MaskRule
  std::string capacity;
  std::string page_file;
  bool json = false;
};

// The effect of --capacity: what was dropped, and the score without it.
struct CapacityEffect {
  std::string rule;
  Score without;
};

OrderedJson ScoreJson(const Score& score) {
  return {{"nll_per_token", score.nll_per_token()},
          {"perplexity", score.perplexity()},
          {"bits_per_byte", score.bits_per_byte()}};
}

OrderedJson MaskJson(const MaskOptions& mask) {
  OrderedJson out = {{"rule", KindName(mask.rule)}};
  if (mask.rule != MaskRule::kEach) out.update({{"share", mask.share}, {"seed", mask.seed}});
  return out;
}

// Returns the rule by which a masked language model's tokens were scored.
std::string MaskText(const MaskOptions& mask) {
  if (mask.rule == MaskRule::kEach) return "each token masked alone";
  char share[32];
  std::snprintf(share, sizeof(share), "%.4g", mask.share);
  return Concat(
      "share ", share, " of the tokens, seed ", mask.seed,
      mask.rule == MaskRule::kBert ? ": 80 % masked, 10 % random, 10 % kept" : ", all masked");
}

// Prints how well the texts were predicted.
void PrintPrediction(const MaskOptions& mask, const ProfiledTexts& result) {
  const Score& score = result.score;
  const auto tokens = static_cast<long long>(score.tokens);
  const auto scored = static_cast<long long>(score.scored);
  if (scored == 0) {
    std::printf("tokens %lld in windows of %d; the model gives tokens no probabilities\n", tokens,
                score.window);
  } else if (result.model.engine->spec().head.kind == HeadKind::kMaskedLm) {
    std::printf(
        "tokens %lld, scored %lld in windows of %d (%s), nll/token %.6f, pseudo-perplexity %.4f\n",
        tokens, scored, score.window, MaskText(mask).c_str(), score.nll_per_token(),
        score.perplexity());
  } else {
    std::printf(
        "tokens %lld, scored %lld in windows of %d, nll/token %.6f, perplexity %.4f, bits/byte "
        "%.4f\n",
        tokens, scored, score.window, score.nll_per_token(), score.perplexity(),
        score.bits_per_byte());
  }
}

double Share(uint64_t part, uint64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

DroppedRows Sum(const std::vector<DroppedRows>& blocks) {
  DroppedRows sum;
  for (const DroppedRows& b : blocks) {
    sum.choices += b.choices;
    sum.dropped += b.dropped;
    sum.rows += b.rows;
    sum.rows_without += b.rows_without;
  }
  return sum;
}

OrderedJson CapacityJson(const CapacityEffect& effect, const ProfiledTexts& result) {
  const DroppedRows sum = Sum(result.dropped);
  OrderedJson out = {{"rule", effect.rule},
                     {"without", ScoreJson(effect.without)},
                     {"dropped_share", Share(sum.dropped, sum.choices)},
                     {"rows_without_expert_share", Share(sum.rows_without, sum.rows)},
                     {"layers", OrderedJson::array()}};
  for (size_t i = 0; i < result.dropped.size(); ++i) {
    const DroppedRows& d = result.dropped[i];
    const BlockExpertStats& block = result.profile.stats.blocks[i];
    out["layers"].push_back({{"layer", block.layer},
                             {"block", Name(block.block)},
                             {"limit", {{"min", d.least_limit}, {"max", d.most_limit}}},
                             {"choices", d.choices},
                             {"dropped", d.dropped},
                             {"dropped_by_expert", d.by_expert},
                             {"rows", d.rows},
                             {"rows_without_expert", d.rows_without}});
  }
  return out;
}

void PrintCapacity(const CapacityEffect& effect, const ProfiledTexts& result) {
  const DroppedRows sum = Sum(result.dropped);
  std::printf(
      "capacity %s: %.2f %% of the choices dropped, %.2f %% of the rows left without an expert; "
      "without it perplexity %.4f (%+.4f)\n",
      effect.rule.c_str(), 100.0 * Share(sum.dropped, sum.choices),
      100.0 * Share(sum.rows_without, sum.rows), effect.without.perplexity(),
      result.score.perplexity() - effect.without.perplexity());
}

// Returns the tokenizer of the texts of the stack that is reported.
const Tokenizer& TokenizerOf(const ScoreArguments& options, const ProfiledTexts& result) {
  const Tokenizer& tokenizer = *result.model.engine->tokenizer();
  return options.profiling.of_encoder ? tokenizer.source() : tokenizer;
}

// Returns ProfileJson() with what a profile does not hold.
OrderedJson ExpertsJson(const ScoreArguments& options, const ProfiledTexts& result) {
  OrderedJson out = ProfileJson(result.profile, &TokenizerOf(options, result), options.report);
  for (size_t i = 0; i < result.initial_balance.size(); ++i) {
    const std::optional<InitialBalance>& balance = result.initial_balance[i];
    out["layers"][i]["router"]["initial_balance"] = balance
                                                        ? OrderedJson{{"tau_0", balance->initial},
                                                                      {"tau", balance->temperature},
                                                                      {"loss", balance->loss}}
                                                        : OrderedJson(nullptr);
  }
  return out;
}

void PrintInitialBalance(const ProfiledTexts& result) {
  for (size_t i = 0; i < result.initial_balance.size(); ++i) {
    const std::optional<InitialBalance>& balance = result.initial_balance[i];
    if (!balance) continue;
    const BlockExpertStats& block = result.profile.stats.blocks[i];
    std::printf("layer %d %s: balance %.4f with tau_0 %g (X-MoE, eq. 9), learned tau %.4f\n",
                block.layer, Name(block.block), balance->loss, balance->initial,
                balance->temperature);
  }
}

void PrintScore(const ScoreArguments& options, const ProfiledTexts& result,
                const std::optional<CapacityEffect>& capacity) {
  const Score& score = result.score;
  const Tokenizer* const tokenizer = &TokenizerOf(options, result);
  const RouteLayout layout(options.profiling.of_encoder ? *result.model.engine->spec().encoder
                                                        : result.model.engine->spec());
  if (options.json) {
    OrderedJson out;
    out["model"] = result.model.directory_name;
    out["tokens"] = score.tokens;
    out["scored_tokens"] = score.scored;
    out["window"] = score.window;
    const bool masked = result.model.engine->spec().head.kind == HeadKind::kMaskedLm;
    if (masked) out["mask"] = MaskJson(options.profiling.mask);
    out["nll_per_token"] = score.nll_per_token();
    out[masked ? "pseudo_perplexity" : "perplexity"] = score.perplexity();
    if (!masked) out["bits_per_byte"] = score.bits_per_byte();
    out["macs_per_token"] = MacsJson(result.macs);
    if (capacity) out["capacity"] = CapacityJson(*capacity, result);
    if (result.word_experts) {
      out["word_experts"] = WordsJson(result.words, *result.word_experts, layout);
    }
    out["experts"] = ExpertsJson(options, result);
    PrintJson(out);
    return;
  }
  PrintPrediction(options.profiling.mask, result);
  const MeasuredMacs& macs = result.macs;
  std::printf("MACs per token: %.0f with matrices, %s with keys and values\n", macs.matrices,
              macs.attention ? Concat(std::llround(*macs.attention)).c_str() : "unknown");
  if (capacity) PrintCapacity(*capacity, result);
  PrintInitialBalance(result);
  std::printf("\n");
  std::fputs(ProfileTable(result.profile, tokenizer, options.report).c_str(), stdout);
  if (result.word_experts) {
    std::fputs(WordsTable(result.words, *result.word_experts, layout).c_str(), stdout);
  }
}

// Writes the page of --report.
absl::Status WritePage(const ScoreArguments& options, const ProfiledTexts& result,
                       const std::optional<CapacityEffect>& capacity) {
  ReportPage page{.profile = result.profile,
                  .tokenizer = TokenizerOf(options, result),
                  .options = options.report,
                  .tokens = result.score.tokens,
                  .window = result.score.window,
                  .perplexity = result.score.perplexity(),
                  .pseudo = result.model.engine->spec().head.kind == HeadKind::kMaskedLm,
                  .bits_per_byte = result.score.bits_per_byte(),
                  .parameters = Summarize(result.model.engine->spec()).parameters,
                  .macs = result.macs,
                  .initial_balance = result.initial_balance,
                  .words = result.words,
                  .word_experts = result.word_experts,
                  .dropped = result.dropped};
  for (const auto* files : {&options.profiling.text_files, &options.profiling.pair_files}) {
    for (const std::string& file : *files) {
      page.texts.push_back(std::filesystem::path(file).filename().string());
    }
  }
  if (capacity) {
    page.capacity = capacity->rule;
    page.perplexity_without = capacity->without.perplexity();
  }
  return WriteWholeFile(options.page_file, ReportHtml(page));
}

// Scores the texts once more without the capacity, and without anything else that is reported.
Result<Score> ScoreWithoutCapacity(ScoreArguments options) {
  options.profiling.capacity.reset();
  options.profiling.dump_folder.clear();
  options.profiling.words_file.clear();
  options.profiling.hidden_samples = 0;
  options.profiling.token_stats_mib = 0;
  options.profiling.routes = false;
  MOESERVE_ASSIGN_OR_RETURN(ProfiledTexts result, ProfileTexts(options.model, options.profiling));
  return std::move(result.score);
}

absl::Status ScoreFiles(ScoreArguments options) {
  const bool save = !options.profile_file.empty();
  options.profiling.mask.rule = *KindNamed<MaskRule>(options.mask_rule);
  options.profiling.of_encoder = options.stack == KindName(Stack::kEncoder);
  options.profiling.routes = (save && options.profile_routes) || !options.page_file.empty();
  std::optional<CapacityEffect> capacity;
  if (!options.capacity.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(options.profiling.capacity, CapacityRule::Parse(options.capacity));
    MOESERVE_ASSIGN_OR_RETURN(Score without, ScoreWithoutCapacity(options));
    capacity = {options.profiling.capacity->Text(), std::move(without)};
  }
  MOESERVE_ASSIGN_OR_RETURN(ProfiledTexts result, ProfileTexts(options.model, options.profiling));
  if (!options.page_file.empty()) MOESERVE_RETURN_IF_ERROR(WritePage(options, result, capacity));
  PrintScore(options, result, capacity);
  if (!save) return absl::OkStatus();
  if (!options.profile_routes) result.profile.routes.reset();
  if (!options.profile_hidden) result.profile.hidden.clear();
  return SaveProfile(options.profile_file, result.profile);
}

}  // namespace

void AddScoreCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "score",
      "Perplexity of texts or translations, pseudo-perplexity of masked language models, and "
      "expert statistics");
  auto options = std::make_shared<ScoreArguments>();
  AddModelOptions(*command, options->model);
  AddRankOptions(*command, options->model.ranks);
  AddProfilingOptions(*command, options->profiling, false);
  command->add_option("--pairs", options->profiling.pair_files,
                      "File for an encoder-decoder, with a source, a tab and a translation in each "
                      "line; can be repeated");
  AddChoiceOption(*command, "--stack", options->stack,
                  "With --pairs: the stack whose experts are reported", {"encoder", "decoder"});
  AddReportOptions(*command, options->report);
  options->mask_rule = KindName(options->profiling.mask.rule);
  AddChoiceOption(*command, "--mask", options->mask_rule,
                  "What a masked language model reads at the tokens that are scored: the mask "
                  "token (all), also random and kept tokens (bert), or the mask token with each "
                  "token scored alone (each)",
                  KindNames<MaskRule>());
  AddNumberOption(*command, "--mask-share", options->profiling.mask.share,
                  "Share of the tokens that a masked language model is scored by", 1e-6, 1.0);
  AddNumberOption(*command, "--seed", options->profiling.mask.seed,
                  "Seed that chooses these tokens", uint64_t{0},
                  std::numeric_limits<uint64_t>::max());
  command->add_option("--dump", options->profiling.dump_folder,
                      "Folder to write router scores, routes and token ids to");
  command->add_flag("--dump-hidden", options->profiling.dump_hidden,
                    "With --dump: also write the routers' inputs");
  command->add_option("--profile", options->profile_file, "File to write an expert profile to");
  command->add_flag("--profile-hidden", options->profile_hidden,
                    "With --profile: include the sampled router inputs");
  command->add_flag("!--no-profile-routes", options->profile_routes,
                    "With --profile: leave out the routes of every row");
  command->add_option("--words", options->profiling.words_file,
                      "File with one word per line: report which experts compute these words, and "
                      "the diversity of their tokens");
  command
      ->add_option("--tau-0", options->profiling.initial_temperature,
                   "Temperature of X-MoE's balance loss; 0.3, or 0.07 for sigmoid gates, if absent")
      ->check(NumberRange(1e-6, 1e6));
  command->add_option(
      "--capacity", options->capacity,
      "Drop rows over the capacity of an expert as training code does "
      "(switch:ROWS, fraction:F or gshard, possibly with :renormalize) and report the effect");
  command->add_option("--report", options->page_file,
                      "HTML file to write, with the papers' figures for this model and text");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &selected] {
    selected = [options] {
      return RunWithRanks(options->model, [&] { return StatusToExit(ScoreFiles(*options)); });
    };
  });
}

}  // namespace moeserve::server
