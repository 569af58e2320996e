// The instructions that build containers and records of calls.
#include <string>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/files/torch/pickle_calls.h"
#include "model_loaders/files/torch/pickle_machine.h"

namespace moeserve {

bool PickleMachine::AddItem(PickleValue* container, const PickleValue* item) {
  if (++references_ > limits_.max_references) {
    return Fail(Concat("expected at most ", limits_.max_references,
                       " places in all containers, found more"));
  }
  container->items.push_back(item);
  return true;
}

bool PickleMachine::AddPair(PickleValue* dict, const PickleValue* key, const PickleValue* value) {
  if (key->Is(PickleKind::kList) || key->Is(PickleKind::kDict) || key->Is(PickleKind::kSet)) {
    return Fail(Concat("expected a hashable key of a dict, found ", Name(key->kind)));
  }
  return AddItem(dict, key) && AddItem(dict, value);
}

bool PickleMachine::MakeTuple(size_t count) {
  if (stack_.size() - Bottom() < count) {
    return Fail(
        Concat("expected ", count, " values on the stack, found ", stack_.size() - Bottom()));
  }
  PickleValue* tuple = New(PickleKind::kTuple);
  if (tuple == nullptr) return false;
  tuple->items.reserve(count);
  for (size_t i = stack_.size() - count; i < stack_.size(); ++i) {
    if (!AddItem(tuple, stack_[i])) return false;
  }
  stack_.resize(stack_.size() - count);
  return Push(tuple);
}

bool PickleMachine::MakeMarked(PickleKind kind) {
  size_t first = 0;
  if (!PopMark(&first)) return false;
  PickleValue* value = New(kind);
  if (value == nullptr) return false;
  value->items.reserve(stack_.size() - first);
  for (size_t i = first; i < stack_.size(); ++i) {
    if (!AddItem(value, stack_[i])) return false;
  }
  stack_.resize(first);
  return Push(value);
}

bool PickleMachine::MarkedDict() {
  size_t first = 0;
  if (!PopMark(&first)) return false;
  PickleValue* dict = New(PickleKind::kDict);
  if (dict == nullptr) return false;
  stack_.insert(stack_.begin() + static_cast<ptrdiff_t>(first), dict);
  return ExtendDict(first + 1);
}

PickleValue* PickleMachine::ContainerOf(PickleValue* target, PickleKind kind) {
  if (target->Is(kind)) return target;
  if (!target->Is(PickleKind::kCall)) {
    Fail(Concat("expected ", Name(kind), " below the new values, found ", ShowPickle(*target)));
    return nullptr;
  }
  if (target->contents() == nullptr) {
    PickleValue* contents = New(kind);
    if (contents == nullptr) return nullptr;
    target->items[PickleValue::kContents] = contents;
    return contents;
  }
  if (!target->contents()->Is(kind)) {
    Fail(Concat("expected additions of one kind (", Name(target->contents()->kind), "), found ",
                Name(kind)));
    return nullptr;
  }
  // The machine made this value itself.
  return const_cast<PickleValue*>(target->contents());
}

bool PickleMachine::Extend(PickleKind kind, size_t first) {
  if (first <= Bottom()) return Fail(Concat("expected ", Name(kind), " on the stack, found none"));
  PickleValue* container = ContainerOf(stack_[first - 1], kind);
  if (container == nullptr) return false;
  for (size_t i = first; i < stack_.size(); ++i) {
    if (!AddItem(container, stack_[i])) return false;
  }
  stack_.resize(first);
  return true;
}

bool PickleMachine::ExtendDict(size_t first) {
  if (first <= Bottom()) return Fail("expected a dict on the stack, found none");
  PickleValue* dict = ContainerOf(stack_[first - 1], PickleKind::kDict);
  if (dict == nullptr) return false;
  if ((stack_.size() - first) % 2 != 0) {
    return Fail(
        Concat("expected keys and values in turn, found ", stack_.size() - first, " values"));
  }
  for (size_t i = first; i < stack_.size(); i += 2) {
    if (!AddPair(dict, stack_[i], stack_[i + 1])) return false;
  }
  stack_.resize(first);
  return true;
}

bool PickleMachine::Append() {
  if (stack_.size() <= Bottom()) return Fail("expected a value on the stack, found none");
  return Extend(PickleKind::kList, stack_.size() - 1);
}

bool PickleMachine::ExtendToMark(PickleKind kind) {
  size_t first = 0;
  return PopMark(&first) && Extend(kind, first);
}

bool PickleMachine::SetItem() {
  if (stack_.size() < Bottom() + 2) return Fail("expected a key and a value on the stack");
  return ExtendDict(stack_.size() - 2);
}

bool PickleMachine::SetItems() {
  size_t first = 0;
  return PopMark(&first) && ExtendDict(first);
}

bool PickleMachine::Global() {
  std::string_view module, name;
  if (!TakeLine(&module) || !TakeLine(&name)) return false;
  return PushNew(PickleKind::kString, module) && PushNew(PickleKind::kString, name) &&
         StackGlobal();
}

bool PickleMachine::StackGlobal() {
  PickleValue *module = nullptr, *name = nullptr;
  if (!Pop(&name) || !Pop(&module)) return false;
  if (!module->Is(PickleKind::kString) || !name->Is(PickleKind::kString)) {
    return Fail(Concat("expected two strings on the stack, found ", ShowPickle(*module), " and ",
                       ShowPickle(*name)));
  }
  PickleValue* global = New(PickleKind::kGlobal);
  return global != nullptr && AddItem(global, module) && AddItem(global, name) && Push(global);
}

bool PickleMachine::CheckCallable(const PickleValue& global) {
  if (MayCall(global.module(), global.name())) return true;
  return Fail(Concat("expected calls of data types only (packages ", AllowedPackages(),
                     "), found a call of ", global.FullName(),
                     ", which can run code when Python loads the file; nothing of it was run here. "
                     "If you trust its origin, load it in PyTorch and save only the tensors"));
}

bool PickleMachine::Call(const PickleValue* callee, const PickleValue* arguments,
                         const PickleValue* keywords) {
  if (!callee->Is(PickleKind::kGlobal)) {
    return Fail(Concat("expected a call of a global, found a call of ", ShowPickle(*callee)));
  }
  if (!arguments->Is(PickleKind::kTuple)) {
    return Fail(Concat("expected a tuple of arguments, found ", ShowPickle(*arguments)));
  }
  if (!CheckCallable(*callee)) return false;
  // The callee could call an argument, as copyreg.__newobj__ does.
  for (const PickleValue* argument : arguments->items) {
    if (argument->Is(PickleKind::kGlobal) && !CheckCallable(*argument)) return false;
  }
  // Protocols 0 and 1 make an object of a class by _reconstructor(class, object, None).
  const std::vector<const PickleValue*>& given = arguments->items;
  if ((callee->module() == "copyreg" || callee->module() == "copy_reg") &&
      callee->name() == "_reconstructor" && given.size() == 3 &&
      given[0]->Is(PickleKind::kGlobal) && given[2]->Is(PickleKind::kNone)) {
    callee = given[0];
    arguments = New(PickleKind::kTuple);
    if (arguments == nullptr) return false;
  }
  if (callee->IsGlobal("collections", "OrderedDict")) return CallOrderedDict(*arguments);
  if ((callee->module() == "builtins" || callee->module() == "__builtin__") &&
      (callee->name() == "set" || callee->name() == "frozenset")) {
    return CallSet(*arguments);
  }
  PickleValue* call = New(PickleKind::kCall);
  if (call == nullptr) return false;
  call->items.reserve(PickleValue::kCallItems);
  for (const PickleValue* item : {callee, arguments, keywords}) {
    if (!AddItem(call, item)) return false;
  }
  return AddItem(call, nullptr) && AddItem(call, nullptr) && Push(call);
}

bool PickleMachine::CallOrderedDict(const PickleValue& arguments) {
  PickleValue* dict = New(PickleKind::kDict);
  if (dict == nullptr) return false;
  if (!arguments.items.empty()) {
    const PickleValue& pairs = *arguments.items[0];
    if (arguments.items.size() != 1 || !pairs.Is(PickleKind::kList)) {
      return Fail("collections.OrderedDict: expected no argument or a list of pairs");
    }
    for (const PickleValue* pair : pairs.items) {
      if (!(pair->Is(PickleKind::kList) || pair->Is(PickleKind::kTuple)) ||
          pair->items.size() != 2) {
        return Fail(Concat("collections.OrderedDict: expected a pair, found ", ShowPickle(*pair)));
      }
      if (!AddPair(dict, pair->items[0], pair->items[1])) return false;
    }
  }
  return Push(dict);
}

bool PickleMachine::CallSet(const PickleValue& arguments) {
  PickleValue* set = New(PickleKind::kSet);
  if (set == nullptr) return false;
  if (!arguments.items.empty()) {
    const PickleValue& elements = *arguments.items[0];
    if (arguments.items.size() != 1 || !elements.Is(PickleKind::kList)) {
      return Fail("set: expected no argument or a list");
    }
    for (const PickleValue* element : elements.items) {
      if (!AddItem(set, element)) return false;
    }
  }
  return Push(set);
}

bool PickleMachine::Reduce() {
  PickleValue *arguments = nullptr, *callee = nullptr;
  return Pop(&arguments) && Pop(&callee) && Call(callee, arguments, nullptr);
}

bool PickleMachine::NewObject() { return Reduce(); }

bool PickleMachine::NewObjectWithKeywords() {
  PickleValue *keywords = nullptr, *arguments = nullptr, *callee = nullptr;
  if (!Pop(&keywords) || !Pop(&arguments) || !Pop(&callee)) return false;
  if (!keywords->Is(PickleKind::kDict)) {
    return Fail(Concat("expected a dict of arguments, found ", ShowPickle(*keywords)));
  }
  return Call(callee, arguments, keywords);
}

bool PickleMachine::Instance() {
  std::string_view module, name;
  if (!TakeLine(&module) || !TakeLine(&name) || !MakeMarked(PickleKind::kTuple)) return false;
  PickleValue* arguments = nullptr;
  if (!Pop(&arguments) || !PushNew(PickleKind::kString, module) ||
      !PushNew(PickleKind::kString, name) || !StackGlobal()) {
    return false;
  }
  PickleValue* callee = nullptr;
  return Pop(&callee) && Call(callee, arguments, nullptr);
}

bool PickleMachine::Object() {
  size_t first = 0;
  if (!PopMark(&first)) return false;
  if (first >= stack_.size()) return Fail("expected a class after the mark, found none");
  PickleValue* callee = stack_[first];
  PickleValue* arguments = New(PickleKind::kTuple);
  if (arguments == nullptr) return false;
  for (size_t i = first + 1; i < stack_.size(); ++i) {
    if (!AddItem(arguments, stack_[i])) return false;
  }
  stack_.resize(first);
  return Call(callee, arguments, nullptr);
}

bool PickleMachine::Build() {
  PickleValue *state = nullptr, *target = nullptr;
  if (!Pop(&state) || !Top(&target)) return false;
  if (target->Is(PickleKind::kDict)) return true;  // attributes of an OrderedDict
  if (!target->Is(PickleKind::kCall) || target->state() != nullptr) {
    return Fail(Concat("expected an object without state, found ",
                       target->Is(PickleKind::kCall) ? "a second state" : ShowPickle(*target)));
  }
  target->items[PickleValue::kState] = state;
  return true;
}

bool PickleMachine::PersistentLine() {
  std::string_view line;
  return TakeLine(&line) && PushNew(PickleKind::kString, line) && Persistent();
}

bool PickleMachine::Persistent() {
  PickleValue* id = nullptr;
  if (!Pop(&id)) return false;
  PickleValue* value = New(PickleKind::kPersistentId);
  return value != nullptr && AddItem(value, id) && Push(value);
}

bool PickleMachine::Extension() {
  return Fail(
      "expected no reference to Python's extension registry, found one: the file does not "
      "tell what it calls");
}

bool PickleMachine::Buffer() {
  return Fail("expected all data inside the pickle, found a reference to a buffer outside");
}

}  // namespace moeserve
