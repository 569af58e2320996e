// Files of expert profiles, which `experts show`, `merge` and `compare` read.

#include "engine/statistics/expert_profile.h"
#include "model_loaders/profiles/profile_file.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  auto profile = DecodeProfile(testing::Text(data, size));
  if (!profile.ok()) return 0;
  testing::CountAccepted();
  const std::string bytes = EncodeProfile(*profile);
  auto again = DecodeProfile(bytes);
  MOESERVE_CHECK(again.ok(), "a profile that is written can be read");
  MOESERVE_CHECK(EncodeProfile(*again) == bytes, "what is read is written as the same bytes");
  MOESERVE_CHECK(CheckSameShape(*profile, *again).ok(), "the same shape");
  MOESERVE_CHECK(Merge(*profile, *again).ok(), "profiles of one shape can be added");
  MOESERVE_CHECK(!EncodeProfile(*profile).empty(), "the sum can be written");
  return 0;
}
