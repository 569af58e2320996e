#include "engine/text/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>

namespace moeserve {
namespace {

// Largest number of backtracking steps in one search. Real patterns need few; the limit stops
// patterns that would take exponential time.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr size_t kJitStackMin = 32 * 1024;
constexpr size_t kJitStackMax = 8 * 1024 * 1024;

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof(buffer)) < 0) return std::to_string(code);
  return reinterpret_cast<const char*>(buffer);
}

// Result memory of a search. Each thread has its own, so that a Regex is immutable.
struct MatchScratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStackMin, kJitStackMax, nullptr);

  MatchScratch() {
    if (context == nullptr) return;
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~MatchScratch() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
  MatchScratch(const MatchScratch&) = delete;
  MatchScratch& operator=(const MatchScratch&) = delete;
};

}  // namespace

void Regex::CodeDeleter::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

absl::StatusOr<Regex> Regex::Compile(const std::string& pattern) {
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  if (context == nullptr) return absl::ResourceExhaustedError("out of memory for a pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  // In Ruby's syntax ^ and $ match at line ends, hence MULTILINE. DOLLAR_ENDONLY has no effect
  // together with MULTILINE.
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_DOLLAR_ENDONLY |
                                       PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C,
                                   &error, &offset, context);
  pcre2_compile_context_free(context);
  if (code == nullptr) {
    return absl::InvalidArgumentError("pattern rejected: " + ErrorText(error));
  }
  Regex regex(code);
  // If the platform has no JIT, pcre2_match() interprets the pattern: slower, with equal matches.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return regex;
}

bool Regex::Finder::Next(Match* match) {
  static thread_local MatchScratch scratch;
  if (scratch.data == nullptr || scratch.context == nullptr) {
    status_ = absl::ResourceExhaustedError("out of memory for a search");
    return false;
  }
  while (position_ <= text_.size()) {
    // PCRE2 rejects a null subject, and an empty string_view may be null.
    const char* subject = text_.empty() ? "" : text_.data();
    const int result =
        pcre2_match(regex_->code_.get(), reinterpret_cast<PCRE2_SPTR>(subject), text_.size(),
                    position_, PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
    if (result == PCRE2_ERROR_NOMATCH) return false;
    if (result < 0) {
      status_ = absl::ResourceExhaustedError("pre-tokenizer pattern: " + ErrorText(result));
      return false;
    }
    const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(scratch.data);
    const size_t begin = offsets[0];
    const size_t end = offsets[1];
    if (begin == end && end == last_end_) {
      ++position_;
      while (position_ < text_.size() && (text_[position_] & 0xC0) == 0x80) ++position_;
      continue;
    }
    position_ = end;
    last_end_ = end;
    *match = {begin, end};
    return true;
  }
  return false;
}

}  // namespace moeserve
