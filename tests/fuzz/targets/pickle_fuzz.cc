// Pickles.

#include "model_loaders/files/torch/pickle.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::testing {
namespace {

// Visits the values, each in all its places. A shared value can have very many places, so there is
// a limit.
void Walk(const PickleValue& value, int depth, int& budget) {
  MOESERVE_CHECK(depth <= 200, "values are not deeper than the reader promises");
  if (--budget < 0) return;
  MOESERVE_CHECK(value.kind != PickleKind::kDict || value.items.size() % 2 == 0, "pairs");
  for (size_t i = 0; i < value.items.size(); ++i) {
    const bool state = value.Is(PickleKind::kCall) && i == PickleValue::kState;
    if (value.items[i] != nullptr && !state) Walk(*value.items[i], depth + 1, budget);
  }
}

void ReadPickle(std::string_view bytes) {
  const auto tree = PickleTree::Parse(bytes);
  if (!tree.ok()) return;
  CountAccepted();
  int budget = 20'000;
  Walk(tree->root(), 1, budget);
  MOESERVE_CHECK(!ShowPickle(tree->root()).empty(), "a value can be shown");
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadPickle(moeserve::testing::Text(data, size));
  return 0;
}
