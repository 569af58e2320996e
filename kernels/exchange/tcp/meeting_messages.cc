#include "kernels/exchange/tcp/meeting_messages.h"

#include <algorithm>
#include <charconv>

#include "base/check.h"
#include "base/error_text.h"
#include "base/sha256.h"

namespace moeserve {
namespace {

constexpr std::string_view kMagic = "moerank\n";
constexpr size_t kHostBytes = 64;
constexpr size_t kHashBlockBytes = 64;
constexpr uint32_t kOtherKey = 1000;  // no status has this code
constexpr size_t kMostAddressBytes = 64;

void AppendUint32(std::string& bytes, uint32_t value) {
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i) & 255);
}

uint32_t Uint32At(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  }
  return value;
}

}  // namespace

std::string MeetingProof(std::string_view key, std::string_view purpose, std::string_view nonce,
                         std::string_view message) {
  std::string block(key);
  if (block.size() > kHashBlockBytes) block = Sha256(block);
  block.resize(kHashBlockBytes, '\0');
  std::string inner = block;
  std::string outer = block;
  for (char& c : inner) c ^= 0x36;
  for (char& c : outer) c ^= 0x5c;
  // The nonce has a fixed size, and a purpose has no zero byte.
  inner.append(purpose).append(1, '\0').append(nonce).append(message);
  return Sha256(outer + Sha256(inner));
}

bool EqualSecrets(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string SerializeChallenge(std::string_view nonce) {
  MOESERVE_CHECK(nonce.size() == kNonceBytes, "a nonce has 32 bytes");
  return Concat(kMagic, nonce);
}

Result<std::string> ParseChallenge(std::string_view bytes) {
  if (bytes.size() != kChallengeBytes || !bytes.starts_with(kMagic)) {
    return absl::InvalidArgumentError("it is no rank of moeserve");
  }
  return std::string(bytes.substr(kMagic.size()));
}

std::string SerializeHello(const RankHello& hello, std::string_view key,
                           std::string_view challenge) {
  MOESERVE_CHECK(hello.nonce.size() == kNonceBytes, "a nonce has 32 bytes");
  std::string bytes;
  for (const uint32_t value : {hello.protocol, hello.rank, hello.ranks, hello.port}) {
    AppendUint32(bytes, value);
  }
  std::string host = hello.host.substr(0, kHostBytes);
  host.resize(kHostBytes, '\0');
  bytes += host + hello.nonce;
  return bytes + MeetingProof(key, "hello", challenge, bytes);
}

Result<RankHello> ParseHello(std::string_view bytes) {
  if (bytes.size() != kHelloBytes) return absl::InvalidArgumentError("it sent no greeting");
  RankHello hello{.protocol = Uint32At(bytes, 0),
                  .rank = Uint32At(bytes, 4),
                  .ranks = Uint32At(bytes, 8),
                  .port = Uint32At(bytes, 12),
                  .host = std::string(bytes.substr(16, kHostBytes)),
                  .nonce = std::string(bytes.substr(16 + kHostBytes, kNonceBytes))};
  hello.host.resize(std::min(hello.host.find('\0'), kHostBytes));
  if (hello.port > 65535) return absl::InvalidArgumentError("it sent no greeting");
  return hello;
}

bool HelloIsProven(std::string_view bytes, std::string_view key, std::string_view challenge) {
  if (bytes.size() != kHelloBytes) return false;
  const size_t signed_bytes = kHelloBytes - kProofBytes;
  return EqualSecrets(bytes.substr(signed_bytes),
                      MeetingProof(key, "hello", challenge, bytes.substr(0, signed_bytes)));
}

std::string SerializeAnswer(const MeetingAnswer& answer, std::string_view key,
                            std::string_view nonce) {
  const std::string message(answer.status.message());
  const std::string text = (answer.status.ok() ? answer.text : message).substr(0, kMostAnswerText);
  std::string bytes;
  AppendUint32(bytes,
               answer.other_key ? kOtherKey : static_cast<uint32_t>(answer.status.raw_code()));
  AppendUint32(bytes, static_cast<uint32_t>(answer.other_key ? 0 : text.size()));
  if (answer.other_key) return bytes + std::string(kProofBytes, '\0');
  bytes += text;
  return bytes + MeetingProof(key, "answer", nonce, bytes);
}

Result<size_t> AnswerBytes(std::string_view header) {
  if (header.size() < kAnswerHeaderBytes || Uint32At(header, 4) > kMostAnswerText) {
    return absl::InvalidArgumentError("it sent no answer");
  }
  return kAnswerHeaderBytes + Uint32At(header, 4) + kProofBytes;
}

Result<MeetingAnswer> ParseAnswer(std::string_view bytes, std::string_view key,
                                  std::string_view nonce) {
  MOESERVE_ASSIGN_OR_RETURN(const size_t size, AnswerBytes(bytes));
  if (bytes.size() != size) return absl::InvalidArgumentError("it sent no answer");
  const uint32_t code = Uint32At(bytes, 0);
  MeetingAnswer answer;
  if (code == kOtherKey) {
    answer.other_key = true;
    return answer;
  }
  const size_t signed_bytes = size - kProofBytes;
  if (!EqualSecrets(bytes.substr(signed_bytes),
                    MeetingProof(key, "answer", nonce, bytes.substr(0, signed_bytes)))) {
    return absl::PermissionDeniedError("it has another key");
  }
  const std::string text(bytes.substr(kAnswerHeaderBytes, signed_bytes - kAnswerHeaderBytes));
  if (code == 0) {
    answer.text = text;
  } else {
    answer.status = absl::Status(static_cast<absl::StatusCode>(code), text);
  }
  return answer;
}

std::string SerializeAddresses(const RankAddresses& addresses) {
  std::string text;
  for (const auto& [address, port] : addresses) text += Concat(address, ' ', port, '\n');
  return text;
}

Result<RankAddresses> ParseAddresses(std::string_view text, size_t count) {
  const auto broken = [] {
    return absl::InvalidArgumentError("rank 0 has not sent the addresses of all ranks");
  };
  RankAddresses addresses;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos || addresses.size() == count) return broken();
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || space > kMostAddressBytes) return broken();
    const std::string_view digits = line.substr(space + 1);
    int port = 0;
    const auto [last, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (error != std::errc() || last != digits.data() + digits.size() || port < 1 || port > 65535) {
      return broken();
    }
    addresses.emplace_back(line.substr(0, space), port);
  }
  if (addresses.size() != count) return broken();
  return addresses;
}

}  // namespace moeserve
