#include "server/commands/chat/line_editor.h"

#include <histedit.h>
#include <langinfo.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdio>
#include <cstring>

namespace moeserve::server {
namespace {

constexpr int kHistoryLines = 1000;

void CutLineEnd(std::string& line) {
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
}

class PlainLines final : public LineEditor {
 public:
  std::optional<std::string> Read(const std::string& prompt) override {
    if (interactive()) {
      std::fputs(prompt.c_str(), stdout);
      std::fflush(stdout);
    }
    std::string line;
    int c = 0;
    while ((c = std::fgetc(stdin)) != EOF && c != '\n') {
      if (line.size() < kMaxLineBytes) line.push_back(static_cast<char>(c));
    }
    if (c == EOF && line.empty()) return std::nullopt;
    CutLineEnd(line);
    return line;
  }

  bool interactive() const override { return isatty(STDIN_FILENO) == 1; }
};

// The editor reads UTF-8 only in a locale that has it.
void SetCharacterType() {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(nl_langinfo(CODESET), "UTF-8") != 0) std::setlocale(LC_CTYPE, "C.UTF-8");
}

class EditedLines final : public LineEditor {
 public:
  EditedLines() {
    SetCharacterType();
    editor_ = el_init("moeserve", stdin, stdout, stderr);
    history_ = history_init();
    if (!usable()) return;
    HistEvent event;
    history(history_, &event, H_SETSIZE, kHistoryLines);
    history(history_, &event, H_SETUNIQUE, 1);
    el_set(editor_, EL_CLIENTDATA, this);
    el_set(editor_, EL_PROMPT, &EditedLines::Prompt);
    el_set(editor_, EL_EDITOR, "emacs");
    el_set(editor_, EL_HIST, history, history_);
    // While a line is edited, Ctrl-C is a key.
    el_set(editor_, EL_SETTY, "-d", "-isig", nullptr);
    el_set(editor_, EL_ADDFN, "give-up-line", "Give the line up", &EditedLines::GiveUp);
    el_set(editor_, EL_BIND, "^C", "give-up-line", nullptr);
    el_set(editor_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    el_source(editor_, nullptr);  // the user's .editrc
  }
  ~EditedLines() override {
    if (history_ != nullptr) history_end(history_);
    if (editor_ != nullptr) el_end(editor_);
  }
  EditedLines(const EditedLines&) = delete;
  EditedLines& operator=(const EditedLines&) = delete;

  bool usable() const { return editor_ != nullptr && history_ != nullptr; }

  std::optional<std::string> Read(const std::string& prompt) override {
    prompt_ = prompt;
    given_up_ = false;
    // el_gets() would show the prompt first: a Ctrl-C typed between the two would end the program,
    // and a Ctrl-D would arrive as another key.
    el_set(editor_, EL_PREP_TERM, 1);
    int count = 0;
    const char* const text = el_gets(editor_, &count);
    if (text == nullptr || count <= 0) {
      std::fputc('\n', stdout);
      return std::nullopt;
    }
    std::string line(text, static_cast<size_t>(count));
    CutLineEnd(line);
    if (given_up_) return std::string();
    line.resize(std::min(line.size(), kMaxLineBytes));
    if (!line.empty()) {
      HistEvent event;
      history(history_, &event, H_ENTER, line.c_str());
    }
    return line;
  }

  bool interactive() const override { return true; }

 private:
  static EditedLines* Self(EditLine* editor) {
    void* self = nullptr;
    el_get(editor, EL_CLIENTDATA, &self);
    return static_cast<EditedLines*>(self);
  }
  static char* Prompt(EditLine* editor) { return Self(editor)->prompt_.data(); }
  static unsigned char GiveUp(EditLine* editor, int) {
    Self(editor)->given_up_ = true;
    std::fputs("^C\n", stdout);
    return CC_NEWLINE;
  }

  EditLine* editor_ = nullptr;
  History* history_ = nullptr;
  std::string prompt_;
  bool given_up_ = false;
};

}  // namespace

std::unique_ptr<LineEditor> LineEditor::Create() {
  if (isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1) {
    auto edited = std::make_unique<EditedLines>();
    if (edited->usable()) return edited;
  }
  return std::make_unique<PlainLines>();
}

}  // namespace moeserve::server
