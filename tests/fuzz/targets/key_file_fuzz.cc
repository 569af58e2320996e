// The file of --api-key-file.

#include <memory>
#include <set>
#include <string>

#include "server/keys/api_key.h"
#include "server/keys/key_file.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;          // NOLINT(google-build-using-namespace)
  using namespace moeserve::server;  // NOLINT(google-build-using-namespace)
  const std::string_view text = testing::Text(data, size);
  const auto keys = ParseKeyFile(text, "keys");
  if (!keys.ok()) {
    MOESERVE_CHECK(keys.status().message().find('\n') == std::string_view::npos, "one line");
    return 0;
  }
  testing::CountAccepted();
  MOESERVE_CHECK(!keys->empty(), "a file has keys");
  std::set<std::string> names;
  std::set<std::string> digests;
  for (const KeySpec& spec : *keys) {
    MOESERVE_CHECK(spec.digest.size() == 32 && digests.insert(spec.digest).second, "unique keys");
    MOESERVE_CHECK(spec.name.empty() || names.insert(spec.name).second, "unique names");
    const ApiKey key(spec, std::make_shared<KeyUsage>(1));
    (void)key.TakeRequest();
    for (const auto& [name, value] : key.RateHeaders()) {
      MOESERVE_CHECK((name + value).find_first_of("\r\n") == std::string::npos, "one line");
    }
    MOESERVE_CHECK(key.CacheSalt("a") != key.CacheSalt("b"), "salts separate requests");
  }
  return 0;
}
