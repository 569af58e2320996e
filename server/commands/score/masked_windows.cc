#include "server/commands/score/masked_windows.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace moeserve::server {

Result<SpecialTokens> FindSpecialTokens(const Tokenizer& tokenizer, std::string_view text) {
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> plain, tokenizer.Encode(text, false));
  MOESERVE_ASSIGN_OR_RETURN(std::vector<TokenId> whole, tokenizer.Encode(text, true));
  auto begin = std::search(whole.begin(), whole.end(), plain.begin(), plain.end());
  auto end = begin + std::ssize(plain);
  if (begin == whole.end() || plain.empty()) {
    // The tokenizer changes a text that special tokens surround: the first one begins texts.
    MOESERVE_ASSIGN_OR_RETURN(whole, tokenizer.Encode("", true));
    begin = end = whole.begin() + std::min<std::ptrdiff_t>(1, std::ssize(whole));
  }
  return SpecialTokens{.before = {whole.begin(), begin}, .after = {end, whole.end()}};
}

double MaskedWindows::Draw() { return std::ldexp(static_cast<double>(random_() >> 11), -53); }

void MaskedWindows::Add(const SpecialTokens& special, std::span<const TokenId> ids,
                        std::vector<Request>& requests) {
  const auto count = static_cast<int32_t>(ids.size());
  if (options_.rule == MaskRule::kEach) {
    for (int32_t i = 0; i < count; ++i) requests.push_back(Make(special, ids, {i}));
    return;
  }
  std::vector<int32_t> scored;
  for (int32_t i = 0; i < count; ++i) {
    if (Draw() < options_.share) scored.push_back(i);
  }
  if (scored.empty()) scored.push_back(static_cast<int32_t>(Draw() * count));
  requests.push_back(Make(special, ids, scored));
}

Request MaskedWindows::Make(const SpecialTokens& special, std::span<const TokenId> ids,
                            const std::vector<int32_t>& scored) {
  Request request;
  request.prompt = special.before;
  request.prompt.insert(request.prompt.end(), ids.begin(), ids.end());
  request.prompt.insert(request.prompt.end(), special.after.begin(), special.after.end());
  EncodeParams params;
  params.output = EncodeOutput::kTokens;
  const auto first = static_cast<int32_t>(special.before.size());
  for (const int32_t i : scored) {
    TokenId& token = request.prompt[static_cast<size_t>(first + i)];
    params.rows.push_back(first + i);
    params.own.push_back(token);
    const double draw = options_.rule == MaskRule::kBert ? Draw() : 0.0;
    if (draw < 0.8) {
      token = mask_;
    } else if (draw < 0.9) {
      token = static_cast<TokenId>(Draw() * vocab_size_);
    }
  }
  request.encode = std::move(params);
  return request;
}

}  // namespace moeserve::server
