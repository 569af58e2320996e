// Compressed bodies of requests and responses.
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/http/encoding/content_coding.h"
#include "server/http/encoding/gzip.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using http::ContentCoding;
using http::GzipDeflater;
using http::GzipInflater;
using http::Inflated;
using Json = nlohmann::json;

constexpr size_t kMiB = 1 << 20;

std::string Gzip(std::string_view text) {
  GzipDeflater deflater;
  std::string out;
  deflater.Deflate(text, true, out);
  return out;
}

// Returns the text about a thousand times smaller if it has one letter only.
std::string SmallestGzip(std::string_view text) {
  z_stream z = {};
  EXPECT_EQ(deflateInit2(&z, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&z, text.size()), '\0');
  z.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

// Inflates `text` in pieces of `piece` bytes, with room for `most` bytes at a time.
std::pair<Inflated, std::string> Inflate(const std::string& text, size_t piece = 1 << 20,
                                         size_t most = 1 << 15, size_t limit = 64 * kMiB) {
  GzipInflater inflater(limit);
  std::string out;
  for (size_t at = 0; at < text.size(); at += piece) {
    std::string_view part = std::string_view(text).substr(at, piece);
    Inflated result = Inflated::kPart;
    while (result == Inflated::kPart) result = inflater.Inflate(part, most, out);
    if (result != Inflated::kAll) return {result, out};
    EXPECT_TRUE(part.empty());
  }
  return {inflater.complete() ? Inflated::kAll : Inflated::kPart, out};
}

// Returns text that compresses to about a half.
std::string Letters(size_t size) {
  std::mt19937 random(1);
  std::string out(size, ' ');
  for (char& c : out) c = static_cast<char>('a' + random() % 16);
  return out;
}

TEST(ContentCoding, Names) {
  for (const char* name : {"", "identity", " Identity "}) {
    EXPECT_EQ(http::ParseContentEncoding(name), ContentCoding::kIdentity) << name;
  }
  for (const char* name : {"gzip", "GZIP", "x-gzip"}) {
    EXPECT_EQ(http::ParseContentEncoding(name), ContentCoding::kGzip) << name;
  }
  for (const char* name : {"br", "deflate", "gzip, gzip", "zstd"}) {
    EXPECT_EQ(http::ParseContentEncoding(name), ContentCoding::kOther) << name;
  }
}

TEST(ContentCoding, QualitiesAreRespected) {
  for (const char* yes : {"gzip", "deflate, gzip;q=0.5", "GZip ; Q=1.000", "*", "br, *;q=0.1",
                          "x-gzip", "gzip;q=0.5, identity;q=0.5", "identity;q=0, gzip;q=0.001"}) {
    EXPECT_TRUE(http::PrefersGzip(yes)) << yes;
  }
  for (const char* no : {"", "br", "identity", "gzip;q=0", "gzip;q=0.0", "*;q=0", "*, gzip;q=0",
                         "gzip;q=0.5, identity", "gzip;q=x", "gzip;q=", "gzip;q=2", "gzip;q=0.5000",
                         "gzip;level=1"}) {
    EXPECT_FALSE(http::PrefersGzip(no)) << no;
  }
}

TEST(Gzip, RoundTripsInAnyPieces) {
  for (const std::string& text : {std::string(), std::string("a"), Letters(100'000)}) {
    const std::string packed = Gzip(text);
    for (const size_t piece : {1ul, 7ul, 1000ul, 1ul << 20}) {
      for (const size_t most : {1ul, 1000ul, 1ul << 20}) {
        if (text.size() / most > 10'000 && piece < 1000) continue;
        EXPECT_EQ(Inflate(packed, piece, most), std::pair(Inflated::kAll, text));
      }
    }
  }
  EXPECT_LT(Gzip(Letters(100'000)).size(), 70'000u);
}

TEST(Gzip, DeflatesInParts) {
  const std::string text = Letters(300'000);
  GzipDeflater deflater;
  std::string out;
  for (size_t at = 0; at < text.size(); at += 50'000) {
    deflater.Deflate(std::string_view(text).substr(at, 50'000), at + 50'000 == text.size(), out);
  }
  EXPECT_EQ(Inflate(out), std::pair(Inflated::kAll, text));
}

TEST(Gzip, SeveralMembers) {
  EXPECT_EQ(Inflate(Gzip("ab") + Gzip("") + Gzip("c")),
            std::pair(Inflated::kAll, std::string("abc")));
  EXPECT_EQ(Inflate(Gzip("ab") + "xxx").first, Inflated::kBad);
  EXPECT_EQ(Inflate(Gzip("ab") + Gzip("c").substr(0, 5)).first, Inflated::kPart);
}

TEST(Gzip, EveryCutAndEveryFlippedByteIsNoticed) {
  const std::string text = Letters(300);
  const std::string packed = Gzip(text);
  for (size_t size = 0; size < packed.size(); ++size) {
    EXPECT_EQ(Inflate(packed.substr(0, size)).first, Inflated::kPart) << size;
  }
  for (size_t at = 0; at < packed.size(); ++at) {
    std::string bad = packed;
    bad[at] = static_cast<char>(bad[at] ^ 0x20);
    const auto [result, out] = Inflate(bad);
    // The time, the flags and the system in the header say nothing about the text.
    if (at >= 4 && at < 10) continue;
    EXPECT_TRUE(result != Inflated::kAll || out == text) << at;
    if (at >= 10) {
      EXPECT_NE(result, Inflated::kAll) << at;
    }
  }
}

TEST(Gzip, BombsAreStopped) {
  const std::string zeros = SmallestGzip(std::string(64 * kMiB, '\0'));
  const auto [result, out] = Inflate(zeros);
  EXPECT_EQ(result, Inflated::kTooLarge);
  EXPECT_LT(out.size(), 2 * kMiB) << "out of proportion";
  EXPECT_EQ(Inflate(SmallestGzip(std::string(kMiB, '\0'))).first, Inflated::kAll)
      << "small all the same";
  EXPECT_EQ(Inflate(Gzip(Letters(1001)), 1000, 100, 1000).first, Inflated::kTooLarge);
  EXPECT_EQ(Inflate(Gzip(Letters(1000)), 1000, 100, 1000).first, Inflated::kAll);
}

class GzipRequests : public HttpTest {
 protected:
  static std::string Packed(const std::string& body, const std::string& coding = "gzip") {
    return Post("/v1/completions", body, "Content-Encoding: " + coding + "\r\n");
  }
};

TEST_F(GzipRequests, AreReadLikePlainOnes) {
  Start();
  const std::string body = R"({"prompt": "abc", "max_tokens": 1})";
  for (const char* coding : {"gzip", "x-gzip", "GZIP"}) {
    EXPECT_EQ(Exchange(Packed(Gzip(body), coding)).status, 200) << coding;
  }
  ASSERT_EQ(engine_->submitted().back().prompt.size(), 3u);
  RawClient client(port());
  for (const char c : Packed(Gzip(body))) client.Send(std::string(1, c));
  client.Send(Get("/version"));
  EXPECT_EQ(client.ReadResponse().status, 200);
  EXPECT_EQ(client.ReadResponse().status, 200) << "the connection goes on";
  EXPECT_EQ(Exchange(Post("/v1/completions", body, "Content-Encoding: identity\r\n")).status, 200);
}

TEST_F(GzipRequests, Chunked) {
  Start();
  const std::string packed = Gzip(R"({"prompt": "abc", "max_tokens": 1})");
  std::string request =
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
      "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const char c : packed) request += std::string("1\r\n") + c + "\r\n";
  EXPECT_EQ(Exchange(request + "0\r\n\r\n").status, 200);
}

TEST_F(GzipRequests, OtherCodingsAreRefused) {
  Start();
  const RawResponse refused = Exchange(Packed("x", "br"));
  EXPECT_EQ(refused.status, 415);
  EXPECT_EQ(refused.headers.at("accept-encoding"), "gzip");
  EXPECT_EQ(Error(refused)["code"], "unsupported_media_type");
}

TEST_F(GzipRequests, BadDataIsRefused) {
  Start();
  const std::string packed = Gzip(R"({"prompt": "abc", "max_tokens": 1})");
  for (const std::string& bad :
       {std::string(), std::string("{}"), packed.substr(0, packed.size() - 1), packed + "x"}) {
    const RawResponse refused = Exchange(Packed(bad));
    EXPECT_EQ(refused.status, 400);
    EXPECT_EQ(Error(refused)["code"], "invalid_value");
  }
}

TEST_F(GzipRequests, TheLimitCountsInflatedBytes) {
  ServerSettings settings;
  settings.http.max_body_bytes = 100'000;
  Start({}, settings);
  const auto status = [&](size_t size) {
    std::string body = R"({"prompt": "abc", "max_tokens": 1, "x": ")";
    body += Letters(size - body.size() - 2) + "\"}";
    return Exchange(Packed(Gzip(body))).status;
  };
  EXPECT_EQ(status(100'000), 200);
  EXPECT_EQ(status(100'001), 413);
  EXPECT_EQ(Exchange(Packed(SmallestGzip(std::string(64 * kMiB, ' ')))).status, 413);
  EXPECT_EQ(Exchange(Packed(Gzip(R"({"prompt": "abc"})"))).status, 200);
}

TEST_F(GzipRequests, InflatedBytesAreCharged) {
  ServerSettings settings;
  settings.request_memory = 8 * kMiB;
  Start({}, settings);
  // Out of half of the memory, three times the size is charged while the text grows.
  EXPECT_EQ(Exchange(Packed(Gzip(std::string(kMiB, ' ') + R"({"prompt": "a"})"))).status, 200);
  const RawResponse refused = Exchange(Packed(Gzip(Letters(3 * kMiB))));
  EXPECT_EQ(refused.status, 413);
  EXPECT_EQ(Error(refused)["code"], "request_too_large");
  EXPECT_EQ(context_->memory()->used(), 0u);
}

class GzipResponses : public HttpTest {
 protected:
  RawResponse Read(const std::string& path, const std::string& coding = "gzip") {
    return Exchange(Get(path, "Accept-Encoding: " + coding + "\r\n"));
  }
};

TEST_F(GzipResponses, HaveTheSameText) {
  Start();
  const auto [result, text] = Inflate(Read("/dashboard/main.js").body);
  EXPECT_EQ(result, Inflated::kAll);
  const RawResponse plain = Exchange(Get("/dashboard/main.js"));
  EXPECT_EQ(text, plain.body);
  EXPECT_FALSE(plain.headers.contains("content-encoding"));
  EXPECT_EQ(plain.headers.at("vary"), "Accept-Encoding");
  const RawResponse packed = Read("/dashboard/main.js");
  EXPECT_EQ(packed.headers.at("content-encoding"), "gzip");
  EXPECT_EQ(packed.headers.at("vary"), "Accept-Encoding");
  EXPECT_LT(packed.body.size(), plain.body.size());
  EXPECT_EQ(packed.headers.at("etag"), "W/" + plain.headers.at("etag"));
  EXPECT_EQ(
      Exchange(Get("/dashboard/main.js", "If-None-Match: " + packed.headers.at("etag") + "\r\n"))
          .status,
      304);
  EXPECT_EQ(Read("/metrics").headers.at("content-encoding"), "gzip");
  EXPECT_NE(Inflate(Read("/metrics").body).second.find("moeserve_"), std::string::npos);
}

TEST_F(GzipResponses, OnlyForClientsThatWantThem) {
  Start();
  for (const char* coding : {"br", "identity", "gzip;q=0", "gzip;q=0.1, identity"}) {
    EXPECT_FALSE(Read("/metrics", coding).headers.contains("content-encoding")) << coding;
  }
  EXPECT_EQ(Read("/metrics", "br, gzip;q=0.1").headers.at("content-encoding"), "gzip");
}

TEST_F(GzipResponses, SmallOnesAndStreamsArePlain) {
  Start();
  EXPECT_FALSE(Read("/version").headers.contains("content-encoding"));
  const RawResponse stream =
      Complete(R"({"prompt": "a", "stream": true})", "Accept-Encoding: gzip\r\n");
  EXPECT_FALSE(stream.headers.contains("content-encoding"));
  EXPECT_EQ(Events(stream.body).back(), "[DONE]");
}

TEST_F(GzipResponses, LargeAnswersAndHeads) {
  Script script;
  script.endless = true;
  Start(script);
  const std::string body = R"({"prompt": "a", "max_tokens": 200, "logprobs": 5})";
  const RawResponse plain = Complete(body);
  const RawResponse packed = Complete(body, "Accept-Encoding: gzip\r\n");
  ASSERT_EQ(packed.headers.at("content-encoding"), "gzip");
  const Json inflated = Json::parse(Inflate(packed.body).second);
  EXPECT_EQ(inflated["choices"], Json::parse(plain.body)["choices"]);
  RawClient client(port());
  client.Send("HEAD /dashboard/main.js HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\n\r\n");
  const RawResponse head = client.ReadResponse(true);
  EXPECT_EQ(head.headers.at("content-length"),
            std::to_string(Read("/dashboard/main.js").body.size()));
}

}  // namespace
}  // namespace moeserve::server::testing
