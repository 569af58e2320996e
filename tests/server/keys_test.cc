#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "server/base/api_error.h"
#include "server/keys/admission.h"
#include "server/keys/key_file.h"
#include "server/keys/key_store.h"

namespace moeserve::server {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kPlace[] = "FILE";

std::string Hex(std::string_view key) { return absl::BytesToHexString(KeyDigest(key)); }

KeySpec KeysSpec(std::string name, std::string_view key, KeyLimits limits = {}) {
  KeySpec spec;
  spec.name = std::move(name);
  spec.digest = KeyDigest(key);
  spec.limits = std::move(limits);
  return spec;
}

std::shared_ptr<const ApiKey> Key(KeyLimits limits, ApiKey::Clock::time_point now) {
  return std::make_shared<const ApiKey>(KeysSpec("k", "secret", std::move(limits)),
                                        std::make_shared<KeyUsage>(1), now);
}

TEST(KeyFile, Lines) {
  const auto keys = ParseKeyFile("# two\n alpha \n\nbeta\r\nalpha\n", kPlace);
  ASSERT_TRUE(keys.ok()) << keys.status();
  ASSERT_EQ(keys->size(), 2u) << "a repeated line counts once";
  EXPECT_EQ((*keys)[0].digest, KeyDigest("alpha"));
  EXPECT_EQ((*keys)[1].digest, KeyDigest("beta"));
  EXPECT_TRUE((*keys)[0].scopes.Has(Scope::kAdmin));
  EXPECT_FALSE((*keys)[0].limits.min_priority.has_value());
  for (const char* empty : {"", "\n", "# nothing\n"}) {
    EXPECT_FALSE(ParseKeyFile(empty, kPlace).ok()) << empty;
  }
}

TEST(KeyFile, Json) {
  const std::string text = R"(
    {"keys": [
      {"name": "team-a", "key": "alpha", "scopes": ["generate", "routing"],
       "limits": {"requests_per_minute": 10, "tokens_per_minute": 1000,
                  "max_concurrent_requests": 2, "min_priority": -5, "models": ["m"]},
       "expires": "2030-01-02T03:04:05Z", "cache_group": "shared"},
      {"name": "b", "sha256": ")" +
                           Hex("beta") + R"(", "scopes": ["admin"]}]})";
  const auto keys = ParseKeyFile(text, kPlace);
  ASSERT_TRUE(keys.ok()) << keys.status();
  ASSERT_EQ(keys->size(), 2u);
  const KeySpec& a = (*keys)[0];
  EXPECT_EQ(a.name, "team-a");
  EXPECT_EQ(a.digest, KeyDigest("alpha"));
  EXPECT_EQ(a.scopes.Text(","), "generate,routing");
  EXPECT_EQ(a.limits.requests_per_minute, 10);
  EXPECT_EQ(a.limits.tokens_per_minute, 1000);
  EXPECT_EQ(a.limits.max_concurrent_requests, 2);
  EXPECT_EQ(a.limits.min_priority, -5);
  EXPECT_EQ(a.limits.models, std::vector<std::string>{"m"});
  EXPECT_EQ(a.expires, absl::FromUnixSeconds(1893553445));
  EXPECT_EQ(a.cache_group, "shared");
  const KeySpec& b = (*keys)[1];
  EXPECT_EQ(b.digest, KeyDigest("beta"));
  EXPECT_EQ(b.limits.min_priority, 0);
  EXPECT_FALSE(b.expires.has_value());
}

struct WrongFile {
  const char* text;
  const char* message;  // a part of the error
};

