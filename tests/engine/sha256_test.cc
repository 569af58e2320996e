#include "base/sha256.h"

#include <string>

#include "gtest/gtest.h"

namespace moeserve {
namespace {

std::string Hex(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

TEST(Sha256, StandardExamples) {
  EXPECT_EQ(Hex(Sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Covers every position at which a text can end within a block: compares one digest over the
// digests of 300 lengths.
TEST(Sha256, EveryLength) {
  std::string text;
  std::string digests;
  for (int n = 0; n < 300; ++n) {
    digests += Sha256(text);
    text += static_cast<char>(n * 7);
  }
  EXPECT_EQ(Hex(Sha256(digests)),
            "f65f14b090e805017546322e618401d41f0710c213e013a5131eb38bbe8f367f");
}

}  // namespace
}  // namespace moeserve
