// The interface of a family, which is a format of checkpoint folders. A family recognizes and reads
// its config.json, and returns for each tensor of the model where the files store it. README.md
// describes how to add a family.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "kernels/base/quantize.h"
#include "nlohmann/json.hpp"

namespace moeserve {

inline constexpr std::string_view kConfigFile = "config.json";

// How files store matrices as small floating-point numbers with one scale per block.
enum class BlockFormatKind : uint8_t {
  kNone,
  kMxfp4,  // OCP's MX: E2M1, two elements per byte, the first in the lower half; one E8M0 scale for
           // 32 elements of a row
  kFp8     // OCP's E4M3; one floating-point scale for a rectangle of elements
};

struct BlockFormat {
  BlockFormatKind kind = BlockFormatKind::kNone;
  std::string scales = {};  // name of the stored tensor of scales
  int rows = 1;             // kFp8: the rectangle; those at the edges of a matrix can be smaller
  int columns = 1;
};

// The order in which files store blocks of adjacent rows (or columns): block i * inner + j of the
// model's tensor is block j * outer + i of the stored part.
struct BlockOrder {
  int64_t size = 0;  // of a block; 0: the order is that of the model
  int64_t outer = 1;
  int64_t inner = 1;

  // Returns the stored position of row or column `index` of the model's tensor.
  int64_t Stored(int64_t index) const {
    if (size == 0) return index;
    const int64_t block = index / size;
    return (block % inner * outer + block / inner) * size + index % size;
  }
};

// What the model's tensor is of the elements that files store.
struct ElementFunction {
  float (*apply)(float) = nullptr;  // null: the elements as they are
  // The elements for which apply() returns a finite number, for error messages; others are refused.
  std::string_view domain = {};
};

// Files store -e^x instead of x. The result is rounded once, so that its exponential is the number
// in the file, in all but a few cases to the last bit.
inline constexpr ElementFunction kLogOfNegative = {
    [](float x) { return static_cast<float>(std::log(-double{x})); }, "numbers below 0"};

// The same for e^x.
inline constexpr ElementFunction kLogarithm = {
    [](float x) { return static_cast<float>(std::log(double{x})); }, "numbers above 0"};

// What CheckpointConfig::decisions say of prediction layers that nobody wants.
inline constexpr std::string_view kPredictionsLeft =
    "the files have prediction layers, on which no answer depends; --draft-mtp drafts tokens with "
    "them";

// Where the files store one tensor of the model: a whole stored tensor, or a part of one.
struct TensorPlace {
  std::string name = {};  // name of the stored tensor

  // Shape of the stored tensor. If empty, the files store the model's tensor whole, in its own
  // shape.
  std::vector<int64_t> shape = {};

  // The part of the stored tensor: the slice `index` of the outermost dimension, if `index` is set.
  // If `transposed`, the slice is a matrix that is stored as its transpose. Of the slice (or of its
  // transpose), the part is every `row_step`-th row from `first_row` on; with a negative step, in
  // the opposite order. If `first_column` is set, only the columns from there on that the model's
  // tensor has belong to the part. Example: if the gate and up projections of all experts are
  // stored as one tensor [E, 2 * width, d], they begin at rows 0 and `width` of slice e.
  std::optional<int64_t> index = std::nullopt;
  bool transposed = false;
  int64_t first_row = 0;
  int64_t row_step = 1;
  std::optional<int64_t> first_column = std::nullopt;
  // If not 0, the stored tensor consists of groups of this many rows, an even number, in each of
  // which the halves are interleaved: the rows 0, n/2, 1, n/2 + 1, ... of the part. The part
  // consists of whole groups then. Projections whose rotary pairs are stored side by side are like
  // this.
  int64_t paired_rows = 0;

  // If not 0, the part consists of groups of this many adjacent rows; each group begins
  // `group_stride` rows behind the one before. row_step is 1, and paired_rows 0.
  int64_t group_rows = 0;
  int64_t group_stride = 0;

  // The order of the part's rows and columns. With the first one, row_step is 1, and there are no
  // paired_rows and only one group.
  BlockOrder row_blocks = {};
  BlockOrder column_blocks = {};

  // The stored tensor may have further dimensions of size 1.
  bool units = false;

  // If not kNone, `shape` is that of the widened tensor.
  BlockFormat format = {};

  // The model's tensor is this function of the stored part, plus a number, computed in f32. In
  // block formats, there is neither.
  ElementFunction function = {};
  float add = 0.0f;

  // The configuration keys that determine `shape`, such as "[2 * width, hidden_size]", for error
  // messages. If empty, TensorRequirement::follows_from of the model's tensor is used.
  std::string follows_from = {};
};

// The configuration of one checkpoint folder. The reader of the folder's family returns it.
class CheckpointConfig {
 public:
  virtual ~CheckpointConfig() = default;

  // Returns where the files store `tensor`; nullopt if the model has no tensor of that name.
  virtual std::optional<TensorPlace> Place(const TensorRequirement& tensor) const = 0;