TEST(KeyFile, ErrorsNameThePlaceAndNeverTheKey) {
  const WrongFile cases[] = {
      {R"({"keys": [})", "expected JSON"},
      {R"({"keys": [{"key": "SECRET", SECRET}]})", "expected JSON"},
      {R"({"keys": {"SECRET": 1, "SECRET": 2}})", "two fields of the same name"},
      {R"({})", "found 0 fields"},
      {R"({"keys": [], "more": 1})", "found 2 fields"},
      {R"({"keys": []})", "found a list of 0 values"},
      {R"({"keys": {"SECRET": {}}})", "found an object"},
      {R"({"keys": ["SECRET"]})", "FILE, keys[0]: expected an object, found a string"},
      {R"({"keys": [{"key": "SECRET", "scopes": ["admin"]}]})", "field 'name'"},
      {R"({"keys": [{"name": "SECRET 1", "key": "a", "scopes": ["admin"]}]})",
       "keys[0], field 'name': expected 1 to 64 letters"},
      {R"({"keys": [{"name": "a", "scopes": ["admin"]}]})", "found neither"},
      {R"({"keys": [{"name": "a", "key": "SECRET", "sha256": "SECRET", "scopes": ["admin"]}]})",
       "keys[0] (a), field 'key': expected either 'key' or 'sha256', found both"},
      {R"({"keys": [{"name": "a", "key": "SECRET SECRET", "scopes": ["admin"]}]})",
       "visible ASCII characters, found 13 bytes"},
      {R"({"keys": [{"name": "a", "key": "", "scopes": ["admin"]}]})", "found 0 bytes"},
      {R"({"keys": [{"name": "a", "key": 5, "scopes": ["admin"]}]})", "a string, found 5"},
      {R"({"keys": [{"name": "a", "sha256": "SECRET", "scopes": ["admin"]}]})",
       "field 'sha256': expected 64 hexadecimal digits, found 6 characters"},
      {R"({"keys": [{"name": "a", "key": "SECRET"}]})", "field 'scopes'"},
      {R"({"keys": [{"name": "a", "key": "SECRET", "scopes": []}]})", "field 'scopes'"},
      {R"({"keys": [{"name": "a", "key": "SECRET", "scopes": ["root"]}]})", "found \"root\""},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["SECRET"]}]})", "field 'scopes'"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"], "SECRET": 1}]})",
       "expected the fields name, key"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"], "limit": {}}]})",
       "found \"limit\""},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"], "limits": "SECRET"}]})",
       "field 'limits': expected an object"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"requests_per_minute": 0}}]})",
       "field 'limits.requests_per_minute': expected an integer from 1 to 1000000000000, found 0"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"tokens_per_minute": 1e30}}]})",
       "field 'limits.tokens_per_minute'"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"tokens_per_minute": 18446744073709551615}}]})",
       "field 'limits.tokens_per_minute'"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"max_concurrent_requests": 1.5}}]})",
       "field 'limits.max_concurrent_requests'"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"min_priority": -1001}}]})",
       "field 'limits.min_priority': expected an integer from -1000 to 1000, found -1001"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"models": []}}]})",
       "field 'limits.models'"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"],
                     "limits": {"priority": 1}}]})",
       "found \"priority\""},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"], "expires": "SECRET"}]})",
       "field 'expires': expected a time"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"], "cache_group": ""}]})",
       "field 'cache_group'"},
      {R"({"keys": [{"name": "a", "key": "x", "scopes": ["admin"]},
                    {"name": "a", "key": "y", "scopes": ["admin"]}]})",
       "keys[1], field 'name': expected another name than that of keys[0], found \"a\""},
      {R"({"keys": [{"name": "a", "key": "SECRET", "scopes": ["admin"]},
                    {"name": "b", "key": "SECRET", "scopes": ["admin"]}]})",
       "keys[1] (b): expected another key than that of keys[0], found the same"},
  };
  for (const WrongFile& wrong : cases) {
    const auto keys = ParseKeyFile(wrong.text, kPlace);
    ASSERT_FALSE(keys.ok()) << wrong.text;
    EXPECT_EQ(keys.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(keys.status().message());
    EXPECT_THAT(message, HasSubstr(wrong.message)) << wrong.text;
    EXPECT_THAT(message, HasSubstr(kPlace)) << wrong.text;
    EXPECT_THAT(message, Not(HasSubstr("SECRET"))) << wrong.text;
  }
}

