#include "server/chat/block_writer.h"

#include <algorithm>
#include <utility>

namespace moeserve::server {

BlockWriter::BlockWriter(AnswerIdentity identity, const AnswerOptions& options,
                         const ChatAnswerRules& rules, const Tokenizer* tokenizer, bool stream)
    : identity_(std::move(identity)),
      options_(options),
      rules_(rules),
      tokenizer_(tokenizer),
      stream_(stream),
      splitter_(AnswerSplitter::Make(rules_.split, [this](int call) {
        return ToolCallId(*rules_.split.syntax, identity_.unique_id, 0, call);
      })) {}

absl::Status BlockWriter::Add(int /*index*/, const PreparedPrompt& prompt, OutputDelta delta) {
  if (!std::exchange(started_, true)) {
    first_output_ = SteadyNow();
    if (stream_) WriteBegin(static_cast<int>(prompt.ids.size()), events_);
  }
  if (options_.logprobs) {
    for (const TokenLogprob& logprob : delta.logprobs) {
      MOESERVE_ASSIGN_OR_RETURN(OrderedJson entry,
                                ChatLogprobJson(tokenizer_, logprob, options_.tokens_as_ids));
      logprobs_.push_back(std::move(entry));
    }
  }
  AssistantDelta message = splitter_->Push(delta.text);
  if (delta.finished) message.Append(splitter_->Finish());
  if (!message.reasoning.empty() && rules_.include_reasoning) {
    Continue(Block::Kind::kReasoning, message.reasoning);
  }
  if (!message.content.empty()) Continue(Block::Kind::kText, message.content);
  for (const ToolCallDelta& call : message.calls) {
    if (!call.id.empty()) {
      Block block;
      block.kind = Block::Kind::kCall;
      block.call_id = call.id;
      block.call_name = call.name;
      OpenBlock(std::move(block));
    }
    if (!call.arguments.empty()) Continue(Block::Kind::kCall, call.arguments);
  }
  if (open_ && blocks_.back().kind == Block::Kind::kReasoning) {
    reasoning_tokens_ += static_cast<int>(delta.tokens.size());
  }
  if (delta.finished) Finish(delta.finish_reason);
  delta.text.clear();
  end_.Add(std::move(delta), options_.return_token_ids);
  return absl::OkStatus();
}

void BlockWriter::Continue(Block::Kind kind, std::string_view piece) {
  if (!open_ || blocks_.back().kind != kind) {
    Block block;
    block.kind = kind;
    OpenBlock(std::move(block));
  }
  Block& block = blocks_.back();
  block.text += piece;
  OrderedJson logprobs = std::exchange(logprobs_, OrderedJson::array());
  if (kind == Block::Kind::kText) {
    block.logprobs.insert(block.logprobs.end(), logprobs.begin(), logprobs.end());
  }
  if (stream_) WriteDelta(block, piece, std::move(logprobs), events_);
}

void BlockWriter::OpenBlock(Block block) {
  CloseBlock();
  block.index = static_cast<int>(blocks_.size());
  blocks_.push_back(std::move(block));
  open_ = true;
  if (stream_) WriteOpen(blocks_.back(), events_);
}

void BlockWriter::CloseBlock() {
  if (!std::exchange(open_, false)) return;
  if (stream_) WriteClose(blocks_.back(), events_);
}

void BlockWriter::Finish(FinishReason reason) {
  const bool answered = !blocks_.empty() && blocks_.back().kind != Block::Kind::kReasoning;
  if (!answered && reason != FinishReason::kLength && AddsEmptyText()) OpenBlock({});
  CloseBlock();
}

void BlockWriter::AppendEvents(int /*index*/, const Usage& /*sums*/, std::string& out) {
  out += std::exchange(events_, {});
}

void BlockWriter::AppendEnd(const Usage& sums, std::string& out) {
  out += std::exchange(events_, {});
  WriteEnd(sums, out);
}

bool BlockWriter::has_calls() const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [](const Block& block) { return block.kind == Block::Kind::kCall; });
}

}  // namespace moeserve::server
