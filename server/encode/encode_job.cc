#include "server/encode/encode_job.h"

#include <algorithm>
#include <span>

#include "base/error_text.h"
#include "engine/model/output_head.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"
#include "server/generation/task_check.h"

namespace moeserve::server {
namespace {

bool HasTask(const ModelSpec& spec, std::string_view task) {
  const std::vector<std::string_view> names = TaskNames(spec);
  return std::ranges::find(names, task) != names.end();
}

// Returns the names of the prompts for error messages.
std::string PromptNames(const TextSettings& settings) {
  std::string names;
  for (const auto& [name, text] : settings.prompts) {
    names += Concat(names.empty() ? "" : ", ", Printable(name, 32));
  }
  return names.empty() ? "no name, because this model has no prompts" : "one of " + names;
}

const std::string* FindPrompt(const TextSettings& settings, std::string_view name) {
  for (const auto& [known, text] : settings.prompts) {
    if (known == name) return &text;
  }
  return nullptr;
}

}  // namespace

EncodeModel MakeEncodeModel(const Engine& engine, const TextSettings& settings,
                            const TokenizerConfig& tokenizer_config) {
  EncodeModel out;
  out.spec = &engine.spec();
  out.tokenizer = engine.tokenizer();
  out.settings = &settings;
  if (out.tokenizer != nullptr) out.mask = MaskToken(tokenizer_config, *out.tokenizer);
  const int most = engine.max_model_len();
  out.max_tokens = std::min(settings.max_tokens.value_or(most), most);
  if (out.max_tokens == most) out.context_reason = engine.context_reason();
  return out;
}

absl::Status CheckTask(const ModelSpec& spec, EncodeTask task, std::string_view field) {
  return CheckTask(spec, KindName(task), field);
}

EncodeTask DefaultPoolingTask(const ModelSpec& spec) {
  for (const EncodeTask task :
       {EncodeTask::kEmbed, EncodeTask::kClassify, EncodeTask::kTokenClassify}) {
    if (HasTask(spec, KindName(task))) return task;
  }
  return EncodeTask::kEmbed;
}

absl::Status SetPrompt(const TextSettings& settings, const std::optional<std::string>& name,
                       const std::optional<std::string>& kind, EncodeJob& job) {
  if (name && kind) {
    return InvalidValue("input_type",
                        "either 'prompt_name' or 'input_type' can be given, not both");
  }
  if (name) {
    const std::string* const text = FindPrompt(settings, *name);
    if (text == nullptr) {
      return InvalidValue("prompt_name", Concat("'prompt_name': expected ", PromptNames(settings),
                                                ", found ", Printable(*name, 64)));
    }
    job.prompt = *text;
    return absl::OkStatus();
  }
  if (kind) {
    if (*kind != "query" && *kind != "document") {
      return InvalidValue("input_type", Concat("'input_type': expected query or document, found ",
                                               Printable(*kind, 64)));
    }
    // Models name the prompt for documents in one of these ways.
    constexpr std::string_view kQuery[] = {"query"};
    constexpr std::string_view kDocument[] = {"document", "passage", "corpus"};
    const std::span<const std::string_view> names =
        *kind == "query" ? std::span<const std::string_view>(kQuery) : kDocument;
    for (const std::string_view candidate : names) {
      if (const std::string* const text = FindPrompt(settings, candidate)) {
        job.prompt = *text;
        break;
      }
    }
    return absl::OkStatus();
  }
  if (settings.default_prompt) job.prompt = *FindPrompt(settings, *settings.default_prompt);
  return absl::OkStatus();
}

absl::Status CheckDimensions(const EncodeModel& model, const EncodeJob& job) {
  if (!job.dimensions) return absl::OkStatus();
  const int width = TextOutputs(*model.spec);
  if (*job.dimensions < 1 || *job.dimensions > width) {
    return InvalidValue("dimensions", Concat("'dimensions': expected an integer from 1 to ", width,
                                             ", found ", *job.dimensions));
  }
  const std::vector<int>& sizes = model.settings->dimensions;
  if (sizes.empty() || *job.dimensions == width ||
      std::ranges::find(sizes, *job.dimensions) != sizes.end()) {
    return absl::OkStatus();
  }
  std::string known;
  for (const int size : sizes) known += Concat(known.empty() ? "" : ", ", size);
  return InvalidValue("dimensions",
                      Concat("'dimensions': expected one of ", known,
                             ", which the model was trained for, found ", *job.dimensions));
}

absl::Status SetAggregation(const ModelSpec& spec, const std::optional<std::string>& name,
                            EncodeJob& job) {
  const bool bioes = AreBioes(spec.head.labels);
  if (!name) {
    job.aggregation = bioes ? Aggregation::kViterbi : Aggregation::kSimple;
    return absl::OkStatus();
  }
  job.aggregation = KindNamed(*name, Aggregation::kNone);
  if (!job.aggregation) {
    return InvalidValue("aggregation", Concat("'aggregation': expected none, simple or viterbi, "
                                              "found ",
                                              Printable(*name, 64)));
  }
  if (*job.aggregation == Aggregation::kViterbi && !bioes) {
    return InvalidValue("aggregation",
                        "'aggregation': viterbi needs labels of the forms B-NAME, I-NAME, E-NAME, "
                        "S-NAME and O, which this model does not have");
  }
  return absl::OkStatus();
}

absl::Status SetPairs(const ModelSpec& spec, std::vector<std::string> first,
                      std::vector<std::string> second, std::string_view field, EncodeJob& job) {
  if (first.size() != 1 && first.size() != second.size()) {
    return InvalidValue(field, Concat("'", field, "': expected one text or ", second.size(),
                                      ", found ", first.size()));
  }
  if (spec.head.kind == HeadKind::kSequenceClassification) {
    // A single first text is copied and tokenized for each second one.
    if (first.size() == 1 && first[0].size() > kMaxFirstBytes / second.size()) {
      return InvalidValue(
          field,
          Concat("'", field, "': compared with ", second.size(), " texts, it may have at most ",
                 kMaxFirstBytes / second.size(), " bytes, found ", first[0].size()));
    }
    for (size_t i = 0; i < second.size(); ++i) {
      TextInput& input = job.inputs.emplace_back();
      input.text = first.size() == 1 ? first[0] : std::move(first[i]);
      input.pair = std::move(second[i]);
    }
    return absl::OkStatus();
  }
  const auto count = static_cast<int>(first.size());
  for (std::vector<std::string>* const texts : {&first, &second}) {
    for (std::string& text : *texts) job.inputs.emplace_back().text = std::move(text);
  }
  for (int i = 0; i < static_cast<int>(second.size()); ++i) {
    job.pairs.emplace_back(count == 1 ? 0 : i, count + i);
  }
  return absl::OkStatus();
}

EncodeParams EncodeParamsOf(const EncodeJob& job, const ModelSpec& spec, const PreparedText& text) {
  EncodeParams out;
  switch (job.task) {
    case EncodeTask::kEmbed:
    case EncodeTask::kClassify:
    case EncodeTask::kScore:
      return out;
    case EncodeTask::kTokenEmbed:
      out.output = EncodeOutput::kVectors;
      return out;
    case EncodeTask::kTokenClassify:
      out.output = EncodeOutput::kLogits;
      return out;
    case EncodeTask::kFillMask:
      break;
  }
  out.output = EncodeOutput::kTokens;
  out.targets = job.targets;
  if (!text.masks.empty() && job.targets.empty()) out.top = std::min(job.top_k, spec.vocab_size);
  if (!job.logprobs) {
    out.rows = text.masks;
    return out;
  }
  for (int32_t row = 0; row < std::ssize(text.ids); ++row) out.rows.push_back(row);
  out.own = job.targets_of.empty() ? text.ids : job.targets_of;
  return out;
}

int64_t CountAnswerValues(const EncodeJob& job, const ModelSpec& spec,
                          const std::vector<PreparedText>& texts) {
  int64_t tokens = 0;
  for (const PreparedText& text : texts) tokens += std::ssize(text.ids);
  switch (job.task) {
    case EncodeTask::kEmbed:
    case EncodeTask::kClassify:
    case EncodeTask::kScore:
      return std::ssize(texts) * TextOutputs(spec);
    case EncodeTask::kTokenEmbed:
      return tokens * TextOutputs(spec);
    case EncodeTask::kTokenClassify:
      return tokens * RowOutputs(spec);
    case EncodeTask::kFillMask:
      break;
  }
  int64_t rows = 0;
  for (const PreparedText& text : texts) {
    rows += job.logprobs ? std::ssize(text.ids) : std::ssize(text.masks);
  }
  return rows * (1 + std::max<int64_t>(job.top_k, std::ssize(job.targets)));
}

int64_t CountFilledTokens(const EncodeJob& job, const std::vector<PreparedText>& texts) {
  if (!job.fills) return 0;
  const int64_t candidates =
      job.targets.empty() ? job.top_k : std::min<int64_t>(job.top_k, std::ssize(job.targets));
  int64_t tokens = 0;
  for (const PreparedText& text : texts) {
    tokens += std::ssize(text.masks) * candidates * std::ssize(text.ids);
  }
  return tokens;
}

}  // namespace moeserve::server