TEST(KeyFile, FirstKeyAndMode) {
  const std::filesystem::path file =
      std::filesystem::path(::testing::TempDir()) / "keys_test_first_key";
  const auto write = [&](const std::string& text) { std::ofstream(file) << text; };
  write("# c\nalpha\nbeta\n");
  EXPECT_EQ(ReadFirstKey(file).value(), "alpha");
  write(R"({"keys": [{"name": "a", "sha256": ")" + Hex("x") + R"(", "scopes": ["admin"]},
                     {"name": "b", "key": "beta", "scopes": ["admin"]}]})");
  EXPECT_EQ(ReadFirstKey(file).value(), "beta");
  write(R"({"keys": [{"name": "a", "sha256": ")" + Hex("x") + R"(", "scopes": ["admin"]}]})");
  EXPECT_FALSE(ReadFirstKey(file).ok());
  write(std::string((4 << 20) + 1, 'x'));
  EXPECT_FALSE(ReadKeyFile(file).ok());
  std::filesystem::permissions(file, std::filesystem::perms(0644));
  EXPECT_TRUE(ReadableByOthers(file));
  std::filesystem::permissions(file, std::filesystem::perms(0640));
  EXPECT_FALSE(ReadableByOthers(file));
  std::filesystem::remove(file);
  EXPECT_TRUE(absl::IsNotFound(ReadKeyFile(file).status()));
}

TEST(TokenBucket, RefillsSteadily) {
  const auto start = TokenBucket::Clock::now();
  TokenBucket bucket(60, start);
  EXPECT_EQ(bucket.Take(60, start), 0ns);
  EXPECT_EQ(bucket.Remaining(start), 0);
  EXPECT_EQ(bucket.UntilFull(start), 60s);
  EXPECT_EQ(bucket.Take(2, start), 2s);
  EXPECT_GT(bucket.Take(2, start + 1999ms), 0ns);
  EXPECT_EQ(bucket.Take(2, start + 2s), 0ns);
  bucket.GiveBack(1, start + 2s);
  EXPECT_EQ(bucket.Remaining(start + 2s), 1);
  EXPECT_EQ(bucket.Remaining(start), 1) << "an earlier time takes nothing away";
  EXPECT_EQ(bucket.Remaining(start + 10min), 60);
  bucket.GiveBack(1000, start + 10min);
  EXPECT_EQ(bucket.Remaining(start + 10min), 60);
  bucket.SetLimit(30, start + 10min);
  EXPECT_EQ(bucket.Remaining(start + 10min), 30);
  bucket.SetLimit(600, start + 10min);
  EXPECT_EQ(bucket.Remaining(start + 10min), 30) << "a higher limit gives nothing at once";
}

TEST(KeyStore, FindsEveryKeyByItsDigestOnly) {
  const KeyStore store(PlainKeys({"first", "second", "third"}));
  EXPECT_TRUE(store.required());
  int number = 0;
  for (const char* key : {"first", "second", "third"}) {
    const auto found = store.Authenticate(std::string("Bearer ") + key);
    ASSERT_TRUE(found.ok()) << key;
    EXPECT_EQ((*found)->name(), "key-" + std::to_string(++number));
    EXPECT_EQ((*found)->spec().digest.find(key), std::string::npos);
  }
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer firs", "Bearer firstfirst",
                            "Basic first", "first", "Bearer \xff"}) {
    const auto refused = store.Authenticate(wrong);
    EXPECT_TRUE(absl::IsUnauthenticated(refused.status())) << wrong;
    EXPECT_EQ(std::string(refused.status().message()).find("firs"), std::string::npos);
  }
  // A digest does not open the door.
  EXPECT_FALSE(store.Authenticate("Bearer " + Hex("first")).ok());
  const auto open = KeyStore({}).Authenticate("");
  ASSERT_TRUE(open.ok());
  EXPECT_EQ(*open, nullptr);
}

TEST(KeyStore, Expiry) {
  KeySpec spec = KeysSpec("a", "secret");
  spec.expires = absl::FromUnixSeconds(1000);
  const KeyStore store({spec});
  EXPECT_TRUE(store.Authenticate("Bearer secret", absl::FromUnixSeconds(999)).ok());
  const auto expired = store.Authenticate("Bearer secret", absl::FromUnixSeconds(1000));
  EXPECT_TRUE(absl::IsUnauthenticated(expired.status()));
  EXPECT_THAT(std::string(expired.status().message()), HasSubstr("expired"));
}

