#include "engine/text/chat/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "engine/text/chat/case_tables.h"
#include "engine/text/chat/operators.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

// Builds a text and charges the budget for its bytes.
class Writer {
 public:
  explicit Writer(Budget& budget) : budget_(budget) {}

  void Own(std::string_view bytes) {
    budget_.Step();
    budget_.Read(bytes.size());
    budget_.Bytes(bytes.size());
    out_.Append(bytes, true);
  }
  void Piece(const Text& text, size_t begin, size_t end) {
    budget_.Bytes(end - begin);
    budget_.Read(end - begin);
    out_.Append(text, begin, end);
  }
  void Escaped(std::string_view bytes, bool trusted) {
    budget_.Step();
    budget_.Bytes(bytes.size());
    out_.Append(bytes, trusted);
  }
  Budget& budget() { return budget_; }
  Text Take() { return std::move(out_); }

 private:
  Budget& budget_;
  Text out_;
};

std::string Hex(const char* format, char32_t c) {
  char buffer[16];
  std::snprintf(buffer, sizeof(buffer), format, static_cast<unsigned>(c));
  return buffer;
}

// Copies `text`, except that each character for which `escape` returns a replacement is replaced.
template <typename Escape>
void WriteEscaped(const Text& text, Writer& out, Escape escape) {
  out.budget().Scan(text.size());
  out.budget().Bytes(text.spans().size() * sizeof(TextSpan));
  size_t copied = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = pos;
    const std::string replacement = escape(NextCodePoint(text.bytes(), &pos));
    if (replacement.empty()) continue;
    out.Piece(text, copied, begin);
    out.Escaped(replacement, text.IsTrusted(begin, pos));
    copied = pos;
  }
  out.Piece(text, copied, text.size());
}

void WriteStringRepr(const Text& text, Writer& out) {
  const bool has_single = text.bytes().find('\'') != std::string::npos;
  const bool has_double = text.bytes().find('"') != std::string::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  out.Own(std::string_view(&quote, 1));
  WriteEscaped(text, out, [quote](char32_t c) -> std::string {
    if (c == static_cast<char32_t>(quote)) return std::string("\\") + quote;
    if (c == '\\') return "\\\\";
    if (c == '\n') return "\\n";
    if (c == '\r') return "\\r";
    if (c == '\t') return "\\t";
    if (c >= 0x20 && c < 0x7F) return "";
    if (c > 0x7F && IsPrintable(c)) return "";
    return c < 0x100 ? Hex("\\x%02x", c) : c < 0x10000 ? Hex("\\u%04x", c) : Hex("\\U%08x", c);
  });
  out.Own(std::string_view(&quote, 1));
}

void WriteRepr(const Value& value, Writer& out, int depth);

void WriteScalar(const Value& value, Writer& out) {
  if (value.IsNone()) {
    out.Own("None");
  } else if (value.IsBool()) {
    out.Own(value.boolean() ? "True" : "False");
  } else if (value.IsInt()) {
    out.Own(std::to_string(value.integer()));
  } else if (value.IsBigInt()) {
    out.Own(value.digits());
  } else if (value.IsFloat()) {
    out.Own(FloatRepr(value.number()));
  } else {
    out.Own("<" + std::string(value.TypeName()) + ">");
  }
}

void WriteRepr(const Value& value, Writer& out, int depth) {
  if (depth > kMaxContainerDepth) Fail("a value is nested too deeply to be printed");
  bool first = true;
  const auto separate = [&] {
    if (!first) out.Own(", ");
    first = false;
  };
  if (value.IsText()) {
    WriteStringRepr(value.text(), out);
  } else if (value.IsUndefined()) {
    out.Own("Undefined");
  } else if (value.IsList()) {
    const List& list = value.list();
    out.Own(list.is_tuple ? "(" : "[");
    for (const Value& item : list.items) {
      separate();
      WriteRepr(item, out, depth + 1);
    }
    if (list.is_tuple && list.items.size() == 1) out.Own(",");
    out.Own(list.is_tuple ? ")" : "]");
  } else if (value.IsDict() || value.space() != nullptr) {
    const auto pair = [&](const Value& key, const Value& item) {
      separate();
      WriteRepr(key, out, depth + 1);
      out.Own(": ");
      WriteRepr(item, out, depth + 1);
    };
    if (value.IsDict()) {
      out.Own("{");
      for (const auto& [key, item] : value.dict().items) pair(key, item);
      out.Own("}");
    } else {
      out.Own("<Namespace {");
      for (const auto& [key, item] : value.space()->items) pair(Value::Trusted(key), item);
      out.Own("}>");
    }
  } else {
    WriteScalar(value, out);
  }
}

