// Compressed bodies of requests, and the headers about them. The first byte says in which pieces
// the rest arrives.

#include <algorithm>
#include <string>

#include "server/http/encoding/content_coding.h"
#include "server/http/encoding/gzip.h"
#include "tests/fuzz/fuzz.h"

namespace {

using moeserve::server::http::GzipDeflater;
using moeserve::server::http::GzipInflater;
using moeserve::server::http::Inflated;

constexpr size_t kLimit = 1 << 18;

struct Outcome {
  bool accepted = false;
  std::string text;
};

Outcome Inflate(std::string_view input, size_t piece, size_t room) {
  Outcome out;
  GzipInflater inflater(kLimit);
  while (!input.empty()) {
    std::string_view part = input.substr(0, piece);
    input.remove_prefix(part.size());
    Inflated result = Inflated::kPart;
    while (result == Inflated::kPart) {
      const size_t before = out.text.size();
      result = inflater.Inflate(part, room, out.text);
      MOESERVE_CHECK(out.text.size() - before <= room, "the room is kept");
    }
    if (result != Inflated::kAll) return out;
    MOESERVE_CHECK(out.text.size() <= kLimit, "the limit is kept");
  }
  out.accepted = inflater.complete();
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text = moeserve::testing::Text(data, size).substr(1);
  (void)moeserve::server::http::ParseContentEncoding(text);
  (void)moeserve::server::http::PrefersGzip(text);
  (void)moeserve::server::http::IsCompressible(text);
  const Outcome whole = Inflate(text, text.size(), 4096);
  const Outcome pieces = Inflate(text, 1 + data[0] % 16, 64 + data[0]);
  MOESERVE_CHECK(whole.accepted == pieces.accepted, "how the bytes arrive changes nothing");
  if (whole.accepted) {
    moeserve::testing::CountAccepted();
    MOESERVE_CHECK(whole.text == pieces.text, "how the bytes arrive changes nothing");
    std::string packed;
    GzipDeflater deflater;
    deflater.Deflate(whole.text, true, packed);
    const Outcome again = Inflate(packed, packed.size(), 4096);
    MOESERVE_CHECK(again.accepted && again.text == whole.text, "what is written is read");
  }
  return 0;
}
