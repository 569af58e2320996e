// Responses whose parts end with an exception.
#include <memory>
#include <stdexcept>

#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

using Pending = HttpTest;

// Throws after so many parts.
class FaultyResponse final : public http::PendingResponse {
 public:
  explicit FaultyResponse(int parts) : parts_(parts) {}
  http::Progress Next() override {
    if (parts_-- == 0) throw std::runtime_error("scripted");
    return http::StreamPart{"data: 1\n\n", false};
  }

 private:
  int parts_;
};

TEST_F(Pending, ExceptionsEndTheRequest) {
  Start();
  for (const int parts : {0, 1}) {
    router_->Add("GET", parts == 0 ? "/faulty" : "/faulty-stream", http::Access::Open(),
                 http::Work::kQuick, [parts](const http::Request&) -> http::Handled {
                   return std::make_unique<FaultyResponse>(parts);
                 });
  }
  const RawResponse response = Exchange(Get("/faulty"));
  EXPECT_EQ(response.status, 500);
  EXPECT_EQ(Error(response)["code"], "internal_error");
  EXPECT_EQ(response.body.find("scripted"), std::string::npos);
  // A stream that has begun is cut off.
  RawClient client(port());
  client.Send(Get("/faulty-stream"));
  EXPECT_TRUE(client.IsClosed());
  EXPECT_NE(client.received().find("data: 1"), std::string::npos);
  EXPECT_FALSE(client.received().ends_with("0\r\n\r\n"));
}

}  // namespace
}  // namespace moeserve::server::testing
