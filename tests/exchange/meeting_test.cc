// How processes that were started one by one find each other.
#include "kernels/exchange/tcp/meeting.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "base/steady_clock.h"
#include "kernels/exchange/tcp/meeting_messages.h"
#include "kernels/exchange/tcp/sockets.h"
#include "tests/exchange/rank_threads.h"

namespace moeserve {
namespace {

// Runs the meeting of all options at the same time; returns their statuses.
std::vector<absl::Status> Meet(const std::vector<MeetingOptions>& options) {
  std::vector<absl::Status> statuses(options.size());
  OnThreads(static_cast<int>(options.size()), [&](int i) {
    statuses[static_cast<size_t>(i)] = MeetRanks(options[static_cast<size_t>(i)]).status();
  });
  return statuses;
}

TEST(MeetingTest, ConnectsEachWithEachOther) {
  for (const int ranks : {1, 2, 5}) {
    const int port = FreePort();
    OnThreads(ranks, [&](int rank) {
      // Later ranks come first.
      absl::SleepFor(absl::Milliseconds(30 * (ranks - rank)));
      auto peers = MeetRanks(LocalMeeting(rank, ranks, port));
      ASSERT_TRUE(peers.ok()) << peers.status();
      ASSERT_EQ(std::ssize(*peers), ranks);
      for (int r = 0; r < ranks; ++r) {
        const int fd = (*peers)[static_cast<size_t>(r)].get();
        if (r == rank) {
          EXPECT_LT(fd, 0);
          continue;
        }
        const char own = static_cast<char>(rank);
        EXPECT_EQ(send(fd, &own, 1, 0), 1);
        char other = -1;
        EXPECT_TRUE(WaitForEvent(fd, POLLIN, absl::Seconds(60)));
        EXPECT_EQ(recv(fd, &other, 1, 0), 1);
        EXPECT_EQ(other, r);
      }
    });
  }
}

TEST(MeetingTest, AnotherNumberOfRanksIsTheErrorOfAll) {
  const int port = FreePort();
  for (const absl::Status& status :
       Meet({LocalMeeting(0, 3, port), LocalMeeting(1, 3, port), LocalMeeting(2, 4, port)})) {
    EXPECT_EQ(status, absl::InvalidArgumentError("rank 2 on host-2: number of ranks: expected 3 as "
                                                 "rank 0 on host-0, found 4"));
  }
}

TEST(MeetingTest, TwoProcessesWithOneNumberAreTheErrorOfAll) {
  const int port = FreePort();
  MeetingOptions twin = LocalMeeting(1, 3, port);
  twin.name = "host-1b";
  for (const absl::Status& status :
       Meet({LocalMeeting(0, 3, port), LocalMeeting(1, 3, port), twin})) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(
        status.message() == "rank 1: expected one process, found two, on host-1 and host-1b" ||
        status.message() == "rank 1: expected one process, found two, on host-1b and host-1")
        << status;
  }
}

TEST(MeetingTest, MissingRanksAreNamed) {
  const int port = FreePort();
  MeetingOptions leader = LocalMeeting(0, 4, port);
  leader.timeout = absl::Milliseconds(300);
  for (const absl::Status& status : Meet({leader, LocalMeeting(2, 4, port)})) {
    EXPECT_EQ(status,
              absl::UnavailableError("ranks 1, 3 have not connected to rank 0 at 127.0.0.1:" +
                                     std::to_string(port) + " within 300ms"));
  }
}

TEST(MeetingTest, AnotherKeyIsRefusedAndNoReasonForOthersToEnd) {
  const int port = FreePort();
  MeetingOptions leader = LocalMeeting(0, 2, port);
  leader.timeout = absl::Seconds(2);
  MeetingOptions follower = LocalMeeting(1, 2, port);
  follower.key = "another";
  const std::vector<absl::Status> statuses = Meet({leader, follower});
  const std::string place = "rank 0 at 127.0.0.1:" + std::to_string(port);
  EXPECT_EQ(statuses[1], absl::PermissionDeniedError(place + ": it has another key"));
  EXPECT_EQ(statuses[0], absl::UnavailableError("rank 1 has not connected to " + place +
                                                " within 2s; 1 connections had another key"));
}

TEST(MeetingTest, NoLeaderIsAnErrorAfterTheTimeout) {
  MeetingOptions follower = LocalMeeting(1, 2, FreePort());
  follower.timeout = absl::Milliseconds(300);
  const absl::Status status = Meet({follower}).front();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("no meeting within 300ms: Connection refused"),
            std::string_view::npos)
      << status;
}

// A process that was started again takes the place of the one that has ended.
TEST(MeetingTest, ARankCanBeStartedAgain) {
  const int port = FreePort();
  // The connections of rank 0 stay open until all have met.
  Result<std::vector<Descriptor>> leader = absl::UnknownError("");
  OnThreads(2, [&](int thread) {
    if (thread == 0) {
      leader = MeetRanks(LocalMeeting(0, 3, port));
      return;
    }
    MeetingOptions impatient = LocalMeeting(1, 3, port);
    impatient.timeout = absl::Milliseconds(500);
    EXPECT_FALSE(MeetRanks(impatient).ok());
    // With the last rank, the leader must not take the one that has ended for a rank.
    OnThreads(2, [&](int i) {
      if (i == 0) absl::SleepFor(absl::Milliseconds(300));
      EXPECT_EQ(MeetRanks(LocalMeeting(1 + i, 3, port)).status(), absl::OkStatus());
    });
  });
  EXPECT_EQ(leader.status(), absl::OkStatus());
}

