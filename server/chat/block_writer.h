// The answer to a chat as a sequence of blocks: reasoning, text and calls of tools, in the order in
// which the model writes them.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/steady_clock.h"
#include "server/answers/answer_writer.h"
#include "server/base/json.h"
#include "server/chat/chat_response.h"

namespace moeserve::server {

// Collects the blocks of an answer with one choice, and reports what happens to them to a format of
// events. Derived classes write the format.
class BlockWriter : public AnswerWriter {
 public:
  absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) final;
  void AppendEvents(int index, const Usage& sums, std::string& out) final;
  void AppendEnd(const Usage& sums, std::string& out) final;
  bool keeps_streamed_output() const final { return true; }

 protected:
  struct Block {
    enum class Kind { kReasoning, kText, kCall };
    Kind kind = Kind::kText;
    int index = 0;
    std::string text;  // so far; the arguments of a call
    std::string call_id;
    std::string call_name;
    OrderedJson logprobs = OrderedJson::array();  // of text, if requested
  };

  // `tokenizer` may be null and must outlive this object. Without `stream`, none of the functions
  // that write events is called.
  BlockWriter(AnswerIdentity identity, const AnswerOptions& options, const ChatAnswerRules& rules,
              const Tokenizer* tokenizer, bool stream);

  // Append events to `out`. WriteDelta() is called after `piece` was added to `block`; `logprobs`
  // is a list. WriteBegin() comes first, and WriteEnd() last, after every block was closed.
  virtual void WriteBegin(int prompt_tokens, std::string& out) = 0;
  virtual void WriteOpen(const Block& block, std::string& out) = 0;
  virtual void WriteDelta(const Block& block, std::string_view piece, OrderedJson logprobs,
                          std::string& out) = 0;
  virtual void WriteClose(const Block& block, std::string& out) = 0;
  virtual void WriteEnd(const Usage& sums, std::string& out) = 0;
  // Returns whether an answer without text and calls, unless the limit of tokens cut it, gets a
  // block of empty text.
  virtual bool AddsEmptyText() const { return false; }

  const std::vector<Block>& blocks() const { return blocks_; }
  // How the answer ended; without text.
  const ChoicePart& end() const { return end_; }
  // Whether the answer has calls, for the model's reason to stop.
  bool has_calls() const;
  int reasoning_tokens() const { return reasoning_tokens_; }
  // When the first output came; the far past if none has.
  absl::Time first_output() const { return first_output_; }

  const AnswerIdentity identity_;
  const AnswerOptions options_;

 private:
  void Continue(Block::Kind kind, std::string_view piece);
  void OpenBlock(Block block);
  void CloseBlock();
  void Finish(FinishReason reason);

  const ChatAnswerRules rules_;
  const Tokenizer* const tokenizer_;
  const bool stream_;
  std::unique_ptr<AnswerSplitter> splitter_;
  std::vector<Block> blocks_;
  bool open_ = false;                            // whether the last block is open
  bool started_ = false;                         // whether any output has come
  OrderedJson logprobs_ = OrderedJson::array();  // not given to a block yet
  std::string events_;                           // not sent yet
  ChoicePart end_;
  int reasoning_tokens_ = 0;
  absl::Time first_output_ = absl::InfinitePast();
};

}  // namespace moeserve::server
