#include "engine/statistics/measures/word_experts.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace moeserve {
namespace {

// A word in a text: its bytes, and which word it is.
struct FoundWord {
  size_t begin = 0, end = 0;
  int word = kOtherWord;
};

std::string LowerCase(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

bool IsWordAscii(unsigned char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// Returns the bytes of the character at `i` if it is part of a word; 0 if it is not.
size_t WordCharacter(std::string_view text, size_t i) {
  const auto byte = [&](size_t at) {
    return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
  };
  const unsigned char c = byte(i);
  if (c < 0x80) return IsWordAscii(c) ? 1 : 0;
  if (c == 0xc2 && byte(i + 1) <= 0xbf) return 0;                           // U+0080 to U+00BF
  if (c == 0xe2 && (byte(i + 1) == 0x80 || byte(i + 1) == 0x81)) return 0;  // U+2000 to U+206F
  if (c == 0xe3 && byte(i + 1) == 0x80 && byte(i + 2) <= 0x84) return 0;    // U+3000 to U+3004
  if (c == 0xef && byte(i + 1) == 0xbf && byte(i + 2) == 0xbd) return 0;    // U+FFFD
  size_t length = 1;
  while ((byte(i + length) & 0xc0) == 0x80) ++length;
  return length;
}

// Returns all words of a text, ascending.
std::vector<FoundWord> WordsOf(std::string_view text,
                               const std::unordered_map<std::string, int>& list) {
  std::vector<FoundWord> out;
  for (size_t i = 0; i < text.size();) {
    size_t end = i;
    while (end < text.size()) {
      if (const size_t length = WordCharacter(text, end); length > 0) {
        end += length;
      } else if (end > i && (text[end] == '\'' || text[end] == '-') && end + 1 < text.size() &&
                 WordCharacter(text, end + 1) > 0) {
        ++end;
      } else {
        break;
      }
    }
    if (end == i) {
      do ++i;
      while (i < text.size() && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80);
      continue;
    }
    const auto found = list.find(LowerCase(text.substr(i, end - i)));
    out.push_back({i, end, found == list.end() ? kOtherWord : found->second});
    i = end;
  }
  return out;
}

// Returns the bytes of the text that each token adds; a token of a part of a character has the
// bytes of the whole character. Special tokens have none.
std::vector<TextSpan> SpansOf(const Tokenizer& tokenizer, std::span<const TokenId> ids,
                              std::string& text) {
  std::vector<TextSpan> spans(ids.size());
  const std::unique_ptr<DecodeStream> stream = tokenizer.NewDecodeStream(true);
  std::vector<size_t> waiting;  // tokens whose text is not final yet
  const auto close = [&](size_t begin) {
    if (text.size() == begin) return;
    for (const size_t t : waiting) spans[t] = {begin, text.size()};
    waiting.clear();
  };
  for (size_t t = 0; t < ids.size(); ++t) {
    if (tokenizer.IsSpecial(ids[t])) {
      text += '\n';  // ends a word
      continue;
    }
    const size_t begin = text.size();
    waiting.push_back(t);
    stream->Push(ids[t], &text);
    close(begin);
  }
  const size_t begin = text.size();
  stream->Finish(&text);
  close(begin);
  return spans;
}

// Adds a token that chose `distinct` experts.
void Add(TokenSpread& to, size_t distinct) {
  ++to.tokens;
  if (to.histogram.size() <= distinct) to.histogram.resize(distinct + 1);
  ++to.histogram[distinct];
}

void SetMean(TokenSpread& spread, int blocks) {
  double sum = 0.0;
  for (size_t n = 0; n < spread.histogram.size(); ++n) {
    sum += static_cast<double>(n) * static_cast<double>(spread.histogram[n]);
  }
  if (spread.tokens > 0 && blocks > 0) {
    spread.mean = sum / static_cast<double>(spread.tokens) / blocks;
  }
}

}  // namespace

WordTokens FindWords(const Tokenizer& tokenizer, std::span<const TokenId> ids,
                     const std::vector<std::string>& list) {
  std::unordered_map<std::string, int> index;
  for (size_t w = 0; w < list.size(); ++w) {
    index.emplace(LowerCase(list[w]), static_cast<int>(w));
  }
  std::string text;
  const std::vector<TextSpan> spans = SpansOf(tokenizer, ids, text);
  const std::vector<FoundWord> words = WordsOf(text, index);
  WordTokens out;
  out.word.assign(ids.size(), kNoWord);
  out.occurrences.assign(list.size(), 0);
  for (const FoundWord& word : words) {
    if (word.word >= 0) ++out.occurrences[static_cast<size_t>(word.word)];
  }
  size_t at = 0;
  for (size_t t = 0; t < ids.size(); ++t) {
    // Spans ascend, so that words that end before this one are past.
    if (spans[t].end == spans[t].begin) continue;
    while (at < words.size() && words[at].end <= spans[t].begin) ++at;
    if (at < words.size() && words[at].begin < spans[t].end) out.word[t] = words[at].word;
  }
  return out;
}

WordStatistics SummarizeWords(const WordTokens& tokens, const RouteLayout& layout,
                              std::span<const BlockRoutes> routes) {
  WordStatistics out;
  out.words.resize(tokens.occurrences.size());
  for (size_t w = 0; w < out.words.size(); ++w) {
    out.words[w].occurrences = tokens.occurrences[w];
    for (const RoutedBlock& block : layout.blocks) {
      out.words[w].counts.emplace_back(static_cast<size_t>(block.num_experts));
    }
  }
  const bool split = std::any_of(layout.blocks.begin(), layout.blocks.end(),
                                 [](const RoutedBlock& b) { return b.sub_tokens > 1; });
  std::vector<uint16_t> chosen;
  for (const RoutedBlock& block : layout.blocks) {
    if (!split || block.sub_tokens > 1) ++out.diversity_blocks;
  }
  for (size_t t = 0; t < tokens.word.size(); ++t) {
    const int word = tokens.word[t];
    if (word == kNoWord) continue;
    size_t distinct = 0;
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      const auto heads = static_cast<size_t>(layout.blocks[b].sub_tokens);
      MOESERVE_CHECK((t + 1) * heads <= routes[b].offsets.size() - 1, "routes of all tokens");
      chosen.clear();
      for (size_t row = t * heads; row < (t + 1) * heads; ++row) {
        const auto experts = routes[b].ExpertsOf(row);
        chosen.insert(chosen.end(), experts.begin(), experts.end());
      }
      if (word >= 0) {
        for (const uint16_t e : chosen) ++out.words[static_cast<size_t>(word)].counts[b][e];
      }
      if (split && heads == 1) continue;
      std::sort(chosen.begin(), chosen.end());
      distinct += static_cast<size_t>(std::unique(chosen.begin(), chosen.end()) - chosen.begin());
    }
    if (word >= 0) ++out.words[static_cast<size_t>(word)].tokens;
    Add(word >= 0 ? out.listed : out.others, distinct);
  }
  SetMean(out.listed, out.diversity_blocks);
  SetMean(out.others, out.diversity_blocks);
  return out;
}

std::vector<BlockRoutes> RoutesOf(const RoutingRecord& record, const RouteLayout& layout) {
  std::vector<BlockRoutes> out(layout.blocks.size());
  for (int t = 0; t < record.tokens; ++t) {
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      const RoutedBlock& block = layout.blocks[b];
      for (int j = 0; j < block.sub_tokens; ++j) {
        const auto row = static_cast<size_t>(t * layout.rows_per_token + block.first_row + j);
        out[b].experts.insert(out[b].experts.end(), record.experts.begin() + record.offsets[row],
                              record.experts.begin() + record.offsets[row + 1]);
        out[b].offsets.push_back(out[b].experts.size());
      }
    }
  }
  return out;
}

}  // namespace moeserve