  // `name` is a stored tensor that no Place() refers to. Returns the reason why it should not be
  // there, usually the setting that excludes it; nullopt if the family ignores the tensor.
  virtual std::optional<std::string> LeftOverReason(std::string_view name) const = 0;

  // Returns the same configuration except that the LM head is a stored tensor instead of the
  // embedding matrix; null if the families' files never have a head beside tied embeddings.
  virtual std::unique_ptr<const CheckpointConfig> WithOwnHead() const { return nullptr; }

  // Returns `text` with the configuration keys of the native format, such as
  // "attention[0].head_dim" in messages of Validate(), RequiredTensors() and LeftOverReason(),
  // replaced by the keys of this family's config.json.
  virtual std::string AsInFile(std::string_view text) const = 0;

  ModelSpec spec;
  // The integer type in which the files store matrices; kNone if they store floating point.
  // QuantizationOf() returns which matrices this concerns. Each of them is a whole stored tensor,
  // never a part of one.
  Quantization quantization = Quantization::kNone;
  // One sentence for each choice that the reader made where the files leave the model's answers
  // open, or where they differ from how the authors' code computes them.
  std::vector<std::string> decisions;
  // Why texts cannot be as long as the files say, if spec.max_position_embeddings is less than
  // that; for error messages about the length of a context.
  std::string context_reason = {};
  // The languages of a translator, which tell its dictionaries apart; empty if the configuration
  // has none.
  std::string source_language = {}, target_language = {};
  // Keys of the configuration that were ignored, because they do not change the model's answers.
  std::vector<std::string> ignored_keys;
  // How the names of prediction layers' tensors begin in the files of the family; empty if there
  // are none. Notes count those that are not needed, instead of listing them.
  std::string prediction_prefix = {};
  // What contains the configuration keys, for error messages.
  std::string_view key_place = kConfigFile;
};

using ConfigResult = Result<std::unique_ptr<const CheckpointConfig>>;

// What a reader knows of a folder beside its configuration. Families whose files exist in several
// layouts recognize the layout by it.
struct StoredNames {
  std::set<std::string, std::less<>> names = {};  // of the tensors that the files store
  // The shapes of those that have three dimensions, which are mostly stacks of experts.
  std::map<std::string, std::vector<int64_t>, std::less<>> stacks = {};
  // The object of config.json that the configuration is, for error messages: "text_config"; "" if
  // it is the whole file.
  std::string key_object = {};
  // Whether the configuration shall have ModelSpec::prediction, if the files store such layers;
  // otherwise their tensors are not needed.
  bool predictions = false;

  bool contains(std::string_view name) const { return names.contains(name); }
};

// One family. Its functions must accept a JSON object with any content.
struct Architecture {
  std::string_view model_type;  // value in config.json, and the family's name in messages
  // Null: a file whose "model_type" is `model_type` belongs to the family.
  bool (*recognizes)(const nlohmann::json& config) = nullptr;
  // Returns a configuration whose spec has passed ValidateConfig(). Otherwise InvalidArgument with
  // key, expected and found value; the message begins with "config.json: ". `stored` is used only
  // during the call.
  ConfigResult (*read)(const nlohmann::json& config, const StoredNames& stored);

  bool Recognizes(const nlohmann::json& config) const;
};

using ArchitectureList = std::span<const Architecture* const>;

// Returns the model types of the families for error messages: "a", "b" or "c", in quotes.
std::string ModelTypes(ArchitectureList architectures);

// Parses the text of config.json. InvalidArgument if the text is no JSON or if its size, depth or
// number of values exceeds a limit. Error messages begin with "config.json: ".
Result<nlohmann::json> ParseConfigJson(std::string_view text);

// Returns whether the value of the key "model_type" is the string `model_type`.
bool HasModelType(const nlohmann::json& config, std::string_view model_type);

// Removes the keys `ignored` from a configuration. A key that is not one of the whole file is a
// path of keys with dots in between, such as "rope_scaling.alpha" or "attention[1].window".
void RemoveKeys(const std::vector<std::string>& ignored, nlohmann::json* config);
void RemoveKeys(const std::vector<std::string>& ignored, nlohmann::ordered_json* config);

// Returns the part of a message about an unsuitable key that names the option to load the model
// without it.
std::string IgnoreHint(std::string_view key);
// Returns the message about a key of which nothing is known. `found` is its value as text, `what`
// what the files call a key.
std::string UnknownKey(std::string_view key, std::string_view found, std::string_view what = "key");

// A configuration key and its integer value.
struct NamedCount {
  std::string_view key;
  int value = 0;
};

// Returns InvalidArgument if a model may not have this many layers with this many experts each (0
// means no experts). Families must call it before they build lists of these lengths, so that a
// hostile configuration cannot demand much memory.
absl::Status CheckListLengths(const NamedCount& layers, const NamedCount& experts);

// Calls Validate(config.spec). The error contains the keys of the family's config.json.
absl::Status ValidateConfig(const CheckpointConfig& config);

}  // namespace moeserve