void WriteJsonString(const Text& text, bool ensure_ascii, Writer& out) {
  out.Own("\"");
  WriteEscaped(text, out, [ensure_ascii](char32_t c) -> std::string {
    switch (c) {
      case '"':
        return "\\\"";
      case '\\':
        return "\\\\";
      case '\n':
        return "\\n";
      case '\r':
        return "\\r";
      case '\t':
        return "\\t";
      case '\f':
        return "\\f";
      case '\b':
        return "\\b";
      default:
        break;
    }
    if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000)) return Hex("\\u%04x", c);
    if (ensure_ascii && c >= 0x10000) {
      return Hex("\\u%04x", 0xD800 + ((c - 0x10000) >> 10)) +
             Hex("\\u%04x", 0xDC00 + ((c - 0x10000) & 0x3FF));
    }
    return "";
  });
  out.Own("\"");
}

std::string JsonFloat(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return FloatRepr(value);
}

class JsonWriter {
 public:
  JsonWriter(const JsonFormat& format, Writer& out) : format_(format), out_(out) {}

  void Write(const Value& value, int depth) {
    if (depth > kMaxContainerDepth) Fail("tojson: the value is nested too deeply");
    if (value.IsText()) {
      WriteJsonString(value.text(), format_.ensure_ascii, out_);
    } else if (value.IsNone()) {
      out_.Own("null");
    } else if (value.IsBool()) {
      out_.Own(value.boolean() ? "true" : "false");
    } else if (value.IsInt()) {
      out_.Own(std::to_string(value.integer()));
    } else if (value.IsBigInt()) {
      out_.Own(value.digits());
    } else if (value.IsFloat()) {
      out_.Own(JsonFloat(value.number()));
    } else if (value.IsList()) {
      const auto& items = value.list().items;
      Container("[", "]", items.size(), depth, [&](size_t i) { Write(items[i], depth + 1); });
    } else if (value.IsDict()) {
      WriteDict(value.dict(), depth);
    } else {
      Fail("tojson: an object of type " + std::string(value.TypeName()) +
           " is not JSON serializable");
    }
  }

 private:
  void WriteDict(const Dict& dict, int depth) {
    out_.budget().Elements(dict.items.size());
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (format_.sort_keys) {
      std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
        return Less(a->first, b->first, out_.budget());
      });
    }
    Container("{", "}", items.size(), depth, [&](size_t i) {
      WriteKey(items[i]->first);
      out_.Own(format_.key_separator);
      Write(items[i]->second, depth + 1);
    });
  }

  void WriteKey(const Value& key) {
    if (key.IsText()) {
      WriteJsonString(key.text(), format_.ensure_ascii, out_);
    } else if (key.IsNone()) {
      out_.Own("\"null\"");
    } else if (key.IsBool()) {
      out_.Own(key.boolean() ? "\"true\"" : "\"false\"");
    } else if (key.IsInt()) {
      out_.Own("\"" + std::to_string(key.integer()) + "\"");
    } else if (key.IsBigInt()) {
      out_.Own("\"" + key.digits() + "\"");
    } else if (key.IsFloat()) {
      out_.Own("\"" + JsonFloat(key.number()) + "\"");
    } else {
      Fail("tojson: keys must be str, int, float, bool or None, not " +
           std::string(key.TypeName()));
    }
  }

  template <typename Element>
  void Container(std::string_view open, std::string_view close, size_t count, int depth,
                 Element element) {
    out_.Own(open);
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) out_.Own(format_.item_separator);
      NewLine(depth + 1);
      element(i);
    }
    if (count > 0) NewLine(depth);
    out_.Own(close);
  }

  void NewLine(int depth) {
    if (!format_.indent) return;
    out_.Own("\n");
    for (int i = 0; i < depth; ++i) out_.Own(*format_.indent);
  }

  const JsonFormat& format_;
  Writer& out_;
};

