// The connections between the leader and its followers.
#include "engine/ranks/link.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "base/steady_clock.h"

namespace moeserve::testing {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr LinkOptions kPatient{.beat = absl::Milliseconds(20), .silence = kLong};

// The losses that one end of a link has reported.
class Losses {
 public:
  Link::OnLoss Sink() {
    return [this](int rank, const std::string& reason) {
      const MutexLock lock(mutex_);
      EXPECT_TRUE(reasons_.emplace(rank, reason).second) << "rank " << rank << " is lost twice";
      changed_.notify_all();
    };
  }
  // Waits for the loss of a rank and returns its reason.
  std::string Of(int rank) {
    MutexLock lock(mutex_);
    changed_.wait_for(
        lock, absl::ToChronoSeconds(kLong),
        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return reasons_.contains(rank); });
    return reasons_[rank];
  }
  size_t count() {
    const MutexLock lock(mutex_);
    return reasons_.size();
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::string> reasons_ ABSL_GUARDED_BY(mutex_);
};

// A leader and its followers in one process.
struct Linked {
  Losses at_leader;
  std::vector<Losses> at_followers;
  std::unique_ptr<Link> leader;
  std::vector<std::unique_ptr<Link>> followers;
};

std::unique_ptr<Linked> Start(int ranks, const LinkOptions& options,
                              const std::string& host = "127.0.0.1") {
  auto linked = std::make_unique<Linked>();
  auto leader = Link::Listen(host, ranks, options);
  EXPECT_TRUE(leader.ok()) << leader.status();
  linked->leader = *std::move(leader);
  auto accepted =
      std::async(std::launch::async, [&linked] { return linked->leader->Accept(kLong); });
  linked->at_followers = std::vector<Losses>(static_cast<size_t>(ranks - 1));
  for (int r = 1; r < ranks; ++r) {
    auto follower = Link::Connect(linked->leader->invitation(), r, kLong, options);
    EXPECT_TRUE(follower.ok()) << follower.status();
    linked->followers.push_back(*std::move(follower));
  }
  EXPECT_TRUE(accepted.get().ok());
  linked->leader->Watch(linked->at_leader.Sink());
  for (size_t i = 0; i < linked->followers.size(); ++i) {
    linked->followers[i]->Watch(linked->at_followers[i].Sink());
  }
  return linked;
}

// Returns a connection to the port of the invitation.
Descriptor Stranger(const std::string& invitation) {
  const size_t space = invitation.find(' ');
  int port = 0;
  std::from_chars(invitation.data() + space + 1, invitation.data() + invitation.size(), port);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Descriptor socket(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return socket;
}

TEST(LinkTest, AClosedConnectionIsALoss) {
  const auto linked = Start(4, kPatient);
  linked->followers[1].reset();
  EXPECT_EQ(linked->at_leader.Of(2), "its process has ended");
  linked->leader.reset();
  EXPECT_EQ(linked->at_followers[0].Of(0), "its process has ended");
  EXPECT_EQ(linked->at_followers[2].Of(0), "its process has ended");
  EXPECT_EQ(linked->at_leader.count(), 1u);
}

TEST(LinkTest, TheLeaderListensOnAllAddresses) {
  const auto linked = Start(3, kPatient, "");
  linked->followers[0].reset();
  EXPECT_EQ(linked->at_leader.Of(1), "its process has ended");
}

TEST(LinkTest, AReasonGoesBeforeTheLoss) {
  const auto linked = Start(2, kPatient);
  linked->followers[0]->SendError("no memory" + std::string(10'000, '.'));
  linked->followers[0].reset();
  const std::string reason = linked->at_leader.Of(1);
  EXPECT_EQ(reason.substr(0, 10), "no memory.");
  EXPECT_EQ(reason.size(), 4096u);
}

TEST(LinkTest, ALossOfAnotherRankIsPassedOn) {
  const auto linked = Start(4, kPatient);
  linked->followers[0]->SendLoss(3, "it sent nothing");
  EXPECT_EQ(linked->at_leader.Of(3), "it sent nothing");
  linked->followers[1]->SendLoss(4, "there is no such rank");
  EXPECT_EQ(linked->at_leader.Of(2), "it sent an unknown loss");
  EXPECT_EQ(linked->at_leader.count(), 2u);
  linked->leader.reset();  // before the followers, whose ends it would report, too
}

TEST(LinkTest, SilenceIsALoss) {
  // The followers beat so seldom that the leader misses them.
  auto leader = Link::Listen("127.0.0.1", 2, {.beat = kLong, .silence = absl::Milliseconds(50)});
  ASSERT_TRUE(leader.ok()) << leader.status();
  auto accepted = std::async(std::launch::async, [&] { return (*leader)->Accept(kLong); });
  auto follower = Link::Connect((*leader)->invitation(), 1, kLong, kPatient);
  ASSERT_TRUE(follower.ok()) << follower.status();
  ASSERT_TRUE(accepted.get().ok());
  Losses losses;
  (*leader)->Watch(losses.Sink());
  EXPECT_EQ(losses.Of(1), "nothing was heard from it for 50ms");
}

TEST(LinkTest, ARankOfWhichNothingIsHeardIsKnownBeforeItIsLost) {
  Losses losses;
  auto leader = Link::Listen("127.0.0.1", 3, {.beat = absl::Milliseconds(10), .silence = kLong});
  ASSERT_TRUE(leader.ok()) << leader.status();
  EXPECT_EQ((*leader)->SilentRank(), -1);
  auto accepted = std::async(std::launch::async, [&] { return (*leader)->Accept(kLong); });
  const LinkOptions never{.beat = kLong, .silence = kLong};
  auto beats = Link::Connect((*leader)->invitation(), 1, kLong, kPatient);
  auto silent = Link::Connect((*leader)->invitation(), 2, kLong, never);
  ASSERT_TRUE(beats.ok() && silent.ok() && accepted.get().ok());
  (*beats)->Watch(losses.Sink());
  (*leader)->Watch(losses.Sink());
  while ((*leader)->SilentRank() != 2) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(losses.count(), 0u);
  leader->reset();  // before the followers
}

TEST(LinkTest, BeatsKeepALinkAlive) {
  const auto linked = Start(2, {.beat = absl::Milliseconds(10), .silence = absl::Seconds(20)});
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(linked->at_leader.count(), 0u);
  EXPECT_EQ(linked->at_followers[0].count(), 0u);
}

TEST(LinkTest, AFollowerThatDoesNotEndIsKnown) {
  const auto linked = Start(3, kPatient);
  EXPECT_FALSE(linked->leader->Stop(absl::Milliseconds(20)));
  linked->leader.reset();
}

TEST(LinkTest, AfterAStopNothingIsLost) {
  const auto linked = Start(3, kPatient);
  std::vector<std::future<void>> ended;
  for (auto& follower : linked->followers) {
    ended.push_back(std::async(std::launch::async, [&follower] {
      EXPECT_TRUE(follower->Stop(kLong));  // returns when the leader has stopped
      follower.reset();
    }));
  }
  EXPECT_TRUE(linked->leader->Stop(kLong));
  linked->leader.reset();
  for (auto& end : ended) end.get();
  EXPECT_EQ(linked->at_leader.count(), 0u);
  for (Losses& losses : linked->at_followers) EXPECT_EQ(losses.count(), 0u);
}

TEST(LinkTest, AWakeUpIsNotMissed) {
  const auto linked = Start(2, kPatient);
  linked->leader->Wake();  // maybe before the wait
  const absl::Time begin = SteadyNow();
  linked->followers[0]->WaitForWake(kLong);
  EXPECT_LT(SteadyNow() - begin, kLong / 2);
  linked->followers[0]->WaitForWake(absl::Milliseconds(1));  // it counts once
}

TEST(LinkTest, StrangersAreNotAccepted) {
  auto leader = Link::Listen("127.0.0.1", 2, kPatient);
  ASSERT_TRUE(leader.ok()) << leader.status();
  const std::string& invitation = (*leader)->invitation();
  std::string forged = invitation;
  forged[0] = forged[0] == '0' ? '1' : '0';
  auto accepted = std::async(std::launch::async, [&] { return (*leader)->Accept(kLong); });
  // One says nothing, one something else, one has another key, one another rank.
  const Descriptor silent = Stranger(invitation);
  const Descriptor wrong = Stranger(invitation);
  const std::string request = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
  EXPECT_EQ(send(wrong.get(), request.data(), request.size(), MSG_NOSIGNAL), std::ssize(request));
  EXPECT_FALSE(Link::Connect(forged, 1, absl::Milliseconds(1), kPatient).ok());
  EXPECT_FALSE(Link::Connect(invitation, 2, absl::Milliseconds(1), kPatient).ok());
  EXPECT_FALSE(Link::Connect(invitation, 0, absl::Milliseconds(1), kPatient).ok());
  EXPECT_TRUE(Link::Connect(invitation, 1, kLong, kPatient).ok());
  EXPECT_TRUE(accepted.get().ok());
}

TEST(LinkTest, MissingRanksAreNamed) {
  auto leader = Link::Listen("127.0.0.1", 4, kPatient);
  ASSERT_TRUE(leader.ok()) << leader.status();
  auto accepted =
      std::async(std::launch::async, [&] { return (*leader)->Accept(absl::Seconds(2)); });
  const auto follower = Link::Connect((*leader)->invitation(), 2, kLong, kPatient);
  EXPECT_TRUE(follower.ok()) << follower.status();
  EXPECT_EQ(accepted.get().message(), "ranks 1, 3 have not connected within 2s");
}

TEST(LinkTest, AnAddressWithoutALeaderIsNamed) {
  std::string invitation;
  {
    auto leader = Link::Listen("127.0.0.1", 2, kPatient);
    ASSERT_TRUE(leader.ok()) << leader.status();
    invitation = (*leader)->invitation();
  }
  const auto follower = Link::Connect(invitation, 1, absl::Milliseconds(1), kPatient);
  ASSERT_FALSE(follower.ok());
  EXPECT_NE(follower.status().message().find("127.0.0.1: Connection refused"), std::string::npos)
      << follower.status();
  EXPECT_FALSE(Link::Connect("nonsense", 1, absl::Milliseconds(1), kPatient).ok());
  EXPECT_FALSE(Link::Listen("192.0.2.1", 2, kPatient).ok());
}

}  // namespace
}  // namespace moeserve::testing
