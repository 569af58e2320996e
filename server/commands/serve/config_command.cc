// `moeserve config`: checks and shows the configuration of `moeserve serve`.
#include <cstdio>
#include <memory>
#include <string>

#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/serve/configuration.h"
#include "server/commands/serve/option_reader.h"

namespace moeserve::server {
namespace {

int Check(const std::string& file) {
  // A command that is never given a command line.
  CLI::App command;
  ServeOptionReader reader(command);
  if (const absl::Status status = reader.ReadFileOnly(file); !status.ok()) return Fail(status);
  ServeOptions options = reader.options();
  const bool has_model = !options.models.empty();
  if (!has_model) options.models = {"model"};
  if (const auto configuration = Configure(options); !configuration.ok()) {
    return Fail(reader.sources().WithSource(configuration.status()));
  }
  std::printf("%s: no errors\n", file.c_str());
  if (!has_model) {
    std::printf("note: the file has no \"model\", so --model must be given on the command line\n");
  }
  return 0;
}

int ShowConfig(ServeOptionReader& reader) {
  if (const absl::Status status = reader.Read(); !status.ok()) return Fail(status);
  if (const auto configuration = Configure(reader.options()); !configuration.ok()) {
    return Fail(reader.sources().WithSource(configuration.status()));
  }
  std::fputs(reader.sources().ToYaml().c_str(), stdout);
  return 0;
}

}  // namespace

void AddConfigCommand(CLI::App& app, Command& selected) {
  CLI::App* config = app.add_subcommand("config", "Check and show the configuration of \"serve\"");
  config->require_subcommand(1);

  CLI::App* check = config->add_subcommand(
      "check", "Check a configuration file without serving; exit status 1 if it has errors");
  auto file = std::make_shared<std::string>();
  check->add_option("file", *file, "The file of \"serve --config\"")->required();
  check->callback([file, &selected] { selected = [file] { return Check(*file); }; });

  CLI::App* show = config->add_subcommand(
      "show", "Print the options of \"serve\" as a configuration file, each with its source");
  auto reader = std::make_shared<ServeOptionReader>(*show);
  show->callback([reader, &selected] { selected = [reader] { return ShowConfig(*reader); }; });
}

}  // namespace moeserve::server