TEST(KeyStore, ReplaceKeepsUsage) {
  KeyStore store({KeysSpec("a", "old"), KeysSpec("b", "bee")});
  const auto a = *store.Authenticate("Bearer old");
  ASSERT_TRUE(a->TakeRequest().ok());
  const std::string salt = a->CacheSalt("");
  KeyLimits limits;
  limits.requests_per_minute = 1;
  store.Replace({KeysSpec("a", "new", limits), KeysSpec("c", "sea")});
  EXPECT_FALSE(store.Authenticate("Bearer old").ok());
  EXPECT_FALSE(store.Authenticate("Bearer bee").ok());
  const auto renewed = *store.Authenticate("Bearer new");
  EXPECT_EQ(renewed->usage()->requests, 1u);
  EXPECT_EQ(renewed->CacheSalt(""), salt);
  EXPECT_TRUE(renewed->TakeRequest().ok());
  EXPECT_FALSE(renewed->TakeRequest().ok()) << "the new limit holds";
  EXPECT_TRUE(a->TakeRequest(ApiKey::Clock::now() + 10min).ok()) << "old handles stay usable";
}

TEST(KeyStore, TextKeysKeepTheirNamesWhenLinesMove) {
  KeyStore store(PlainKeys({"one", "two"}));
  const std::string salt_of_one = (*store.Authenticate("Bearer one"))->CacheSalt("");
  const std::string salt_of_two = (*store.Authenticate("Bearer two"))->CacheSalt("");
  store.Replace(PlainKeys({"zero", "two"}));
  EXPECT_EQ((*store.Authenticate("Bearer two"))->name(), "key-2");
  EXPECT_EQ((*store.Authenticate("Bearer two"))->CacheSalt(""), salt_of_two);
  const auto zero = *store.Authenticate("Bearer zero");
  EXPECT_EQ(zero->name(), "key-3");
  EXPECT_NE(zero->CacheSalt(""), salt_of_one) << "the prefixes of a removed key stay its own";
}

TEST(ApiKey, SaltsSeparateAllButGroups) {
  KeySpec grouped_1 = KeysSpec("g1", "1");
  KeySpec grouped_2 = KeysSpec("g2", "2");
  grouped_1.cache_group = grouped_2.cache_group = "group";
  KeySpec other_group = KeysSpec("g3", "3");
  other_group.cache_group = "1";
  const KeyStore store(
      {grouped_1, grouped_2, other_group, KeysSpec("group", "4"), KeysSpec("1", "5")});
  const auto salt = [&](const char* key, const char* request_salt = "") {
    return (*store.Authenticate(std::string("Bearer ") + key))->CacheSalt(request_salt);
  };
  EXPECT_EQ(salt("1"), salt("2"));
  EXPECT_EQ(salt("1", "x"), salt("2", "x"));
  EXPECT_NE(salt("1"), salt("1", "x"));
  const std::vector<std::string> different = {salt("1"), salt("3"), salt("4"), salt("5")};
  for (size_t i = 0; i < different.size(); ++i) {
    EXPECT_FALSE(different[i].empty());
    for (size_t j = 0; j < i; ++j) EXPECT_NE(different[i], different[j]);
  }
}

TEST(ApiKey, Scopes) {
  KeySpec spec = KeysSpec("a", "secret");
  spec.scopes = {Scope::kStatistics};
  const ApiKey key(spec, std::make_shared<KeyUsage>(1));
  EXPECT_TRUE(key.RequireAnyOf({Scope::kStatistics}).ok());
  EXPECT_TRUE(key.RequireAnyOf({Scope::kStatistics, Scope::kGenerate}).ok());
  const absl::Status refused = key.RequireAnyOf({Scope::kAdmin});
  EXPECT_TRUE(absl::IsPermissionDenied(refused));
  EXPECT_EQ(ApiCode(refused), "permission_denied");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("scope admin"));
  EXPECT_EQ(key.usage()->refusals[static_cast<size_t>(KeyRefusal::kScope)], 1u);
}

