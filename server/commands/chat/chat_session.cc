#include "server/commands/chat/chat_session.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "base/descriptor.h"
#include "base/error_text.h"
#include "engine/sampling_params.h"
#include "server/base/json.h"
#include "server/base/text_values.h"
#include "server/config/suggestion.h"

namespace moeserve::server {
namespace {

constexpr double kMaxSeed = 9007199254740992.0;  // 2^53: a double holds every integer up to it
constexpr double kMaxTokens = 1 << 24;

// A number that /set takes.
struct Setting {
  std::string name;
  std::string range;
  std::string meaning;
  bool whole = false;
  std::function<bool(double)> accepts;
};

std::vector<Setting> AllSettings() {
  std::vector<Setting> settings;
  const auto add = [&](const SamplingField& field) {
    settings.push_back({field.name, RangeText(field), field.meaning, field.is_integer(),
                        [&field](double value) { return field.Accepts(value); }});
  };
  for (const SamplingField& field : kDrawFields) add(field);
  for (const SamplingField& field : kPenaltyFields) add(field);
  settings.push_back({"seed", "a whole number from 0 to 2^53", "Makes sampling repeatable", true,
                      [](double value) { return value >= 0.0 && value <= kMaxSeed; }});
  settings.push_back({"max_tokens", "a whole number from 1 to 2^24", "Most tokens of an answer",
                      true, [](double value) { return value >= 1.0 && value <= kMaxTokens; }});
  return settings;
}

std::optional<double> ParseNumber(const std::string& text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  char shorter[32];
  std::snprintf(shorter, sizeof(shorter), "%g", value);
  return std::strtod(shorter, nullptr) == value ? shorter : text;
}

// Writes a new file that only its owner can read, since a conversation may be private.
absl::Status WriteFile(const std::string& path, std::string_view text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const auto fail = [&] {
    return absl::UnavailableError(Concat("cannot write ", path, ": ", std::strerror(errno)));
  };
  if (file.get() < 0) return fail();
  while (!text.empty()) {
    const ssize_t written = write(file.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail();
    text.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

}  // namespace

struct ChatSession::Entry {
  const char* name;
  const char* argument;
  const char* meaning;
  void (ChatSession::*run)(const std::string&);  // null: ends the session
};

const std::vector<ChatSession::Entry>& ChatSession::Commands() {
  static const std::vector<Entry> kCommands = {
      {"/help", "", "shows this list", &ChatSession::Help},
      {"/clear", "", "forgets the conversation, but not the system's message", &ChatSession::Clear},
      {"/system", "[TEXT]", "sets the system's message; without a text, removes it",
       &ChatSession::System},
      {"/set", "[NAME VALUE]", "changes a setting, such as temperature 0.7; alone, lists them",
       &ChatSession::Set},
      {"/experts", "", "shows which experts computed the last answer", &ChatSession::Experts},
      {"/save", "FILE", "writes the conversation to a new file", &ChatSession::Save},
      {"/exit", "", "ends the program, as Ctrl-D does", nullptr},
  };
  return kCommands;
}

std::string ForTerminal(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 = byte == 0xC2 && i + 1 < text.size() &&
                    static_cast<unsigned char>(text[i + 1]) < 0xA0;  // U+0080 to U+009F
    if (c1) ++i;
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F;
    out += c1 || control ? '?' : text[i];
  }
  return out;
}

ChatSession::ChatSession(ChatModel& model, ChatSessionOptions options,
                         std::function<void(std::string_view)> write,
                         std::function<bool()> cancelled)
    : model_(model),
      completion_(options.completion),
      write_(std::move(write)),
      cancelled_(std::move(cancelled)),
      settings_(std::move(options.settings)),
      system_(std::move(options.system)) {}

void ChatSession::Line(std::string_view text) { write_(Concat(text, '\n')); }

bool ChatSession::Handle(const std::string& line) {
  if (Trimmed(line).empty()) return true;
  if (line.front() == '/') return RunCommand(line);
  Ask(line);
  return true;
}

bool ChatSession::RunCommand(const std::string& line) {
  const size_t space = line.find(' ');
  std::string name(Trimmed(line.substr(0, space)));
  if (name == "/quit" || name == "/bye") name = "/exit";
  const std::string argument =
      space == std::string::npos ? std::string() : std::string(Trimmed(line.substr(space)));
  std::vector<std::string> names;
  for (const Entry& entry : Commands()) {
    if (name == entry.name) {
      if (entry.run == nullptr) return false;
      (this->*entry.run)(argument);
      return true;
    }
    names.push_back(entry.name);
  }
  Line(Concat("unknown command ", Quoted(name), Suggestion(name, names),
              " /help lists the commands."));
  return true;
}

void ChatSession::Ask(const std::string& text) {
  ChatTurn turn;
  turn.settings = settings_;
  if (completion_) {
    turn.text = text_ + text;
  } else {
    if (!system_.empty()) turn.messages.push_back({"system", system_});
    turn.messages.insert(turn.messages.end(), messages_.begin(), messages_.end());
    turn.messages.push_back({"user", text});
  }
  std::string answer;
  const absl::Status status = model_.Answer(
      turn,
      [&](std::string_view piece) {
        answer += piece;
        write_(piece);
      },
      cancelled_);
  if (!answer.empty() && answer.back() != '\n') write_("\n");
  if (absl::IsCancelled(status)) Line("(interrupted)");
  // What was said before an interruption stays in the conversation; after an error, nothing does.
  if (!status.ok() && !absl::IsCancelled(status)) {
    Line(Concat("error: ", Printable(std::string(status.message()), 1000)));
    return;
  }
  if (completion_) {
    text_ = turn.text + answer;
  } else {
    messages_.push_back({"user", text});
    messages_.push_back({"assistant", answer});
  }
}

void ChatSession::Help(const std::string&) {
  for (const Entry& entry : Commands()) {
    std::string head = Concat(entry.name, *entry.argument == '\0' ? "" : " ", entry.argument);
    head.resize(std::max<size_t>(head.size(), 20), ' ');
    Line(Concat(head, ' ', entry.meaning));
  }
  Line(completion_ ? "Other lines are appended to the text, which the model continues."
                   : "Other lines are messages to the model. A line that ends in \\ continues in "
                     "the next one.");
  Line("Ctrl-C ends an answer.");
}

void ChatSession::Clear(const std::string&) {
  messages_.clear();
  text_.clear();
}

void ChatSession::System(const std::string& text) {
  if (completion_) {
    Line("a text that is continued has no system's message");
    return;
  }
  system_ = text;
}

void ChatSession::Set(const std::string& argument) {
  const std::vector<Setting> settings = AllSettings();
  if (argument.empty()) {
    for (const Setting& setting : settings) {
      const auto found = settings_.find(setting.name);
      Line(Concat(setting.name, ": ",
                  found == settings_.end() ? "default" : NumberText(found->second), " (",
                  setting.range, ")"));
    }
    return;
  }
  const size_t space = argument.find(' ');
  std::string name = argument.substr(0, space);
  for (char& c : name) c = c == '-' ? '_' : c;
  std::vector<std::string> names;
  for (const Setting& setting : settings) {
    names.push_back(setting.name);
    if (setting.name != name) continue;
    const std::string text =
        space == std::string::npos ? std::string() : std::string(Trimmed(argument.substr(space)));
    const std::optional<double> value = ParseNumber(text);
    if (!value || !setting.accepts(*value) || (setting.whole && *value != std::floor(*value))) {
      Line(Concat(name, ": expected ", setting.range, ", found ", Quoted(text)));
      return;
    }
    settings_[name] = *value;
    return;
  }
  Line(Concat("expected a setting, found ", Quoted(name), Suggestion(name, names),
              " /set lists them."));
}

void ChatSession::Experts(const std::string&) {
  const Result<std::string> text = model_.Experts();
  write_(text.ok() ? *text : std::string(text.status().message()) + "\n");
}

void ChatSession::Save(const std::string& file) {
  if (file.empty()) {
    Line("/save: expected the name of a file");
    return;
  }
  std::string text = text_;
  if (!completion_) {
    OrderedJson messages = OrderedJson::array();
    const auto add = [&](const ChatMessage& message) {
      messages.push_back({{"role", message.role}, {"content", message.content}});
    };
    if (!system_.empty()) add({"system", system_});
    for (const ChatMessage& message : messages_) add(message);
    text = OrderedJson{{"messages", std::move(messages)}}.dump(
               2, ' ', false, OrderedJson::error_handler_t::replace) +
           "\n";
  }
  const absl::Status status = WriteFile(file, text);
  Line(status.ok() ? Concat("saved to ", file) : std::string(status.message()));
}

}  // namespace moeserve::server
