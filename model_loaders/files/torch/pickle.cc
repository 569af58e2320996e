#include "model_loaders/files/torch/pickle.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "base/error_text.h"
#include "model_loaders/files/torch/pickle_machine.h"

namespace moeserve {
namespace {

// A value whose items are being visited.
constexpr uint16_t kOpen = std::numeric_limits<uint16_t>::max();

}  // namespace

absl::Status PickleTree::Check(uint16_t max_depth) {
  std::unordered_set<std::string_view> keys;
  for (PickleValue& value : values_) {
    if (value.height == 0) MOESERVE_RETURN_IF_ERROR(Measure(&value, max_depth));
    if (!value.Is(PickleKind::kDict)) continue;
    keys.clear();
    for (size_t i = 0; i < value.items.size(); i += 2) {
      const PickleValue& key = *value.items[i];
      if (key.Is(PickleKind::kString) && !keys.insert(key.text).second) {
        return absl::InvalidArgumentError(
            Concat("dict: expected every key once, found ", Quoted(key.text), " twice"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PickleTree::Measure(PickleValue* root, uint16_t max_depth) {
  struct Level {
    PickleValue* value;
    size_t next = 0;  // the next item to visit
  };
  std::vector<Level> open = {{root}};
  root->height = kOpen;
  while (!open.empty()) {
    auto& [value, next] = open.back();
    if (next == value->items.size()) {
      uint16_t below = 0;
      for (size_t i = 0; i < value->items.size(); ++i) {
        const bool state = value->Is(PickleKind::kCall) && i == PickleValue::kState;
        if (!state && value->items[i] != nullptr) below = std::max(below, value->items[i]->height);
      }
      value->height = static_cast<uint16_t>(below + 1);
      if (value->height > max_depth) break;
      open.pop_back();
      continue;
    }
    const size_t i = next++;
    // This tree owns every item.
    auto* item = const_cast<PickleValue*>(value->items[i]);
    if (item == nullptr || (value->Is(PickleKind::kCall) && i == PickleValue::kState)) continue;
    if (item->height == kOpen) {
      return absl::InvalidArgumentError(
          Concat("expected no container that contains itself, found ", Name(item->kind)));
    }
    if (item->height != 0) continue;
    if (open.size() >= max_depth) break;
    item->height = kOpen;
    open.push_back({item});
  }
  if (open.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("expected at most ", max_depth, " levels of nesting, found more"));
}

Result<PickleTree> PickleTree::Parse(std::string_view bytes, const PickleLimits& limits) {
  PickleTree tree;
  PickleMachine machine(bytes, limits, &tree);
  MOESERVE_RETURN_IF_ERROR(machine.Run());
  MOESERVE_RETURN_IF_ERROR(tree.Check(limits.max_depth));
  return tree;
}

std::string_view Name(PickleKind kind) {
  switch (kind) {
    case PickleKind::kNone:
      return "None";
    case PickleKind::kBool:
      return "a bool";
    case PickleKind::kInt:
      return "an integer";
    case PickleKind::kBigInt:
      return "an integer beyond 64 bits";
    case PickleKind::kFloat:
      return "a float";
    case PickleKind::kString:
      return "a string";
    case PickleKind::kBytes:
      return "bytes";
    case PickleKind::kTuple:
      return "a tuple";
    case PickleKind::kList:
      return "a list";
    case PickleKind::kDict:
      return "a dict";
    case PickleKind::kSet:
      return "a set";
    case PickleKind::kGlobal:
      return "a global";
    case PickleKind::kCall:
      return "an object";
    case PickleKind::kPersistentId:
      return "a persistent id";
  }
  return "?";
}

bool PickleValue::IsGlobal(std::string_view of_module, std::string_view of_name) const {
  return kind == PickleKind::kGlobal && module() == of_module && name() == of_name;
}

bool PickleValue::IsCallOf(std::string_view of_module, std::string_view of_name) const {
  return kind == PickleKind::kCall && callee().IsGlobal(of_module, of_name);
}

std::string PickleValue::FullName() const { return Printable(Concat(module(), '.', name())); }

const PickleValue* PickleValue::Get(std::string_view key) const {
  if (kind != PickleKind::kDict) return nullptr;
  for (size_t i = 0; i < items.size(); i += 2) {
    if (items[i]->kind == PickleKind::kString && items[i]->text == key) return items[i + 1];
  }
  return nullptr;
}

std::string ShowPickle(const PickleValue& value) {
  switch (value.kind) {
    case PickleKind::kBool:
      return value.integer != 0 ? "True" : "False";
    case PickleKind::kInt:
      return std::to_string(value.integer);
    case PickleKind::kFloat:
      return std::to_string(value.real);
    case PickleKind::kString:
      return Quoted(value.text);
    case PickleKind::kTuple:
    case PickleKind::kList:
    case PickleKind::kSet:
      return Concat(Name(value.kind), " of ", value.items.size(), " values");
    case PickleKind::kDict:
      return Concat(Name(value.kind), " of ", value.items.size() / 2, " keys");
    case PickleKind::kGlobal:
      return Concat("the global ", value.FullName());
    case PickleKind::kCall:
      return Concat("an object of ", value.callee().FullName());
    default:
      return std::string(Name(value.kind));
  }
}

}  // namespace moeserve
