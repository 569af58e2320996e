// The entry point: parses the command line and runs a subcommand.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <system_error>

#include "base/error_text.h"
#include "server/base/version.h"
#include "server/commands/command_line/option_text.h"
#include "server/commands/command_line/unknown_words.h"
#include "server/commands/commands.h"

namespace {

constexpr int kUsageError = 2;

// Returns the names of the command that the command line selected, as far as it was parsed.
std::string SelectedPath(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return moeserve::server::CommandPath(*command);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace moeserve::server;
  try {
    CLI::App app("moeserve: a server for sparse mixture-of-experts language models", "moeserve");
    app.set_version_flag("--version", moeserve::Concat("moeserve ", kVersion));
    app.require_subcommand(1);
    UseHelpText(app);
    app.failure_message([](const CLI::App* all, const CLI::Error& error) {
      return moeserve::Concat("error: ", error.what(), "\nRun ",
                              moeserve::Quoted(SelectedPath(*all) + " --help"), " for help.\n");
    });
    Command selected;
    AddServeCommand(app, selected);
    AddConfigCommand(app, selected);
    AddGenerateCommand(app, selected);
    AddChatCommand(app, selected);
    AddScoreCommand(app, selected);
    AddEmbedCommand(app, selected);
    AddClassifyCommand(app, selected);
    AddExpertsCommand(app, selected);
    AddInspectCommand(app, selected);
    AddCheckCommand(app, selected);
    AddConvertCommand(app, selected);
    AddQuantizeCommand(app, selected);
    AddPackCommand(app, selected);
    AddBenchCommand(app, selected);
    AddHealthCommand(app, selected);
    AddCompletionCommand(app, selected);
    AddManCommand(app, selected);
    const std::span<const char* const> words(argv, static_cast<size_t>(argc));
    if (const auto unknown = FindUnknownWord(app, words.subspan(argc > 0 ? 1 : 0))) {
      std::fprintf(stderr, "%s\n", unknown->c_str());
      return kUsageError;
    }
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? 0 : kUsageError;
    }
    return selected();
  } catch (const std::system_error& error) {
    // EAGAIN is what a thread that cannot be started fails with.
    const bool thread = error.code() == std::errc::resource_unavailable_try_again;
    std::fprintf(stderr, "error: %s%s\n", error.what(),
                 thread ? ": cannot start a thread; the limit on processes and threads (ulimit -u, "
                          "pids.max of the control group) or on memory is too low"
                        : "");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