std::string FixedFloat(double value, int digits) {
  char buffer[512];
  const int size = std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  return std::string(buffer, std::min<size_t>(size, sizeof(buffer) - 1));
}

}  // namespace

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string sign = text[0] == '-' ? "-" : "";
  std::string digits;
  for (const char c : text.substr(sign.size(), e - sign.size())) {
    if (c != '.') digits += c;
  }
  if (exponent < -4 || exponent >= 16) {
    std::string out = sign + digits.substr(0, 1);
    if (digits.size() > 1) out += "." + digits.substr(1);
    out += exponent < 0 ? "e-" : "e+";
    const std::string power = std::to_string(std::abs(exponent));
    return out + (power.size() < 2 ? "0" : "") + power;
  }
  if (exponent < 0) return sign + "0." + std::string(-exponent - 1, '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

Text ToText(const Value& value, Budget& budget) {
  if (value.IsText()) {
    budget.Copy(value.text());
    return value.text();
  }
  if (value.IsUndefined()) return Text();
  return Repr(value, budget);
}

Text Repr(const Value& value, Budget& budget) {
  Writer out(budget);
  WriteRepr(value, out, 0);
  return out.Take();
}

Text ToJson(const Value& value, const JsonFormat& format, Budget& budget) {
  Writer out(budget);
  JsonWriter(format, out).Write(value, 0);
  return out.Take();
}

Value PercentFormat(const Text& format, const Value& values, Budget& budget) {
  std::vector<Value> list;
  if (values.IsList() && values.list().is_tuple) {
    budget.Elements(values.list().items.size());
    list = values.list().items;
  } else {
    list.push_back(values);
  }
  size_t used = 0;
  const std::string& bytes = format.bytes();
  budget.Copy(format);
  Writer out(budget);
  size_t copied = 0;
  for (size_t at = bytes.find('%'); at != std::string::npos; at = bytes.find('%', copied)) {
    budget.Step();
    out.Piece(format, copied, at);
    size_t pos = at + 1;
    int precision = -1;
    if (pos < bytes.size() && bytes[pos] == '.') {
      precision = 0;
      for (++pos; pos < bytes.size() && bytes[pos] >= '0' && bytes[pos] <= '9'; ++pos) {
        precision = std::min(precision * 10 + (bytes[pos] - '0'), 1000);
      }
    }
    if (pos >= bytes.size()) Fail("incomplete format");
    if (precision > 100) Fail("unsupported format: more than 100 digits");
    const char conversion = bytes[pos];
    copied = pos + 1;
    if (conversion == '%') {
      out.Piece(format, pos, pos + 1);
      continue;
    }
    if (used >= list.size()) Fail("not enough arguments for format string");
    const Value& value = list[used++];
    if ((conversion == 's' || conversion == 'r') && precision < 0) {
      const Text text = conversion == 's' ? ToText(value, budget) : Repr(value, budget);
      out.Piece(text, 0, text.size());
    } else if ((conversion == 'd' || conversion == 'i') && value.IsNumber() && precision < 0) {
      if (value.IsFloat() && !(std::abs(value.number()) < 0x1p62)) Fail("the number is too large");
      out.Own(
          std::to_string(value.IsFloat() ? static_cast<int64_t>(value.number()) : value.integer()));
    } else if (conversion == 'f' && value.IsNumber()) {
      out.Own(FixedFloat(value.number(), precision < 0 ? 6 : precision));
    } else {
      Fail("unsupported format: conversion '" + std::string(1, conversion) + "' of " +
           std::string(value.TypeName()));
    }
  }
  out.Piece(format, copied, format.size());
  const bool is_tuple = values.IsList() && values.list().is_tuple;
  const bool may_be_left =
      values.IsDict() || values.IsUndefined() || (values.IsList() && !is_tuple);
  if (used < list.size() && !may_be_left) {
    Fail("not all arguments converted during string formatting");
  }
  return out.Take();
}

}  // namespace moeserve::chat
