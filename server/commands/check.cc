#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/weight_files.h"
#include "model_loaders/inspect.h"
#include "server/chat/chat_format.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"

namespace moeserve::server {
namespace {

namespace fs = std::filesystem;

// Says of a config.json without weights whether its model can be read.
absl::Status CheckConfigAlone(const fs::path& file, const ModelOptionsText& options) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(file, kMaxConfigFileBytes));
  MOESERVE_ASSIGN_OR_RETURN(const auto config,
                            ReadConfig(text, {}, Architectures(), options.ignored_keys));
  std::fputs(SummaryText(Summarize(config->spec)).c_str(), stdout);
  PrintNotes(config->decisions);
  if (!config->context_reason.empty()) {
    PrintNotes({Concat("texts have at most ", config->spec.max_position_embeddings,
                       " tokens: ", config->context_reason)});
  }
  std::printf(
      "config.json: models of this configuration are served; there are no weights to check\n");
  return absl::OkStatus();
}

int RunCheck(const ModelOptionsText& options) {
  const fs::path path = options.directory;
  std::error_code ignored;
  const bool file = path.filename() == kConfigFile && fs::is_regular_file(path, ignored);
  if (file && !WeightFiles::Exist(path.parent_path())) {
    const absl::Status status = CheckConfigAlone(path, options);
    return status.ok() ? 0 : Fail(status);
  }
  const auto checkpoint = LoadCheckpoint(path, {.ignored_keys = options.ignored_keys});
  if (!checkpoint.ok()) {
    if (fs::is_regular_file(path / kConfigFile, ignored) && !WeightFiles::Exist(path)) {
      // If it can be read, something else is missing, which the error says.
      static_cast<void>(CheckConfigAlone(path / kConfigFile, options));
    } else if (const auto rest = LoadCheckpoint(
                   path, {.require_tokenizer = false, .ignored_keys = options.ignored_keys});
               rest.ok()) {
      // Only the tokenizer is wrong or missing.
      std::fputs(SummaryText(Summarize(rest->spec)).c_str(), stdout);
      PrintNotes(rest->notes);
    }
    return Fail(checkpoint.status());
  }
  const absl::Status integers = CheckQuantizedData(checkpoint->spec, *checkpoint->weights);
  if (!integers.ok()) return Fail(integers);
  if (const absl::Status lost = checkpoint->weights->Check(); !lost.ok()) return Fail(lost);
  const absl::Status tables = CheckTables(checkpoint->spec, *checkpoint->weights);
  if (!tables.ok()) return Fail(tables);
  const ChatFormat chat(checkpoint->tokenizer_config);
  if (!chat.status().ok() && !absl::IsNotFound(chat.status())) {
    std::fprintf(stderr, "warning: chats will be refused: %s\n",
                 Printable(std::string(chat.status().message()), 300).c_str());
  }
  std::fputs(SummaryText(Summarize(checkpoint->spec)).c_str(), stdout);
  PrintWarnings(checkpoint->warnings);
  PrintNotes(checkpoint->notes);
  std::printf("%s: ok\n", checkpoint->directory_name.c_str());
  return 0;
}

}  // namespace

void AddCheckCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "check", "Validate a checkpoint; exit status 1 and the reason if it is invalid");
  auto options = std::make_shared<ModelOptionsText>();
  AddModelDirectory(*command, *options);
  AddIgnoreConfig(*command, options->ignored_keys);
  command->callback([options, &selected] { selected = [options] { return RunCheck(*options); }; });
}

}  // namespace moeserve::server
