#include "server/bench/load_test/workload.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr int kMaxLength = 1 << 24;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

double UnitInterval(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// A random stream that depends only on a seed and a stream number. Streams are independent. Unlike
// with the distributions of the standard library, the values do not depend on the library's
// implementation.
class Stream {
 public:
  Stream(uint64_t seed, uint64_t stream)
      : state_(Mix(Mix(seed + kGolden) ^ Mix(stream ^ kGolden))) {}

  uint64_t Next() { return Mix(state_ += kGolden); }
  double Uniform() { return UnitInterval(Next()); }
  // Returns an integer in [0, n). The bias of n / 2^64 is negligible.
  uint64_t Below(uint64_t n) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(Next()) * n) >> 64);
  }

 private:
  uint64_t state_;
};

// Stream numbers that no request uses.
constexpr uint64_t kPrefixStream = uint64_t{1} << 63;
constexpr uint64_t kArrivalStream = kPrefixStream + 1;

int DrawLength(const LengthRange& range, LengthDistribution distribution, double u) {
  const double low = range.min;
  const double high = static_cast<double>(range.max) + 1.0;
  const double drawn = distribution == LengthDistribution::kUniform ? low + u * (high - low)
                                                                    : low * std::pow(high / low, u);
  return std::clamp(static_cast<int>(drawn), range.min, range.max);
}

absl::Status CheckRange(std::string_view name, const LengthRange& range) {
  if (range.min >= 1 && range.min <= range.max && range.max <= kMaxLength) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(name, ": expected 1 <= MIN <= MAX <= ", kMaxLength,
                                           ", found ", range.min, ':', range.max));
}

absl::Status CheckShare(std::string_view name, double share) {
  if (share >= 0.0 && share <= 1.0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat(name, ": expected a share from 0 to 1, found ", std::to_string(share)));
}

}  // namespace

Result<LengthRange> ParseLengthRange(std::string_view text) {
  const auto refuse = [&] {
    return absl::InvalidArgumentError(
        Concat("expected a number of tokens such as 128 or a range such as 16:512, from 1 to ",
               kMaxLength, ", found ", Quoted(text)));
  };
  const auto number = [](std::string_view part, int& out) {
    const char* const end = part.data() + part.size();
    const auto parsed = std::from_chars(part.data(), end, out);
    return parsed.ec == std::errc() && parsed.ptr == end;
  };
  LengthRange range;
  const size_t colon = text.find(':');
  if (!number(text.substr(0, colon), range.min)) return refuse();
  range.max = range.min;
  if (colon != std::string_view::npos && !number(text.substr(colon + 1), range.max)) {
    return refuse();
  }
  if (range.min < 1 || range.max < range.min || range.max > kMaxLength) return refuse();
  return range;
}

Result<Workload> Workload::Create(WorkloadOptions options) {
  MOESERVE_RETURN_IF_ERROR(CheckRange("prompt tokens", options.prompt));
  MOESERVE_RETURN_IF_ERROR(CheckRange("output tokens", options.output));
  MOESERVE_RETURN_IF_ERROR(CheckRange("long prompt tokens", options.long_prompt));
  MOESERVE_RETURN_IF_ERROR(CheckShare("long share", options.long_share));
  MOESERVE_RETURN_IF_ERROR(CheckShare("prefix share", options.prefix_share));
  if (options.prefix_tokens < 0 || options.prefix_tokens > kMaxLength) {
    return absl::InvalidArgumentError(
        Concat("prefix tokens: expected 0 to ", kMaxLength, ", found ", options.prefix_tokens));
  }
  if (options.texts.empty() && options.vocab_size < 1) {
    return absl::InvalidArgumentError("prompts of token ids need the size of the vocabulary");
  }
  if (!options.texts.empty() && (options.long_share > 0.0 || options.prefix_tokens > 0)) {
    return absl::InvalidArgumentError(
        "long prompts and shared prefixes are made of token ids: they do not go together with "
        "prompts from a file");
  }
  return Workload(std::move(options));
}

Workload::Workload(WorkloadOptions options) : options_(std::move(options)) {
  if (!options_.texts.empty()) return;
  Stream random(options_.seed, kPrefixStream);
  prefix_.resize(static_cast<size_t>(options_.prefix_tokens));
  for (TokenId& id : prefix_) id = static_cast<TokenId>(random.Below(options_.vocab_size));
}

LoadRequest Workload::Make(int64_t index) const {
  Stream random(options_.seed, static_cast<uint64_t>(index) & ~kPrefixStream);
  // Draw all values, used or not, so that an option changes only the part of a request that the
  // option concerns.
  const double long_draw = random.Uniform();
  const double prefix_draw = random.Uniform();
  const double prompt_draw = random.Uniform();
  const double output_draw = random.Uniform();
  LoadRequest request;
  request.index = index;
  request.output_tokens = DrawLength(options_.output, options_.lengths, output_draw);
  if (!options_.texts.empty()) {
    request.text = options_.texts[random.Below(options_.texts.size())];
    return request;
  }
  request.long_prompt = long_draw < options_.long_share;
  request.shared_prefix = !prefix_.empty() && prefix_draw < options_.prefix_share;
  const int length = DrawLength(request.long_prompt ? options_.long_prompt : options_.prompt,
                                options_.lengths, prompt_draw);
  if (request.shared_prefix) request.prompt = prefix_;
  request.prompt.reserve(request.prompt.size() + static_cast<size_t>(length));
  for (int i = 0; i < length; ++i) {
    request.prompt.push_back(static_cast<TokenId>(random.Below(options_.vocab_size)));
  }
  return request;
}

int Workload::max_total_tokens() const {
  if (!options_.texts.empty()) return options_.output.max;
  int prompt = options_.prompt.max;
  if (options_.long_share > 0.0) prompt = std::max(prompt, options_.long_prompt.max);
  return prompt + options_.prefix_tokens + options_.output.max;
}

PoissonArrivals::PoissonArrivals(double rate, uint64_t seed)
    : rate_(rate), state_(Stream(seed, kArrivalStream).Next()) {
  MOESERVE_CHECK(rate > 0.0, "the rate of arrivals is checked where it is read");
}

double PoissonArrivals::Next() {
  // u is uniform in (0, 1], so log(u) is finite. nextafter() keeps arrival times increasing.
  const double u = 1.0 - UnitInterval(Mix(state_ += kGolden));
  time_ = std::max(std::nextafter(time_, HUGE_VAL), time_ - std::log(u) / rate_);
  return time_;
}

}  // namespace moeserve::server
