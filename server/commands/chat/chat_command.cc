// `moeserve chat`: a conversation in the terminal.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "server/commands/chat/chat_session.h"
#include "server/commands/chat/line_editor.h"
#include "server/commands/chat/local_chat.h"
#include "server/commands/chat/remote_chat.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"

namespace moeserve::server {
namespace {

struct ChatArguments {
  LocalChatOptions local;
  RemoteChatOptions remote;  // used if it has a URL
  std::string system;
};

// Set by Ctrl-C while an answer is written.
std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// While it lives, Ctrl-C sets `interrupted` instead of ending the program.
class CatchInterrupt {
 public:
  CatchInterrupt() {
    interrupted = false;
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = true; };
    sigaction(SIGINT, &action, &before_);
  }
  ~CatchInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  CatchInterrupt(const CatchInterrupt&) = delete;
  CatchInterrupt& operator=(const CatchInterrupt&) = delete;

 private:
  struct sigaction before_ {};
};

// Reads a message, which can have several lines: all but the last end in a backslash.
std::optional<std::string> ReadMessage(LineEditor& editor) {
  std::string message;
  for (const char* prompt = "> ";; prompt = "... ") {
    const std::optional<std::string> line = editor.Read(prompt);
    if (!line) return message.empty() ? std::nullopt : std::optional(message);
    message += *line;
    if (message.size() > LineEditor::kMaxLineBytes || line->empty() || line->back() != '\\') {
      return message;
    }
    message.back() = '\n';
  }
}

Result<std::unique_ptr<ChatModel>> Start(const ChatArguments& options) {
  if (options.remote.url.empty()) {
    if (options.local.model.directory.empty()) {
      return absl::InvalidArgumentError("expected --model or --url, found neither");
    }
    return StartLocalChat(options.local);
  }
  RemoteChatOptions remote = options.remote;
  remote.completion = options.local.completion;
  remote.max_tokens = options.local.max_tokens;
  return ConnectRemoteChat(remote);
}

absl::Status Chat(const ChatArguments& options) {
  if (options.local.completion && !options.system.empty()) {
    return absl::InvalidArgumentError(
        "--system and --completion: a text that is continued has no system's message");
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<ChatModel> model, Start(options));
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  ChatSession session(
      *model, {.completion = options.local.completion, .system = options.system, .settings = {}},
      [terminal](std::string_view text) {
        const std::string shown = terminal ? ForTerminal(text) : std::string(text);
        std::fwrite(shown.data(), 1, shown.size(), stdout);
        std::fflush(stdout);
      },
      [] { return interrupted.load(); });
  const std::unique_ptr<LineEditor> editor = LineEditor::Create();
  if (editor->interactive()) {
    std::printf("%s: /help lists the commands, Ctrl-D ends.\n",
                options.local.completion ? "Type a text to continue" : "Type a message");
  }
  while (const std::optional<std::string> message = ReadMessage(*editor)) {
    const CatchInterrupt guard;
    if (!session.Handle(*message)) break;
  }
  return absl::OkStatus();
}

}  // namespace

void AddChatCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("chat", "Talk with a model in the terminal");
  auto options = std::make_shared<ChatArguments>();
  AddModelOptions(*command, options->local.model);
  AddDraftModel(*command, options->local.model);
  CLI::Option* model = command->get_option("--model");
  CLI::Option* url = command
                         ->add_option("--url", options->remote.url,
                                      "Talk with a server with OpenAI's API instead, such as "
                                      "http://127.0.0.1:8080/v1")
                         ->excludes(model);
  model->required(false);
  command
      ->add_option("--served-model", options->remote.model,
                   "With --url: name of the model; default: the first that the server lists")
      ->needs(url);
  command
      ->add_option("--api-key-file", options->remote.api_key_file,
                   "With --url: file whose first key is sent")
      ->needs(url);
  command->add_option("--system", options->system, "The system's message");
  command
      ->add_option("--chat-template", options->local.chat_template,
                   "File with a Jinja chat template that replaces the model's")
      ->excludes(url);
  command->add_flag("--completion", options->local.completion,
                    "Let the model continue what you type; for models without a chat template");
  AddNumberOption(*command, "--max-tokens", options->local.max_tokens, "Most tokens of an answer",
                  1, 1 << 24);
  command
      ->add_option("--max-model-len", options->local.engine.engine.max_model_len,
                   "Context length; 0: the model's")
      ->check(CLI::Range(0, 1 << 24));
  command->callback(
      [options, &selected] { selected = [options] { return StatusToExit(Chat(*options)); }; });
}

}  // namespace moeserve::server
