#include "engine/text/chat/value.h"

#include <algorithm>

#include "base/error_text.h"
#include "engine/text/chat/budget.h"
#include "engine/text/chat/operators.h"

namespace moeserve::chat {

void Fail(std::string message) { throw TemplateError{std::move(message)}; }

const Value* Dict::Find(const Value& key, Budget& budget) const {
  budget.Step(static_cast<int64_t>(items.size() / 8));
  for (const auto& [name, value] : items) {
    if (name.IsText() != key.IsText()) continue;
    if (key.IsText()) {
      if (name.text().size() != key.text().size()) continue;
      budget.Read(key.text().size());
    }
    if (SimpleEqual(name, key)) return &value;
  }
  return nullptr;
}

void Dict::Set(Value key, Value value, Budget& budget) {
  depth = std::max(depth, value.depth() + 1);
  if (const Value* old = Find(key, budget)) {
    *const_cast<Value*>(old) = std::move(value);
  } else {
    items.emplace_back(std::move(key), std::move(value));
  }
}

Value* Namespace::Find(std::string_view name) {
  for (auto& [key, value] : items) {
    if (key == name) return &value;
  }
  return nullptr;
}

Namespace* Value::space() const {
  const auto* space = std::get_if<std::shared_ptr<Namespace>>(&data_);
  return space == nullptr ? nullptr : space->get();
}

const Callable* Value::callable() const {
  const auto* callable = std::get_if<std::shared_ptr<const Callable>>(&data_);
  return callable == nullptr ? nullptr : callable->get();
}

LoopState* Value::loop() const {
  const auto* loop = std::get_if<std::shared_ptr<LoopState>>(&data_);
  return loop == nullptr ? nullptr : loop->get();
}

int Value::depth() const {
  if (IsList()) return list().depth;
  if (IsDict()) return dict().depth;
  if (const Callable* method = callable()) return method->is_method ? method->self.depth() + 1 : 0;
  if (const LoopState* state = loop()) return state->depth;
  return 0;
}

std::string_view Value::TypeName() const {
  if (IsUndefined()) return "Undefined";
  if (IsNone()) return "NoneType";
  if (IsBool()) return "bool";
  if (IsInt() || IsBigInt()) return "int";
  if (IsFloat()) return "float";
  if (IsText()) return "str";
  if (IsList() && list().is_iterator) return "generator";
  if (IsList()) return list().is_tuple ? "tuple" : "list";
  if (IsDict()) return "dict";
  if (space() != nullptr) return "Namespace";
  if (loop() != nullptr) return "LoopContext";
  return "function";
}

bool Value::SameObject(const Value& other) const {
  if (space() != nullptr) return space() == other.space();
  if (loop() != nullptr) return loop() == other.loop();
  return callable() != nullptr && callable() == other.callable();
}

const Value* Arguments::Get(size_t index, std::string_view name) const {
  if (index < positional.size()) return &positional[index];
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

void Arguments::Check(std::string_view function, const std::vector<std::string_view>& names,
                      size_t required) const {
  const std::string prefix = std::string(function) + "(): ";
  if (positional.size() > names.size()) {
    Fail(
        Concat(prefix, "expected at most ", names.size(), " arguments, found ", positional.size()));
  }
  for (const auto& [key, value] : named) {
    const auto it = std::find(names.begin(), names.end(), key);
    if (it == names.end()) Fail(prefix + "unexpected argument '" + key + "'");
    if (static_cast<size_t>(it - names.begin()) < positional.size()) {
      Fail(prefix + "argument '" + key + "' is given twice");
    }
  }
  for (size_t i = 0; i < required; ++i) {
    if (Get(i, names[i]) == nullptr) {
      Fail(prefix + "the argument '" + std::string(names[i]) + "' is missing");
    }
  }
}

}  // namespace moeserve::chat
