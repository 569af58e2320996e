#include "server/http/health_probe.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server::testing {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);

std::string ProbeMessage(const absl::Status& status) { return std::string(status.message()); }

using HealthProbeTest = HttpTest;

TEST_F(HealthProbeTest, ReadyWhileServing) {
  Start();
  EXPECT_TRUE(ProbeReadiness({"127.0.0.1", port()}, kLong).ok());
  // On some systems, a client cannot connect to the wildcard address that a server listens on.
  EXPECT_TRUE(ProbeReadiness({"0.0.0.0", port()}, kLong).ok());
}

TEST_F(HealthProbeTest, NotReadyWhileLoadingAndDraining) {
  Start({}, {}, false);
  EXPECT_NE(ProbeMessage(ProbeReadiness({"127.0.0.1", port()}, kLong)).find("503"),
            std::string::npos);
  context_->SetServing(engine_, {}, nullptr);
  EXPECT_TRUE(ProbeReadiness({"127.0.0.1", port()}, kLong).ok());
  context_->SetDraining();
  EXPECT_NE(ProbeMessage(ProbeReadiness({"127.0.0.1", port()}, kLong)).find("503"),
            std::string::npos);
}

// A server that sends the same bytes to every connection. `hold` keeps connections open afterwards;
// `endless` sends the bytes again and again.
class Impostor {
 public:
  explicit Impostor(std::string bytes, bool hold = false, bool endless = false)
      : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener_, 4), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, bytes = std::move(bytes), hold, endless] {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      do {
        if (send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) break;
      } while (endless);
      char request[512];
      // Wait until the client closes: closing earlier, with unread bytes, would reset the
      // connection.
      if (hold) {
        while (recv(connection, request, sizeof(request), 0) > 0) continue;
      } else {
        recv(connection, request, sizeof(request), 0);
      }
      close(connection);
    });
  }
  ~Impostor() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

  absl::Status Probe(absl::Duration timeout = kLong) const {
    return ProbeReadiness({"127.0.0.1", port_}, timeout);
  }
  int port() const { return port_; }

 private:
  const int listener_;
  int port_ = 0;
  std::thread thread_;
};

TEST(HealthProbe, OnlyStatus200IsReady) {
  EXPECT_TRUE(Impostor("HTTP/1.1 200 OK\r\n\r\n").Probe().ok());
  EXPECT_TRUE(Impostor("HTTP/1.0 200\r\n\r\n").Probe().ok());
  for (const char* line : {"HTTP/1.1 204 No Content", "HTTP/1.1 2000", "HTTP/1.1 503 200",
                           "HTTP/2 200", "200 OK", "HTTP/1.1 200OK", "HTTP/1.1", ""}) {
    EXPECT_TRUE(absl::IsUnavailable(Impostor(std::string(line) + "\r\n\r\n").Probe())) << line;
  }
}

TEST(HealthProbe, HostileAnswersEnd) {
  EXPECT_NE(ProbeMessage(Impostor("").Probe()).find("closed"), std::string::npos);
  EXPECT_NE(ProbeMessage(Impostor("HTTP/1.1 200").Probe()).find("closed"), std::string::npos);
  EXPECT_NE(ProbeMessage(Impostor(std::string(4096, 'x'), false, true).Probe()).find("not HTTP"),
            std::string::npos);
  const std::string shown = ProbeMessage(Impostor("HTTP/1.1 \x1b[31m\r\n").Probe());
  EXPECT_EQ(shown.find('\x1b'), std::string::npos) << shown;
}

TEST(HealthProbe, SilenceEndsInTime) {
  const Impostor silent("", true);
  const absl::Time start = absl::Now();
  EXPECT_NE(ProbeMessage(silent.Probe(absl::Milliseconds(100))).find("in time"), std::string::npos);
  EXPECT_LT(absl::Now() - start, kLong);
}

TEST(HealthProbe, NobodyListens) {
  int free_port = 0;
  {
    const Impostor gone("");
    free_port = gone.port();
  }
  const absl::Status status = ProbeReadiness({"127.0.0.1", free_port}, kLong);
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_NE(ProbeMessage(status).find("127.0.0.1:" + std::to_string(free_port)), std::string::npos);
  EXPECT_TRUE(absl::IsUnavailable(ProbeReadiness({"host.invalid", 1}, kLong)));
}

}  // namespace
}  // namespace moeserve::server::testing
