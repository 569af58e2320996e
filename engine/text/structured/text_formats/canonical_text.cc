#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/constraint.h"

namespace moeserve {
namespace {

// Appends values to a text from which they can be read back: the length of a text comes before the
// text, and the number of elements before a list.
class Writer {
 public:
  void Add(int64_t number) { out_ += Concat(number, ';'); }
  void Add(const std::string& text) { out_ += Concat(text.size(), ':', text); }
  void Add(const std::vector<std::string>& texts) {
    Add(std::ssize(texts));
    for (const std::string& text : texts) Add(text);
  }
  void Add(const TextFormat& format) {
    Add(static_cast<int64_t>(format.kind));
    Add(format.text);
    Add(format.choices);
    Add(format.excluded);
    Add(int64_t{format.must_end});
    Add(int64_t{format.strict});
    Add(int64_t{format.closed_objects});
    Add(std::ssize(format.parts));
    for (const TextFormat& part : format.parts) Add(part);
    Add(int64_t{format.tags != nullptr});
    if (format.tags != nullptr) Add(*format.tags);
  }
  void Add(const StructuralTags& tags) {
    Add(std::ssize(tags.tags));
    for (const StructuralTag& tag : tags.tags) {
      Add(tag.begin);
      Add(tag.content);
      Add(tag.end);
    }
    Add(int64_t{tags.free_text});
    Add(tags.triggers);
    Add(tags.excluded);
    Add(int64_t{tags.at_least_one});
    Add(int64_t{tags.stop_after_first});
    Add(int64_t{tags.max_tags});
    Add(tags.prefix);
    Add(tags.separator);
    Add(tags.suffix);
    Add(int64_t{tags.json_array});
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

}  // namespace

std::string CanonicalText(const ConstraintSpec& spec) {
  Writer writer;
  writer.Add(static_cast<int64_t>(spec.kind));
  writer.Add(int64_t{spec.strict});
  writer.Add(int64_t{spec.closed_objects});
  writer.Add(spec.text);
  writer.Add(spec.choices);
  writer.Add(int64_t{spec.format != nullptr});
  if (spec.format != nullptr) writer.Add(*spec.format);
  return writer.Take();
}

ConstraintSpec TagsConstraint(StructuralTags tags) {
  TextFormat format;
  format.kind = TextFormat::Kind::kTags;
  format.tags = std::make_shared<const StructuralTags>(std::move(tags));
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kFormat;
  spec.format = std::make_shared<const TextFormat>(std::move(format));
  return spec;
}

}  // namespace moeserve
