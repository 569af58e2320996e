#include "engine/sample/output_text.h"

#include <algorithm>
#include <utility>

namespace moeserve {

OutputText::OutputText(const Tokenizer* tokenizer, bool skip_special_tokens,
                       std::vector<std::string> stop, bool include_stop, int min_tokens,
                       std::span<const TokenId> kept)
    : stop_(std::move(stop)), include_stop_(include_stop), before_stop_(min_tokens) {
  if (tokenizer != nullptr) decoder_.emplace(tokenizer, skip_special_tokens, kept);
}

std::string OutputText::Push(TokenId token) {
  if (!decoder_.has_value() || matched_.has_value()) return "";
  held_ += decoder_->Push(token);
  if (before_stop_ > 0) {
    --before_stop_;
    unstoppable_ = held_.size();
  }
  return Release(false);
}

std::string OutputText::Finish() {
  if (!decoder_.has_value() || matched_.has_value()) return "";
  held_ += decoder_->Finish();
  return Release(true);
}

std::string OutputText::Release(bool all) {
  size_t at = std::string::npos;
  for (const std::string& s : stop_) {
    const size_t begin = unstoppable_ < s.size() ? 0 : unstoppable_ - s.size() + 1;
    const size_t found = held_.find(s, begin);
    if (found < at) {
      at = found;
      matched_ = s;
    }
  }
  if (matched_.has_value()) {
    return held_.substr(0, include_stop_ ? at + matched_->size() : at);
  }
  size_t keep = 0;  // bytes at the end of held_ that may begin a stop string
  if (!all) {
    for (const std::string& s : stop_) {
      for (size_t n = std::min(s.size() - 1, held_.size()); n > keep; --n) {
        if (held_.compare(held_.size() - n, n, s, 0, n) == 0) keep = n;
      }
    }
  }
  std::string text = held_.substr(0, held_.size() - keep);
  held_.erase(0, text.size());
  unstoppable_ -= std::min(unstoppable_, text.size());
  return text;
}

}  // namespace moeserve
