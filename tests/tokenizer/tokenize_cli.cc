// Encodes and decodes texts for the comparison with Hugging Face's library (parity.py).
//
//   tokenize_cli MODEL_DIR INPUT OUTPUT [add_special] [no_parse_special] [skip_special] [ids]
//   tokenize_cli MODEL_DIR INPUT OUTPUT texts [add_special] [pairs] [cuts_begin] [limit=N]
//
// INPUT consists of records, each a 32-bit little-endian length and that many bytes of UTF-8 or,
// with `ids`, of 32-bit integers, which are only decoded. OUTPUT contains for each record the
// number of ids and the ids, as 32-bit integers, and the length and the bytes of the decoded text.
// Prints the time that encoding and decoding took. With `texts`, OUTPUT has for each record, or for
// each two with `pairs`, the number of tokens and all ids, types, special marks, begins and ends.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/tokenizer/tokenizer_folder.h"

namespace {

double Seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

void AppendU32(uint32_t value, std::string* out) {
  char bytes[4];
  std::memcpy(bytes, &value, 4);
  out->append(bytes, 4);
}

bool HasFlag(int argc, char** argv, std::string_view name) {
  for (int i = 4; i < argc; ++i) {
    if (argv[i] == name) return true;
  }
  return false;
}

// Returns the number after `name` among the flags; `otherwise` if there is none.
size_t NumberFlag(int argc, char** argv, std::string_view name, size_t otherwise) {
  for (int i = 4; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag.starts_with(name)) return std::stoull(std::string(flag.substr(name.size())));
  }
  return otherwise;
}

void AppendTexts(const moeserve::EncodedTexts& texts, std::string* out) {
  AppendU32(static_cast<uint32_t>(texts.ids.size()), out);
  for (const moeserve::TokenId id : texts.ids) AppendU32(static_cast<uint32_t>(id), out);
  for (const uint8_t type : texts.types) AppendU32(type, out);
  for (const uint8_t special : texts.special) AppendU32(special, out);
  for (const moeserve::TextSpan& span : texts.spans) {
    AppendU32(static_cast<uint32_t>(span.begin), out);
  }
  for (const moeserve::TextSpan& span : texts.spans) {
    AppendU32(static_cast<uint32_t>(span.end), out);
  }
}

absl::StatusOr<std::vector<moeserve::TokenId>> ReadIds(std::string_view bytes) {
  std::vector<moeserve::TokenId> ids(bytes.size() / sizeof(moeserve::TokenId));
  std::memcpy(ids.data(), bytes.data(), ids.size() * sizeof(moeserve::TokenId));
  return ids;
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  if (argc < 4) {
    std::fprintf(stderr, "usage: tokenize_cli MODEL_DIR INPUT OUTPUT [flags]\n");
    return 2;
  }
  const auto load_start = Clock::now();
  const auto tokenizer = moeserve::LoadTokenizerFolder(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", std::string(tokenizer.status().message()).c_str());
    return 1;
  }
  const double load_seconds = Seconds(Clock::now() - load_start);
  std::ifstream file(argv[2], std::ios::binary);
  const std::string input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const bool add_special = HasFlag(argc, argv, "add_special");
  const bool parse_special = !HasFlag(argc, argv, "no_parse_special");
  const bool skip_special = HasFlag(argc, argv, "skip_special");
  const bool given_ids = HasFlag(argc, argv, "ids");
  const bool texts = HasFlag(argc, argv, "texts");
  const bool pairs = HasFlag(argc, argv, "pairs");
  const moeserve::TokenLimit limit{.most = NumberFlag(argc, argv, "limit=", SIZE_MAX),
                                   .cuts_begin = HasFlag(argc, argv, "cuts_begin")};
  std::optional<std::string_view> first;  // of a pair

  std::string output;
  double encode_seconds = 0;
  double decode_seconds = 0;
  size_t text_bytes = 0;
  size_t token_count = 0;
  for (size_t pos = 0; pos + 4 <= input.size();) {
    uint32_t size;
    std::memcpy(&size, input.data() + pos, 4);
    pos += 4;
    if (size > input.size() - pos) {
      std::fprintf(stderr, "the input ends within a record\n");
      return 1;
    }
    const std::string_view text(input.data() + pos, size);
    pos += size;
    text_bytes += size;
    if (texts && pairs && !first.has_value()) {
      first = text;
      continue;
    }

    const auto encode_start = Clock::now();
    if (texts) {
      const auto encoded = first.has_value()
                               ? (*tokenizer)->EncodeTexts(*first, text, add_special, limit)
                               : (*tokenizer)->EncodeTexts(text, std::nullopt, add_special, limit);
      first.reset();
      if (!encoded.ok()) {
        std::fprintf(stderr, "%s\n", std::string(encoded.status().message()).c_str());
        return 1;
      }
      AppendTexts(*encoded, &output);
      token_count += encoded->ids.size();
      encode_seconds += Seconds(Clock::now() - encode_start);
      continue;
    }
    const auto ids =
        given_ids ? ReadIds(text) : (*tokenizer)->Encode(text, add_special, parse_special);
    const auto decode_start = Clock::now();
    if (!ids.ok()) {
      std::fprintf(stderr, "%s\n", std::string(ids.status().message()).c_str());
      return 1;
    }
    const auto decoded = (*tokenizer)->Decode(*ids, skip_special);
    decode_seconds += Seconds(Clock::now() - decode_start);
    encode_seconds += Seconds(decode_start - encode_start);
    if (!decoded.ok()) {
      std::fprintf(stderr, "%s\n", std::string(decoded.status().message()).c_str());
      return 1;
    }
    token_count += ids->size();
    AppendU32(static_cast<uint32_t>(ids->size()), &output);
    for (const moeserve::TokenId id : *ids) AppendU32(static_cast<uint32_t>(id), &output);
    AppendU32(static_cast<uint32_t>(decoded->size()), &output);
    output += *decoded;
  }
  std::ofstream(argv[3], std::ios::binary).write(output.data(), output.size());
  std::printf("load %.3f s, %zu bytes, %zu ids, encode %.3f s, decode %.3f s\n", load_seconds,
              text_bytes, token_count, encode_seconds, decode_seconds);
  return 0;
}
