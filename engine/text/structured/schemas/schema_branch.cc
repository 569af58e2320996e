#include "engine/text/structured/schemas/schema_branch.h"

#include <algorithm>
#include <numeric>

namespace moeserve::structured {

using nlohmann::json;

namespace {

// Returns the least common multiple of two numbers of at most kMaxMultiple + 1, or kMaxMultiple + 1
// if it is larger.
int64_t CommonMultiple(int64_t a, int64_t b) {
  return std::min(a / std::gcd(a, b) * b, kMaxMultiple + 1);
}

}  // namespace

void Tidy(Conjunction* schemas) {
  std::erase_if(*schemas, [](const json* s) { return s->is_boolean() && s->get<bool>(); });
  std::sort(schemas->begin(), schemas->end());
  schemas->erase(std::unique(schemas->begin(), schemas->end()), schemas->end());
}

const json* ObjectPart::Named(const std::string& name) const {
  for (const auto& [other, schema] : more) {
    if (other == name) return schema;
  }
  if (properties == nullptr) return nullptr;
  const auto it = properties->find(name);
  return it == properties->end() ? nullptr : &*it;
}

std::optional<NumberBound> Tighter(const std::optional<NumberBound>& a,
                                   const std::optional<NumberBound>& b, bool upper) {
  if (!a) return b;
  if (!b) return a;
  if (a->value == b->value) return a->exclusive ? a : b;
  return (a->value < b->value) == upper ? a : b;
}

Decimal DecimalOf(const json& number) {
  // The JSON library's own spelling of a double is not always the shortest one.
  if (number.is_number_float()) return Decimal::Shortest(number.get<double>());
  return Decimal::Parse(number.dump());
}

uint32_t TypeOf(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return kNullType;
    case json::value_t::boolean:
      return kBooleanType;
    case json::value_t::string:
      return kStringType;
    case json::value_t::array:
      return kArrayType;
    case json::value_t::object:
      return kObjectType;
    default:
      return DecimalOf(value).is_integer() ? kIntegerType : kFractionType;
  }
}

bool SameValue(const json& a, const json& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_number_float() && b.is_number_float()) return a.get<double>() == b.get<double>();
    if (a.is_number_unsigned() && b.is_number_unsigned()) {
      return a.get<uint64_t>() == b.get<uint64_t>();
    }
    return DecimalOf(a) == DecimalOf(b);
  }
  if (a.type() != b.type() || a.size() != b.size()) return false;
  if (a.is_array()) return std::equal(a.begin(), a.end(), b.begin(), SameValue);
  if (!a.is_object()) return a == b;
  for (auto x = a.begin(), y = b.begin(); x != a.end(); ++x, ++y) {
    if (x.key() != y.key() || !SameValue(x.value(), y.value())) return false;
  }
  return true;
}

int64_t CountCharacters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

Conjunction Branch::ItemAt(size_t i) const {
  Conjunction out;
  for (const ArrayPart& part : arrays) {
    if (i < part.prefix.size()) {
      out.push_back(part.prefix[i]);
    } else if (part.items != nullptr) {
      out.push_back(part.items);
    }
  }
  Tidy(&out);
  return out;
}

std::set<std::string> Branch::NamePatterns() const {
  std::set<std::string> out;
  for (const ObjectPart& part : objects) {
    if (part.patterns == nullptr) continue;
    for (const auto& [pattern, schema] : part.patterns->items()) out.insert(pattern);
  }
  return out;
}

Conjunction Branch::PropertyNamed(const std::string& name,
                                  const std::set<std::string>& matched) const {
  Conjunction out;
  for (const ObjectPart& part : objects) {
    const json* named = part.Named(name);
    if (named != nullptr) out.push_back(named);
    bool found = named != nullptr;
    for (const std::string& pattern : matched) {
      if (part.patterns == nullptr || !part.patterns->contains(pattern)) continue;
      out.push_back(&part.patterns->at(pattern));
      found = true;
    }
    if (!found && part.additional != nullptr) out.push_back(part.additional);
  }
  Tidy(&out);
  return out;
}

Conjunction Branch::Unnamed(const std::set<std::string>& matched) const {
  Conjunction out;
  for (const ObjectPart& part : objects) {
    bool found = false;
    for (const std::string& pattern : matched) {
      if (part.patterns == nullptr || !part.patterns->contains(pattern)) continue;
      out.push_back(&part.patterns->at(pattern));
      found = true;
    }
    if (!found && part.additional != nullptr) out.push_back(part.additional);
  }
  Tidy(&out);
  return out;
}

std::optional<Branch> Meet(const Branch& a, const Branch& b) {
  Branch out = a;
  out.types &= b.types;
  if (b.values) {
    if (!out.values) {
      out.values = b.values;
    } else {
      std::erase_if(*out.values, [&](const json* value) {
        return std::none_of(b.values->begin(), b.values->end(),
                            [&](const json* other) { return SameValue(*value, *other); });
      });
    }
  }
  if (out.values) {
    uint32_t types = 0;
    std::erase_if(*out.values, [&](const json* value) { return !(TypeOf(*value) & out.types); });
    for (const json* value : *out.values) types |= TypeOf(*value);
    out.types = types;
  }
  out.excluded.insert(out.excluded.end(), b.excluded.begin(), b.excluded.end());
  out.multiples.insert(b.multiples.begin(), b.multiples.end());
  out.not_multiples.insert(b.not_multiples.begin(), b.not_multiples.end());
  out.not_patterns.insert(b.not_patterns.begin(), b.not_patterns.end());
  out.contains.insert(out.contains.end(), b.contains.begin(), b.contains.end());
  out.names.insert(out.names.end(), b.names.begin(), b.names.end());
  Tidy(&out.names);
  out.number.min = Tighter(a.number.min, b.number.min, false);
  out.number.max = Tighter(a.number.max, b.number.max, true);
  out.number.multiple_of = CommonMultiple(a.number.multiple_of, b.number.multiple_of);
  out.min_chars = std::max(a.min_chars, b.min_chars);
  out.max_chars = std::min(a.max_chars, b.max_chars);
  out.patterns.insert(b.patterns.begin(), b.patterns.end());
  out.formats.insert(b.formats.begin(), b.formats.end());
  out.min_items = std::max(a.min_items, b.min_items);
  out.max_items = std::min(a.max_items, b.max_items);
  out.unique_items |= b.unique_items;
  out.arrays.insert(out.arrays.end(), b.arrays.begin(), b.arrays.end());
  out.min_properties = std::max(a.min_properties, b.min_properties);
  out.max_properties = std::min(a.max_properties, b.max_properties);
  out.required.insert(b.required.begin(), b.required.end());
  out.objects.insert(out.objects.end(), b.objects.begin(), b.objects.end());
  if (out.min_chars > out.max_chars) out.types &= ~kStringType;
  if (out.min_items > out.max_items) out.types &= ~kArrayType;
  if (out.min_properties > out.max_properties) out.types &= ~kObjectType;
  if (out.types == 0) return std::nullopt;
  return out;
}

}  // namespace moeserve::structured
