#include "engine/text/tokenizer/decoders/decoder_stages.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "engine/text/tokenizer/decoders/byte_token.h"
#include "engine/text/tokenizer/models/byte_level.h"
#include "engine/text/tokenizer/normalizers/text_edits.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve {
namespace {

constexpr std::string_view kReplacementCharacter = "\uFFFD";

// Converts each token alone.
class MapStage : public DecoderStage {
 public:
  // `convert(token, first)` returns what the token becomes.
  using Convert = std::function<std::string(std::string_view token, bool first)>;
  explicit MapStage(Convert convert) : convert_(std::move(convert)) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override {
    return std::make_unique<State>(convert_, std::move(next));
  }
  std::string TokenBytes(std::string token) const override { return convert_(token, false); }

 private:
  class State : public DecoderState {
   public:
    State(const Convert& convert, std::unique_ptr<DecoderState> next)
        : convert_(convert), next_(std::move(next)) {}

    void Push(std::string_view token, std::string* out) override {
      next_->Push(convert_(token, first_), out);
      first_ = false;
    }
    void Finish(std::string* out) override { next_->Finish(out); }
    std::unique_ptr<DecoderState> Clone() const override { return std::make_unique<State>(*this); }

   private:
    const Convert& convert_;
    NextState next_;
    bool first_ = true;
  };

  Convert convert_;
};

class ByteLevelState : public DecoderState {
 public:
  explicit ByteLevelState(std::unique_ptr<DecoderState> next) : next_(std::move(next)) {}

  void Push(std::string_view token, std::string* out) override {
    bytes_.clear();
    text_.clear();
    assembler_.Push(AppendByteLevelBytes(token, &bytes_) ? std::string_view(bytes_) : token,
                    &text_);
    next_->Push(text_, out);
  }
  void Finish(std::string* out) override {
    text_.clear();
    assembler_.Finish(&text_);
    if (!text_.empty()) next_->Push(text_, out);
    next_->Finish(out);
  }
  std::unique_ptr<DecoderState> Clone() const override {
    return std::make_unique<ByteLevelState>(*this);
  }

 private:
  std::string bytes_;  // scratch, like text_; kept to reuse the memory
  std::string text_;
  Utf8Assembler assembler_;
  NextState next_;
};

class ByteFallbackState : public DecoderState {
 public:
  explicit ByteFallbackState(std::unique_ptr<DecoderState> next) : next_(std::move(next)) {}

  void Push(std::string_view token, std::string* out) override {
    if (const std::optional<char> byte = ByteOfToken(token); byte.has_value()) {
      run_.push_back(*byte);
      return;
    }
    EndRun(out);
    next_->Push(token, out);
  }
  void Finish(std::string* out) override {
    EndRun(out);
    next_->Finish(out);
  }
  std::unique_ptr<DecoderState> Clone() const override {
    return std::make_unique<ByteFallbackState>(*this);
  }

 private:
  void EndRun(std::string* out) {
    if (run_.empty()) return;
    if (IsValidUtf8(run_)) {
      next_->Push(run_, out);
    } else {
      for (size_t i = 0; i < run_.size(); ++i) next_->Push(kReplacementCharacter, out);
    }
    run_.clear();
  }

  std::string run_;
  NextState next_;
};

// Strips a text that arrives in parts of whole characters.
class FusedStripState : public DecoderState {
 public:
  FusedStripState(std::string_view content, size_t start, size_t stop,
                  std::unique_ptr<DecoderState> next)
      : content_(content), start_(start), stop_(stop), next_(std::move(next)) {}

  void Push(std::string_view text, std::string* out) override {
    while (start_ > 0 && !text.empty()) {
      if (!text.starts_with(content_)) {
        start_ = 0;
        break;
      }
      text.remove_prefix(content_.size());
      --start_;
    }
    if (text.empty()) return;
    held_.append(text);
    // The last `stop_` characters are held back as long as they may be stripped.
    size_t kept = held_.size();
    for (size_t i = 0; i < stop_ && EndsWithContent(kept); ++i) kept -= content_.size();
    if (kept > 0) next_->Push(std::string_view(held_).substr(0, kept), out);
    held_.erase(0, kept);
  }
  void Finish(std::string* out) override { next_->Finish(out); }
  std::unique_ptr<DecoderState> Clone() const override {
    return std::make_unique<FusedStripState>(*this);
  }

