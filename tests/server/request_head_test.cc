#include "server/rpc/http2/request_head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/http2_frames.h"

namespace moeserve::server::rpc {
namespace {

constexpr uint8_t kHeadReset = kRstStream;

struct HeadCase {
  Fields changed;      // replaces the fields of kCall with the same names, "" leaves one out
  std::string status;  // of HTTP; "reset" for RST_STREAM, "" if the call is passed on
  std::string code;
  std::string text;
};

TEST(RequestHead, IsChecked) {
  const std::vector<HeadCase> cases = {
      {{}, "", "", ""},
      {{{"grpc-encoding", "gzip"}}, "", "", ""},
      {{{"grpc-encoding", "identity"}, {"grpc-timeout", "99999999H"}}, "", "", ""},
      {{{"content-type", "application/grpc+proto; a=b"}}, "", "", ""},
      {{{":authority", ""}, {"host", "a"}}, "", "", ""},
      {{{"a-bin", "AAE="}, {"b-bin", "AAE,AA=="}, {"c", " spaces "}}, "", "", ""},
      {{{"a-bin", std::string("\0\1\n", 3)}}, "", "", ""},
      {{{":method", "GET"}}, "405", "12", "POST"},
      {{{"content-type", "application/json"}}, "415", "3", "application/json"},
      {{{"content-type", "application/grpc-web"}}, "415", "3", "content-type"},
      {{{"content-type", ""}}, "415", "3", "content-type"},
      {{{":authority", ""}}, "400", "3", "authority"},
      {{{"te", ""}}, "200", "3", "trailers"},
      {{{":scheme", "ftp"}}, "200", "3", "scheme"},
      {{{"grpc-encoding", "snappy"}}, "200", "12", "\"snappy\""},
      {{{"grpc-timeout", "123456789S"}}, "200", "3", "grpc-timeout"},
      {{{"grpc-timeout", "-1S"}}, "200", "3", "grpc-timeout"},
      {{{"grpc-timeout", "S"}}, "200", "3", "grpc-timeout"},
      {{{"grpc-timeout", "5"}}, "200", "3", "grpc-timeout"},
      {{{"a-bin", "AAE=="}, {"b-bin", "@@@@"}}, "200", "3", "-bin"},
      {{{"a-bin", "AAF"}}, "200", "3", "base64"},
      {{{"a-bin", "AAAAA"}}, "200", "3", "base64"},
      {{{":path", ""}}, "reset", "", ""},
      {{{":path", "a.B/C"}}, "reset", "", ""},
      {{{":method", ""}}, "reset", "", ""},
      {{{":scheme", ""}}, "reset", "", ""},
      {{{"Upper", "x"}}, "reset", "", ""},
      {{{"connection", "close"}}, "reset", "", ""},
      {{{"te", "gzip"}}, "reset", "", ""},
      {{{"a", "x\r\ny: z"}}, "reset", "", ""},
      {{{"a", std::string("x\0y", 3)}}, "reset", "", ""},
      {{{"a b", "x"}}, "reset", "", ""},
      {{{":status", "200"}}, "reset", "", ""}};
  for (const HeadCase& c : cases) {
    HeaderFields fields;
    Fields rest = c.changed;
    for (auto field : kCall) {
      const auto changed = std::ranges::find(rest, field.first, &Fields::value_type::first);
      if (changed != rest.end()) {
        field.second = changed->second;
        rest.erase(changed);
      }
      if (!field.second.empty()) fields.push_back(field);
    }
    fields.insert(fields.end(), rest.begin(), rest.end());
    const std::string shown = c.changed.empty() ? "" : c.changed[0].first + c.changed[0].second;
    RequestHead head;
    const std::optional<Refusal> refusal = CheckRequestHead(fields, head);
    ASSERT_EQ(refusal.has_value(), !c.status.empty()) << shown;
    if (!refusal) continue;
    const std::vector<FoundFrame> frames = Frames(RefusalFrames(7, *refusal, false, true));
    ASSERT_EQ(frames.size(), 1u) << shown;
    EXPECT_EQ(frames[0].header.stream, 7u);
    if (c.status == "reset") {
      EXPECT_EQ(frames[0].header.type, kHeadReset) << shown;
      EXPECT_EQ(frames[0].payload, std::string("\0\0\0\1", 4)) << shown;
      continue;
    }
    const HeaderFields answer = Decoded(frames[0].payload);
    EXPECT_EQ(ValueOf(answer, ":status"), c.status) << shown;
    EXPECT_EQ(ValueOf(answer, "grpc-status"), c.code) << shown;
    EXPECT_NE(ValueOf(answer, "grpc-message").find(c.text), std::string::npos)
        << shown << ": " << ValueOf(answer, "grpc-message");
  }
}

TEST(RequestHead, HasEveryFieldOnce) {
  for (const auto& [field, reset] :
       std::vector<std::pair<Fields::value_type, bool>>{{{"grpc-timeout", "1S"}, false},
                                                        {{"grpc-encoding", "gzip"}, false},
                                                        {{":path", "/a.B/C"}, true},
                                                        {{":method", "POST"}, true}}) {
    HeaderFields fields = {field};
    for (const auto& other : kCall) fields.push_back(other);
    if (!reset) std::rotate(fields.begin(), fields.begin() + 1, fields.end());
    if (!reset) fields.push_back(field);
    RequestHead head;
    const std::optional<Refusal> refusal = CheckRequestHead(fields, head);
    ASSERT_TRUE(refusal) << field.first;
    EXPECT_EQ(refusal->reset == Http2Error::kProtocolError, reset) << field.first;
  }
}

TEST(RequestHead, ListsOfBinaryValuesAreSplit) {
  HeaderFields fields = kCall;
  fields.emplace_back("a-bin", "AAE=, AA==,");
  RequestHead head;
  ASSERT_FALSE(CheckRequestHead(fields, head));
  const HeaderFields expected = {{"a-bin", "AAE="}, {"a-bin", "AA=="}, {"a-bin", ""}};
  EXPECT_TRUE(std::equal(fields.end() - 3, fields.end(), expected.begin()));
}

}  // namespace
}  // namespace moeserve::server::rpc