// Connections that say nothing, too much or nonsense do not disturb a meeting.
TEST(MeetingTest, StrangersAreIgnored) {
  const int port = FreePort();
  OnThreads(3, [&](int thread) {
    if (thread < 2) {
      if (thread == 1) absl::SleepFor(absl::Milliseconds(500));
      EXPECT_TRUE(MeetRanks(LocalMeeting(thread, 2, port)).ok());
      return;
    }
    std::vector<Descriptor> strangers;
    for (int i = 0; i < 20; ++i) {
      EachAddress("127.0.0.1", port, 0, [&](const addrinfo& address) {
        strangers.push_back(ConnectTo(address, absl::Seconds(1)));
        const std::string nonsense(static_cast<size_t>(i) * 50, 'x');
        send(strangers.back().get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL);
        return true;
      });
      absl::SleepFor(absl::Milliseconds(20));
    }
  });
}

TEST(MeetingMessagesTest, ProofsAreThoseOfRfc4231) {
  // HMAC-SHA256 of key "Jefe" and "what do ya want for nothing?", which has no zero byte: the
  // purpose ends with one, so the text is built around it.
  const std::string proof = MeetingProof("Jefe", "what", "", " do ya want for nothing?");
  EXPECT_EQ(proof.size(), kProofBytes);
  EXPECT_NE(proof, MeetingProof("Jefe", "wha", "t", " do ya want for nothing?"));
  EXPECT_NE(proof, MeetingProof("Jefe2", "what", "", " do ya want for nothing?"));
  EXPECT_EQ(proof, MeetingProof("Jefe", "what", "", " do ya want for nothing?"));
}

TEST(MeetingMessagesTest, EveryBitOfAHelloIsProven) {
  const std::string challenge(kNonceBytes, 'c');
  const RankHello hello{
      .rank = 3, .ranks = 4, .port = 70, .host = "h", .nonce = std::string(kNonceBytes, 'n')};
  const std::string bytes = SerializeHello(hello, "key", challenge);
  const auto parsed = ParseHello(bytes);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->rank, 3u);
  EXPECT_EQ(parsed->ranks, 4u);
  EXPECT_EQ(parsed->port, 70u);
  EXPECT_EQ(parsed->host, "h");
  EXPECT_TRUE(HelloIsProven(bytes, "key", challenge));
  EXPECT_FALSE(HelloIsProven(bytes, "kez", challenge));
  EXPECT_FALSE(HelloIsProven(bytes, "key", std::string(kNonceBytes, 'd')));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] ^= 1;
    EXPECT_FALSE(HelloIsProven(changed, "key", challenge)) << i;
  }
  EXPECT_FALSE(ParseHello(bytes.substr(1)).ok());
  EXPECT_FALSE(ParseHello(bytes + "x").ok());
}

TEST(MeetingMessagesTest, AnswersAreProvenAndBounded) {
  const std::string nonce(kNonceBytes, 'n');
  const std::string bytes = SerializeAnswer({.text = "10.0.0.1 5\n"}, "key", nonce);
  EXPECT_EQ(*AnswerBytes(bytes.substr(0, kAnswerHeaderBytes)), bytes.size());
  EXPECT_EQ(ParseAnswer(bytes, "key", nonce)->text, "10.0.0.1 5\n");
  EXPECT_FALSE(ParseAnswer(bytes, "kez", nonce).ok());
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] ^= 1;
    EXPECT_FALSE(ParseAnswer(changed, "key", nonce).ok()) << i;
  }
  const std::string error =
      SerializeAnswer({.status = absl::InvalidArgumentError("why")}, "key", nonce);
  EXPECT_EQ(ParseAnswer(error, "key", nonce)->status, absl::InvalidArgumentError("why"));
  EXPECT_FALSE(AnswerBytes("xxxxxxxx").ok());
}

TEST(MeetingMessagesTest, AddressesAreComplete) {
  const RankAddresses addresses = {{"10.0.0.1", 5}, {"fe80::1%eth0", 65535}};
  const std::string text = SerializeAddresses(addresses);
  EXPECT_EQ(*ParseAddresses(text, 2), addresses);
  for (const std::string_view wrong :
       {"", "10.0.0.1 5\n", "10.0.0.1 5\nx 6", "x 0\ny 1\n", "x 65536\ny 1\n", "x\ny 1\n",
        "a 1\nb 2\nc 3\n", "a -1\nb 2\n", "a 1 \nb 2\n"}) {
    EXPECT_FALSE(ParseAddresses(wrong, 2).ok()) << wrong;
  }
}

}  // namespace
}  // namespace moeserve