 private:
  bool EndsWithContent(size_t size) const {
    return std::string_view(held_).substr(0, size).ends_with(content_);
  }

  std::string_view content_;
  size_t start_;  // characters that may still be stripped from the start
  size_t stop_;
  std::string held_;
  NextState next_;
};

class FusedStripStage : public DecoderStage {
 public:
  FusedStripStage(std::string content, size_t start, size_t stop)
      : content_(std::move(content)), start_(start), stop_(stop) {}

  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override {
    return std::make_unique<FusedStripState>(content_, start_, stop_, std::move(next));
  }
  std::string TokenBytes(std::string token) const override { return token; }

 private:
  std::string content_;  // one character
  size_t start_;
  size_t stop_;
};

class WordEndState : public DecoderState {
 public:
  WordEndState(std::string_view suffix, std::unique_ptr<DecoderState> next)
      : suffix_(suffix), next_(std::move(next)) {}

  void Push(std::string_view token, std::string* out) override {
    if (held_.has_value()) next_->Push(ReplaceAll(*held_, suffix_, " "), out);
    held_ = token;
  }
  void Finish(std::string* out) override {
    if (held_.has_value()) next_->Push(ReplaceAll(*held_, suffix_, ""), out);
    next_->Finish(out);
  }
  std::unique_ptr<DecoderState> Clone() const override {
    return std::make_unique<WordEndState>(*this);
  }

 private:
  std::string_view suffix_;
  std::optional<std::string> held_;
  NextState next_;
};

// Removes the spaces that stand before punctuation in written English.
std::string CleanUp(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kReplacements[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kReplacements) text = ReplaceAll(text, from, to);
  return text;
}

}  // namespace

std::unique_ptr<DecoderState> ByteLevelStage::Start(std::unique_ptr<DecoderState> next) const {
  return std::make_unique<ByteLevelState>(std::move(next));
}

std::string ByteLevelStage::TokenBytes(std::string token) const {
  std::string bytes;
  return AppendByteLevelBytes(token, &bytes) ? bytes : token;
}

std::unique_ptr<DecoderState> ByteFallbackStage::Start(std::unique_ptr<DecoderState> next) const {
  return std::make_unique<ByteFallbackState>(std::move(next));
}

std::string ByteFallbackStage::TokenBytes(std::string token) const {
  const std::optional<char> byte = ByteOfToken(token);
  return byte.has_value() ? std::string(1, *byte) : token;
}

std::unique_ptr<DecoderStage> ReplaceStage(std::string literal, std::string content) {
  return std::make_unique<MapStage>(
      [literal = std::move(literal), content = std::move(content)](std::string_view token, bool) {
        return ReplaceAll(token, literal, content);
      });
}

std::unique_ptr<DecoderStage> StripStage(std::string content, size_t start, size_t stop,
                                         bool fused) {
  if (fused) return std::make_unique<FusedStripStage>(std::move(content), start, stop);
  return std::make_unique<MapStage>(
      [content = std::move(content), start, stop](std::string_view token, bool) {
        for (size_t i = 0; i < start && token.starts_with(content); ++i) {
          token.remove_prefix(content.size());
        }
        for (size_t i = 0; i < stop && token.ends_with(content); ++i) {
          token.remove_suffix(content.size());
        }
        return std::string(token);
      });
}

std::unique_ptr<DecoderStage> MetaspaceStage(std::string replacement, bool drops_first) {
  return std::make_unique<MapStage>(
      [replacement = std::move(replacement), drops_first](std::string_view token, bool first) {
        return ReplaceAll(token, replacement, first && drops_first ? "" : " ");
      });
}

std::unique_ptr<DecoderStage> WordPieceStage(std::string prefix, bool cleanup) {
  return std::make_unique<MapStage>(
      [prefix = std::move(prefix), cleanup](std::string_view token, bool first) {
        std::string text(first ? "" : " ");
        if (!first && token.starts_with(prefix)) {
          text = token.substr(prefix.size());
        } else {
          text += token;
        }
        return cleanup ? CleanUp(std::move(text)) : text;
      });
}

std::unique_ptr<DecoderState> WordEndStage::Start(std::unique_ptr<DecoderState> next) const {
  return std::make_unique<WordEndState>(suffix_, std::move(next));
}

std::string WordEndStage::TokenBytes(std::string token) const {
  return ReplaceAll(token, suffix_, " ");
}

}  // namespace moeserve
