// What processes tell each other when they connect to become ranks. Numbers are little endian.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"

namespace moeserve {

// Changes with every change of these messages.
inline constexpr uint32_t kMeetingProtocol = 1;
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kProofBytes = 32;

// Returns the proof that its sender knows `key`: HMAC-SHA256, 32 bytes. `purpose` keeps proofs of
// one message from being used as those of another.
std::string MeetingProof(std::string_view key, std::string_view purpose, std::string_view nonce,
                         std::string_view message);
// Compares without telling by its time where two texts differ.
bool EqualSecrets(std::string_view a, std::string_view b);

// The first message of the process that was connected to: it must be answered with a proof.
std::string SerializeChallenge(std::string_view nonce);
inline constexpr size_t kChallengeBytes = 8 + kNonceBytes;
// Returns the nonce. InvalidArgument if the bytes are something else.
Result<std::string> ParseChallenge(std::string_view bytes);

// What the process that has connected tells of itself.
struct RankHello {
  uint32_t protocol = kMeetingProtocol;
  uint32_t rank = 0;
  uint32_t ranks = 0;      // of which it is one
  uint32_t port = 0;       // at which it listens for others
  std::string host = {};   // the name of its machine, cut to 64 bytes
  std::string nonce = {};  // 32 random bytes, which the answer's proof contains
};
inline constexpr size_t kHelloBytes = 4 * 4 + 64 + kNonceBytes + kProofBytes;

// Returns the message with its proof for a challenge, and the message of these bytes. The parser
// does not check the proof; InvalidArgument if the size is another.
std::string SerializeHello(const RankHello& hello, std::string_view key,
                           std::string_view challenge);
Result<RankHello> ParseHello(std::string_view bytes);
// Whether the proof is that of the key.
bool HelloIsProven(std::string_view bytes, std::string_view key, std::string_view challenge);

// What the process answers that was connected to: an error that all ranks shall have, or a text.
struct MeetingAnswer {
  absl::Status status = {};
  std::string text = {};   // if the status is OK, at most kMostAnswerText bytes
  bool other_key = false;  // the hello's proof was wrong; the answer then has none
};
inline constexpr size_t kMostAnswerText = 1 << 14;
inline constexpr size_t kAnswerHeaderBytes = 8;

std::string SerializeAnswer(const MeetingAnswer& answer, std::string_view key,
                            std::string_view nonce);
// Returns how many bytes the answer has that begins with this header. InvalidArgument if there is
// no such answer.
Result<size_t> AnswerBytes(std::string_view header);
// Returns the answer of complete bytes. InvalidArgument if they are none, PermissionDenied if the
// proof is wrong.
Result<MeetingAnswer> ParseAnswer(std::string_view bytes, std::string_view key,
                                  std::string_view nonce);

// The addresses and ports at which ranks 1, 2, ... listen, as the leader's answer tells them.
using RankAddresses = std::vector<std::pair<std::string, int>>;
std::string SerializeAddresses(const RankAddresses& addresses);
// InvalidArgument if the text does not have `count` addresses.
Result<RankAddresses> ParseAddresses(std::string_view text, size_t count);

}  // namespace moeserve
