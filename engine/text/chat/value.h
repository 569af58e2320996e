// The values in template expressions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "engine/text/chat/text.h"

namespace moeserve::chat {

class Budget;
class Value;
struct Callable;
struct LoopState;

// An operation that Python or Jinja rejects, or an exceeded limit. ChatTemplate catches it.
struct TemplateError {
  std::string message;
  // True if the template called raise_exception() or the text is too long; the template itself is
  // then not at fault.
  bool refusal = false;
  int line = 0;  // 0: not known yet
};
[[noreturn]] void Fail(std::string message);

struct Undefined {
  std::string what;  // for error messages: "'x' is undefined"
};
struct None {};

// An integer beyond 64 bits: text has its digits, arithmetic and comparisons their value as a
// float.
struct BigInt {
  std::string digits;
  double value = 0.0;
};

struct List {
  std::vector<Value> items;
  bool is_tuple = false;
  bool is_iterator = false;  // result of filters such as map: is always true and has no length
  int depth = 1;             // depth of nested containers, this one included
};

// A dictionary in insertion order.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  int depth = 1;

  // Both charge `budget` for the items visited and the bytes compared.
  const Value* Find(const Value& key, Budget& budget) const;
  void Set(Value key, Value value, Budget& budget);
};

// The only mutable kind of value.
struct Namespace {
  std::vector<std::pair<std::string, Value>> items;

  Value* Find(std::string_view name);
};

// Cheap to copy. Containers are immutable once they are in a Value, except namespaces.
class Value {
 public:
  Value() : data_(Undefined{"the value"}) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(None none) : data_(none) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(BigInt value) : data_(std::make_shared<const BigInt>(std::move(value))) {}
  Value(const char*) = delete;
  Value(Text text) : data_(std::make_shared<const Text>(std::move(text))) {}
  Value(List list) : data_(std::make_shared<const List>(std::move(list))) {}
  Value(Dict dict) : data_(std::make_shared<const Dict>(std::move(dict))) {}
  Value(std::shared_ptr<Namespace> space) : data_(std::move(space)) {}
  Value(std::shared_ptr<const Callable> callable) : data_(std::move(callable)) {}
  Value(std::shared_ptr<LoopState> loop) : data_(std::move(loop)) {}
  // Returns a trusted text, from the template or the server.
  static Value Trusted(std::string_view text) { return Text(std::string(text), true); }

  bool IsUndefined() const { return Is<Undefined>(); }
  bool IsNone() const { return Is<None>(); }
  bool IsBool() const { return Is<bool>(); }
  bool IsInt() const { return Is<int64_t>(); }
  bool IsBigInt() const { return Is<std::shared_ptr<const BigInt>>(); }
  bool IsFloat() const { return Is<double>() || IsBigInt(); }
  bool IsNumber() const { return IsInt() || IsFloat() || IsBool(); }
  bool IsText() const { return Is<std::shared_ptr<const Text>>(); }
  bool IsList() const { return Is<std::shared_ptr<const List>>(); }
  bool IsDict() const { return Is<std::shared_ptr<const Dict>>(); }

  const Undefined& undefined() const { return std::get<Undefined>(data_); }
  bool boolean() const { return std::get<bool>(data_); }
  // Returns the value of an int or a bool; as in Python, true is 1 and false is 0.
  int64_t integer() const { return IsBool() ? (boolean() ? 1 : 0) : std::get<int64_t>(data_); }
  const std::string& digits() const {
    return std::get<std::shared_ptr<const BigInt>>(data_)->digits;
  }
  double number() const {
    if (IsBigInt()) return std::get<std::shared_ptr<const BigInt>>(data_)->value;
    return IsFloat() ? std::get<double>(data_) : static_cast<double>(integer());
  }
  const Text& text() const { return *std::get<std::shared_ptr<const Text>>(data_); }
  const List& list() const { return *std::get<std::shared_ptr<const List>>(data_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<const Dict>>(data_); }
  // Return null if the value has another type.
  Namespace* space() const;
  const Callable* callable() const;
  LoopState* loop() const;

  // Returns Python's name for the type.
  std::string_view TypeName() const;
  // Returns the depth of nested containers, methods of containers and loops; strings are not
  // containers. It bounds the recursion of destructors.
  int depth() const;
  // Returns whether both are the same object. This decides equality for values other than numbers,
  // strings and containers.
  bool SameObject(const Value& other) const;

 private:
  template <typename T>
  bool Is() const {
    return std::holds_alternative<T>(data_);
  }

  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const BigInt>,
               std::shared_ptr<const Text>, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
               std::shared_ptr<const Callable>, std::shared_ptr<LoopState>>
      data_;
};

// The arguments of a call, a filter or a test.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  // Returns the argument at `index` or with `name`; null if it is absent. Call Check() first.
  const Value* Get(size_t index, std::string_view name) const;
  // Fails if there are more arguments than `names`, an unknown name, an argument given twice, or
  // fewer than `required` arguments.
  void Check(std::string_view function, const std::vector<std::string_view>& names,
             size_t required = 0) const;
};

struct MacroNode;
struct Scope;

// A macro, a built-in function, or a method bound to its object.
struct Callable {
  std::string name;
  const MacroNode* macro = nullptr;  // null if the callable is built in
  std::shared_ptr<Scope> closure;    // set for a macro
  Value self;                        // the object, if the callable is a method
  bool is_method = false;
};

// The variable `loop`. Elements are pulled from the source on demand, because the condition of a
// loop may depend on the effects of its body.
struct LoopState {
  std::vector<Value> items;  // elements pulled so far
  std::function<bool()>
      // Appends the next element to `items` and returns true; returns false if there is none. Null
      // when the loop is over.
      pull;
  size_t index0 = 0;
  int depth = 1;  // that of the deepest element, plus 1
  bool pulling = false;

  // Fails if the loop's condition asks for an element that it has to decide on.
  bool Has(size_t index) {
    if (pulling && items.size() <= index) Fail("the condition of a loop uses its later elements");
    while (items.size() <= index && pull != nullptr) {
      pulling = true;
      const struct Reset {
        bool& flag;
        ~Reset() { flag = false; }
      } reset{pulling};
      if (!pull()) pull = nullptr;
    }
    return index < items.size();
  }
};

}  // namespace moeserve::chat
