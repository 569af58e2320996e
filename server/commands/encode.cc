#include <cstdio>
#include <memory>
#include <string>

#include "server/answers/answer.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/encode_texts.h"
#include "server/commands/model_options.h"
#include "server/commands/run_with_ranks.h"
#include "server/commands/start_model.h"
#include "server/encode/encode_answer.h"
#include "server/encode/encode_results.h"

namespace moeserve::server {
namespace {

struct EncodeArguments {
  ModelOptionsText model;
  EngineOptionsText engine;
  TextOptions texts;
  // embed
  std::optional<int> dimensions;
  std::string prompt_name;
  bool raw = false;
  // classify
  std::string aggregation;
  bool json = false;
};

Result<RunningModel> StartEncoder(const EncodeArguments& options) {
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions engine, ResolveEngineOptions(options.engine));
  return StartModel(options.model, engine);
}

void PrintLine(const std::string& line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
}

absl::Status Embed(const EncodeArguments& options) {
  MOESERVE_ASSIGN_OR_RETURN(const RunningModel model, StartEncoder(options));
  MOESERVE_RETURN_IF_ERROR(CheckTask(model.engine->spec(), EncodeTask::kEmbed));
  const auto prepare = [&](const EncodeModel& known, EncodeJob& job) -> absl::Status {
    std::optional<std::string> name;
    if (!options.prompt_name.empty()) name = options.prompt_name;
    MOESERVE_RETURN_IF_ERROR(SetPrompt(*known.settings, name, std::nullopt, job));
    job.dimensions = options.dimensions;
    if (options.raw) job.activation = false;
    return CheckDimensions(known, job);
  };
  return EncodeTexts(model, options.texts, prepare, [](EncodeRun& run, size_t first) {
    for (size_t i = 0; i < run.results().size(); ++i) {
      EncodeResult& result = run.results()[i].result;
      FinishValues(run.job(), *run.model().spec, result);
      std::string line = Concat("{\"index\":", first + i, ",\"embedding\":");
      AppendFloats(result.values, line);
      PrintLine(line + '}');
    }
    return absl::OkStatus();
  });
}

// Prints what was found in a text, one line each: the score, the name, the characters, the word.
void PrintEntities(EncodeRun& run, size_t index, size_t first, bool json) {
  OrderedJson list = OrderedJson::array();
  for (const TextEntity& found : TextEntities(run.job(), run.model(), run.job().inputs[index],
                                              run.texts()[index], run.results()[index].result)) {
    const auto [start, end] = found.characters.value_or(std::pair<size_t, size_t>());
    if (json) {
      list.push_back(EntityJson(found));
      continue;
    }
    PrintLine(Concat(first + index, '\t', found.entity.name, '\t',
                     std::to_string(found.entity.score), '\t', start, '\t', end, '\t',
                     found.word.value_or("")));
  }
  if (json) PrintLine(DumpJson({{"index", first + index}, {"entities", std::move(list)}}));
}

void PrintClasses(EncodeRun& run, size_t index, size_t first, bool json) {
  EncodeResult& result = run.results()[index].result;
  const ModelSpec& spec = *run.model().spec;
  FinishValues(run.job(), spec, result);
  if (!json) {
    const float best = *std::ranges::max_element(result.values);
    PrintLine(Concat(first + index, '\t', BestLabel(spec, result), '\t', std::to_string(best)));
    return;
  }
  std::string line = Concat("{\"index\":", first + index,
                            ",\"label\":", DumpJson(BestLabel(spec, result)), ",\"scores\":{");
  for (size_t i = 0; i < result.values.size(); ++i) {
    if (i > 0) line += ',';
    line += DumpJson(spec.head.labels[i]) + ':';
    AppendFloat(result.values[i], line);
  }
  PrintLine(line + "}}");
}

absl::Status Classify(const EncodeArguments& options) {
  MOESERVE_ASSIGN_OR_RETURN(const RunningModel model, StartEncoder(options));
  const ModelSpec& spec = model.engine->spec();
  const bool tokens = spec.head.kind == HeadKind::kTokenClassification;
  const EncodeTask task = tokens ? EncodeTask::kTokenClassify : EncodeTask::kClassify;
  MOESERVE_RETURN_IF_ERROR(CheckTask(spec, task));
  if (!tokens && !options.aggregation.empty()) {
    return absl::InvalidArgumentError("--aggregation: this model labels whole texts, not tokens");
  }
  if (tokens && options.texts.pairs) {
    // The places of what is found are those in a single text.
    return absl::InvalidArgumentError("--pairs: this model labels tokens, not whole texts");
  }
  const auto prepare = [&](const EncodeModel&, EncodeJob& job) -> absl::Status {
    job.task = task;
    if (!tokens) return absl::OkStatus();
    std::optional<std::string> name;
    if (!options.aggregation.empty()) name = options.aggregation;
    return SetAggregation(spec, name, job);
  };
  return EncodeTexts(model, options.texts, prepare, [&](EncodeRun& run, size_t first) {
    for (size_t i = 0; i < run.results().size(); ++i) {
      (tokens ? PrintEntities : PrintClasses)(run, i, first, options.json);
    }
    return absl::OkStatus();
  });
}

std::shared_ptr<EncodeArguments> AddCommon(CLI::App& command) {
  auto options = std::make_shared<EncodeArguments>();
  AddModelOptions(command, options->model);
  AddRankOptions(command, options->model.ranks);
  AddPoolingOption(command, options->model);
  AddTextOptions(command, options->texts);
  AddEngineOptions(command, options->engine);
  return options;
}

}  // namespace

void AddEmbedCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("embed", "Vectors of texts, as lines of JSON on standard output");
  const auto options = AddCommon(*command);
  command->add_option("--dimensions", options->dimensions, "Size to which vectors are cut")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--prompt-name", options->prompt_name,
                      "Name of the model's text that goes before each text, such as query");
  command->add_flag("--raw", options->raw, "Do not normalize vectors, whatever the model says");
  command->callback([options, &selected] {
    selected = [options] {
      return RunWithRanks(options->model, [&] { return StatusToExit(Embed(*options)); });
    };
  });
}

void AddClassifyCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "classify", "Labels of texts, or the named parts of texts, on standard output");
  const auto options = AddCommon(*command);
  command->add_flag("--pairs", options->texts.pairs,
                    "A tab divides each line into two texts, which are classified together");
  AddChoiceOption(*command, "--aggregation", options->aggregation,
                  "How labeled tokens become parts of a text; default: viterbi for labels B-, I-, "
                  "E-, S-, else simple",
                  KindNames(Aggregation::kNone));
  command->add_flag("--json", options->json, "Print lines of JSON");
  command->callback([options, &selected] {
    selected = [options] {
      return RunWithRanks(options->model, [&] { return StatusToExit(Classify(*options)); });
    };
  });
}

}  // namespace moeserve::server