TEST(ApiKey, RefusedRequestsOfOneNameMakeItWait) {
  const ApiKey::Clock::time_point now{std::chrono::hours(1)};
  const auto usage = std::make_shared<KeyUsage>(1);
  const ApiKey key({}, usage, now);
  const ApiKey reloaded({}, usage, now);
  const ApiKey other({}, std::make_shared<KeyUsage>(2), now);
  for (int i = 0; i <= RefusalPace::kBurst; ++i) key.CountRefusedRequest(now);
  EXPECT_EQ(reloaded.Wait(now), RefusalPace::kInterval);
  EXPECT_EQ(other.Wait(now), RefusalPace::Duration::zero());
}

TEST(ApiKey, RequestsPerMinute) {
  const auto start = ApiKey::Clock::now();
  KeyLimits limits;
  limits.requests_per_minute = 2;
  const auto key = Key(limits, start);
  EXPECT_TRUE(key->TakeRequest(start).ok());
  EXPECT_TRUE(key->TakeRequest(start).ok());
  const absl::Status refused = key->TakeRequest(start);
  EXPECT_EQ(ApiCode(refused), "rate_limit_exceeded");
  EXPECT_EQ(RetryAfterSeconds(refused), 30);
  EXPECT_EQ(key->usage()->requests, 2u);
  EXPECT_TRUE(key->TakeRequest(start + 30s).ok());
  const ApiKey::Headers expected = {{"x-ratelimit-limit-requests", "2"},
                                    {"x-ratelimit-remaining-requests", "0"},
                                    {"x-ratelimit-reset-requests", "1m"}};
  EXPECT_EQ(key->RateHeaders(start + 30s), expected);
}

TEST(Admission, TokensAreTakenAheadAndGivenBack) {
  const auto start = ApiKey::Clock::now();
  KeyLimits limits;
  limits.tokens_per_minute = 1'000'000;
  const auto key = Key(limits, start);
  const auto remaining = [&] {
    return std::stoll(key->RateHeaders().at(1).second);  // almost no time passes in this test
  };
  const auto near = [&](int64_t tokens) { return remaining() - tokens; };
  {
    const auto admission = Admission::Admit(key, 100'000, 500'000, 2, start);
    ASSERT_TRUE(admission.ok());
    EXPECT_LT(near(400'000), 100'000);
    const auto second = Admission::Admit(key, 100'000, 800'000, 1, start);
    EXPECT_EQ(ApiCode(second.status()), "rate_limit_exceeded");
    EXPECT_EQ(RetryAfterSeconds(second.status()), 30);
    (*admission)->CountGenerated(50'000);
    (*admission)->ChoiceEnded();
    EXPECT_EQ(key->usage()->running, 1);
    (*admission)->ChoiceEnded();
    EXPECT_EQ(key->usage()->running, 0);
    EXPECT_GE(near(850'000), 0);
    EXPECT_LT(near(850'000), 100'000);
    EXPECT_EQ(key->usage()->prompt_tokens, 100'000u);
    EXPECT_EQ(key->usage()->generated_tokens, 50'000u);
  }
  const auto refused_by_engine = Admission::Admit(key, 300'000, 500'000, 1);
  ASSERT_TRUE(refused_by_engine.ok());
  (*refused_by_engine)->Refuse();
  EXPECT_GE(near(850'000), 0);
  EXPECT_EQ(key->usage()->prompt_tokens, 100'000u);
  EXPECT_EQ(key->usage()->running, 0);

  const auto impossible = Admission::Admit(key, 1'000'000, 1, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(impossible.status())) << "waiting would not help";
  EXPECT_EQ(ApiCode(impossible.status()), "token_limit_exceeded");
}

TEST(Admission, ConcurrentRequests) {
  KeyLimits limits;
  limits.max_concurrent_requests = 2;
  const auto key = Key(limits, ApiKey::Clock::now());
  auto first = Admission::Admit(key, 1, 1, 1);
  auto second = Admission::Admit(key, 1, 1, 1);
  ASSERT_TRUE(first.ok() && second.ok());
  const auto third = Admission::Admit(key, 1, 1, 1);
  EXPECT_EQ(ApiCode(third.status()), "rate_limit_exceeded");
  EXPECT_EQ(RetryAfterSeconds(third.status()), 1);
  first->reset();
  EXPECT_TRUE(Admission::Admit(key, 1, 1, 1).ok());
}

}  // namespace
}  // namespace moeserve::server
