#include "engine/text/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "base/status.h"

namespace moeserve {
namespace {

// Backtracking steps that compiled code may take from one position. Real patterns need few. PCRE2
// does not tell how many a search took, so a search that needs more is repeated by
// SearchByPosition().
constexpr uint32_t kFastLimit = 1000;
// SearchByPosition() tries each position with this limit first, then with growing ones.
constexpr uint32_t kFirstLimit = 128;
constexpr uint32_t kLimitGrowth = 8;
// What a SearchLimit allows.
constexpr int64_t kSteps = 1'000'000;
constexpr int64_t kStepsPerByte = 200;
constexpr int64_t kNanoseconds = 50'000'000;
constexpr int64_t kNanosecondsPerByte = 2000;
// What one call in the middle of a search may take, for a text of up to kSmallText bytes.
constexpr double kStepsPerCall = 64e6;
constexpr size_t kSmallText = 16 * 1024;
constexpr uint32_t kHeapKiB = 16 * 1024;
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
    pcre2_set_heap_limit(context, kHeapKiB);
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

thread_local SearchLimit* current_limit = nullptr;

MatchScratch& Scratch() {
  static thread_local MatchScratch scratch;
  return scratch;
}

// Returns for how many positions one call may search with `needed` steps for each. A large text is
// not encoded by a thread that others wait for, and may have long runs.
size_t MostPositions(size_t text_bytes, uint32_t needed) {
  const double size = std::max(1.0, static_cast<double>(text_bytes) / kSmallText);
  return std::max<size_t>(1, static_cast<size_t>(kStepsPerCall * size * size / needed));
}

// The time that this thread has computed. Unlike wall-clock time, it does not depend on how busy
// the machine is.
int64_t ThreadNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

SearchLimit::SearchLimit(size_t text_bytes) : outer_(current_limit) {
  if (outer_ != nullptr) return;
  const auto bytes = static_cast<int64_t>(std::min(text_bytes, size_t{1} << 30));
  steps_left_ = kSteps + kStepsPerByte * bytes;
  cpu_end_ns_ = ThreadNanoseconds() + kNanoseconds + kNanosecondsPerByte * bytes;
  current_limit = this;
}

SearchLimit::~SearchLimit() {
  if (current_limit == this) current_limit = nullptr;
}

absl::Status SearchLimit::status() const {
  if (!(outer_ == nullptr ? this : outer_)->exceeded_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the patterns of the model's tokenizer need too much work for this text");
}

bool SearchLimit::Take(int64_t steps) {
  exceeded_ = exceeded_ || steps > steps_left_;
  if (!exceeded_) steps_left_ -= steps;
  return !exceeded_;
}

bool SearchLimit::HasTime() {
  exceeded_ = exceeded_ || ThreadNanoseconds() > cpu_end_ns_;
  return !exceeded_;
}

bool SearchLimit::HasTimeMostly() {
  constexpr uint32_t kCallsPerLook = 64;
  return ++calls_ % kCallsPerLook == 0 ? HasTime() : !exceeded_;
}

void Regex::CodeDeleter::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

absl::StatusOr<Regex> Regex::Compile(const std::string& pattern) {
  MOESERVE_ASSIGN_OR_RETURN(Code code, CompileCode(pattern, 0));
  MOESERVE_ASSIGN_OR_RETURN(Code anchored, CompileCode(pattern, PCRE2_ANCHORED));
  return Regex(std::move(code), std::move(anchored));
}

absl::StatusOr<Regex::Code> Regex::CompileCode(const std::string& pattern, uint32_t options) {
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  if (context == nullptr) return absl::ResourceExhaustedError("out of memory for a pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  // In Ruby's syntax ^ and $ match at line ends, hence MULTILINE. DOLLAR_ENDONLY has no effect
  // together with MULTILINE.
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_DOLLAR_ENDONLY |
                                       PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C |
                                       PCRE2_USE_OFFSET_LIMIT | options,
                                   &error, &offset, context);
  pcre2_compile_context_free(context);
  if (code == nullptr) {
    return absl::InvalidArgumentError("pattern rejected: " + ErrorText(error));
  }
  // If the platform has no JIT, pcre2_match() interprets the pattern: slower, with equal matches.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return Code(code);
}

int Regex::Finder::SearchAt(SearchLimit& limit, size_t at, uint32_t& needed) {
  MatchScratch& scratch = Scratch();
  for (uint32_t steps = kFirstLimit;; steps *= kLimitGrowth) {
    if (!limit.Take(steps) || !limit.HasTime()) return PCRE2_ERROR_MATCHLIMIT;
    needed = std::max(needed, steps);
    pcre2_set_match_limit(scratch.context, steps);
    const int result =
        pcre2_match(regex_->anchored_.get(), reinterpret_cast<PCRE2_SPTR>(text_.data()),
                    text_.size(), at, PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
    if (result != PCRE2_ERROR_MATCHLIMIT) return result;
  }
}

int Regex::Finder::SearchByPosition(SearchLimit& limit) {
  MatchScratch& scratch = Scratch();
  uint32_t needed = kFastLimit;
  const auto next_character = [this](size_t at) {
    while (at < text_.size() && (text_[at] & 0xC0) == 0x80) ++at;
    return at;
  };
  for (size_t at = position_; at <= text_.size();) {
    int result = SearchAt(limit, at, needed);
    if (result != PCRE2_ERROR_NOMATCH) return result;
    at = next_character(at + 1);
    // The JIT recognises that a run which fails to match at its first character also fails at the
    // others, but only within one call. So the positions that follow are searched together, in
    // windows that grow while there is time.
    const size_t most = MostPositions(text_.size(), needed);
    for (size_t window = 16; at <= text_.size(); window *= 2) {
      const size_t size = std::min(window, most);
      if (!limit.HasTime()) return PCRE2_ERROR_MATCHLIMIT;
      pcre2_set_match_limit(scratch.context, needed);
      pcre2_set_offset_limit(scratch.context, at + size - 1);
      result = pcre2_match(regex_->code_.get(), reinterpret_cast<PCRE2_SPTR>(text_.data()),
                           text_.size(), at, PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
      pcre2_set_offset_limit(scratch.context, PCRE2_UNSET);
      if (result == PCRE2_ERROR_MATCHLIMIT) break;  // some position needs more steps
      if (result != PCRE2_ERROR_NOMATCH) return result;
      at = next_character(at + size);
    }
  }
  return PCRE2_ERROR_NOMATCH;
}

int Regex::Finder::Search() {
  SearchLimit& limit = *current_limit;
  if (!limit.HasTimeMostly()) return PCRE2_ERROR_MATCHLIMIT;
  // PCRE2 rejects a null subject, and an empty string_view may be null.
  if (text_.empty()) text_ = "";
  MatchScratch& scratch = Scratch();
  pcre2_set_match_limit(scratch.context, kFastLimit);
  const int result =
      pcre2_match(regex_->code_.get(), reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                  position_, PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
  return result == PCRE2_ERROR_MATCHLIMIT ? SearchByPosition(limit) : result;
}

bool Regex::Finder::Next(Match* match) {
  MatchScratch& scratch = Scratch();
  if (scratch.data == nullptr || scratch.context == nullptr) {
    status_ = absl::ResourceExhaustedError("out of memory for a search");
    return false;
  }
  while (position_ <= text_.size()) {
    const int result = Search();
    if (result == PCRE2_ERROR_NOMATCH) return false;
    if (result < 0) {
      status_ = limit_.status();
      if (status_.ok()) {
        status_ = absl::InvalidArgumentError(
            "a pattern of the model's tokenizer cannot be searched for in this text: " +
            ErrorText(result));
      }
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
