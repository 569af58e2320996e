#include "model_loaders/files/torch/pickle.h"

#include <filesystem>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "gtest/gtest.h"
#include "model_loaders/files/torch/pickle_calls.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using testing::Mentions;
using testing::Number;
using testing::PickleGlobal;
using testing::PickleString;

// A string literal, which may contain NUL bytes.
template <size_t kSize>
std::string Bytes(const char (&text)[kSize]) {
  return std::string(text, kSize - 1);
}

// Writes a value much as Python's repr() does; a call as module.name(arguments), followed by its
// contents and its state.
std::string Repr(const PickleValue& value) {
  const auto join = [&](const char* open, const char* close) {
    std::string text = open;
    for (size_t i = 0; i < value.items.size(); ++i) {
      const bool after_key = value.Is(PickleKind::kDict) && i % 2 == 1;
      if (i > 0) text += after_key ? ": " : ", ";
      text += Repr(*value.items[i]);
    }
    return text + close;
  };
  switch (value.kind) {
    case PickleKind::kBigInt:
      return "<big>";
    case PickleKind::kFloat:
      return std::to_string(value.real);
    case PickleKind::kString:
      return Concat('\'', value.text, '\'');
    case PickleKind::kBytes:
      return Concat("b'", Printable(value.text), '\'');
    case PickleKind::kTuple:
      return join("(", ")");
    case PickleKind::kList:
      return join("[", "]");
    case PickleKind::kDict:
      return join("{", "}");
    case PickleKind::kSet:
      return join("set(", ")");
    case PickleKind::kGlobal:
      return value.FullName();
    case PickleKind::kPersistentId:
      return join("id<", ">");
    case PickleKind::kCall: {
      std::string text = value.callee().FullName() + Repr(value.arguments());
      for (const PickleValue* part : {value.keywords(), value.contents(), value.state()}) {
        if (part != nullptr) text += " + " + Repr(*part);
      }
      return text;
    }
    default:
      return ShowPickle(value);
  }
}

std::string ReadPickleText(std::string_view pickle) {
  const auto tree = PickleTree::Parse(pickle);
  return tree.ok() ? Repr(tree->root()) : testing::Message(tree.status());
}

absl::Status PickleRefusal(std::string_view pickle, const PickleLimits& limits = {}) {
  return PickleTree::Parse(pickle, limits).status();
}

TEST(Pickle, ReadsScalars) {
  EXPECT_EQ(ReadPickleText("N."), "None");
  EXPECT_EQ(ReadPickleText("\x80\x02\x88."), "True");
  EXPECT_EQ(ReadPickleText("\x89."), "False");
  EXPECT_EQ(ReadPickleText("I01\n."), "True");
  EXPECT_EQ(ReadPickleText("I00\n."), "False");
  EXPECT_EQ(ReadPickleText("I-12\n."), "-12");
  EXPECT_EQ(ReadPickleText("L34L\n."), "34");
  EXPECT_EQ(ReadPickleText("L9223372036854775808L\n."), "<big>");
  EXPECT_EQ(ReadPickleText("K\xff."), "255");
  EXPECT_EQ(ReadPickleText("M\x01\x02."), "513");
  EXPECT_EQ(ReadPickleText("J\xfe\xff\xff\xff."), "-2");
  EXPECT_EQ(ReadPickleText(Bytes("\x8a\x00.")), "0");
  EXPECT_EQ(ReadPickleText("\x8a\x01\xff."), "-1");
  EXPECT_EQ(ReadPickleText(Bytes("\x8a\x02\xff\x00.")), "255");
  EXPECT_EQ(ReadPickleText(Bytes("\x8b\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80.")),
            "-9223372036854775808");
  EXPECT_EQ(ReadPickleText(Bytes("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.")), "<big>");
  EXPECT_EQ(ReadPickleText("F-0.25\n."), "-0.250000");
  EXPECT_EQ(ReadPickleText(Bytes("G\x3f\xe0\x00\x00\x00\x00\x00\x00.")), "0.500000");
}

TEST(Pickle, ReadsStrings) {
  EXPECT_EQ(ReadPickleText(Bytes("X\x02\x00\x00\x00hi.")), "'hi'");
  EXPECT_EQ(ReadPickleText(Bytes("\x8c\x02hi.")), "'hi'");
  EXPECT_EQ(ReadPickleText(Bytes("\x8d\x02\x00\x00\x00\x00\x00\x00\x00hi.")), "'hi'");
  EXPECT_EQ(ReadPickleText(Bytes("T\x02\x00\x00\x00hi.")), "'hi'");
  EXPECT_EQ(ReadPickleText(Bytes("U\x02hi.")), "'hi'");
  EXPECT_EQ(ReadPickleText("S'a\\x41\\\\\\n\\''\n."), "'aA\\\n''");
  EXPECT_EQ(ReadPickleText("Va\\u00e9\xe9\\U0001f600\n."), "'aéé😀'");
  EXPECT_EQ(ReadPickleText(Bytes("B\x02\x00\x00\x00\x01\x02.")), "b'\\x01\\x02'");
  EXPECT_EQ(ReadPickleText(Bytes("C\x01\x01.")), "b'\\x01'");
  EXPECT_EQ(ReadPickleText(Bytes("\x8e\x01\x00\x00\x00\x00\x00\x00\x00\x01.")), "b'\\x01'");
  EXPECT_EQ(ReadPickleText(Bytes("\x96\x01\x00\x00\x00\x00\x00\x00\x00\x01.")), "b'\\x01'");
}

TEST(Pickle, ReadsContainers) {
  EXPECT_EQ(ReadPickleText("(I1\nI2\nt."), "(1, 2)");
  EXPECT_EQ(ReadPickleText(")."), "()");
  EXPECT_EQ(ReadPickleText("K\x01\x85."), "(1)");
  EXPECT_EQ(ReadPickleText("K\x01K\x02\x86."), "(1, 2)");
  EXPECT_EQ(ReadPickleText("K\x01K\x02K\x03\x87."), "(1, 2, 3)");
  EXPECT_EQ(ReadPickleText("(K\x01l."), "[1]");
  EXPECT_EQ(ReadPickleText("]K\x01\x61(K\x02K\x03\x65."), "[1, 2, 3]");
  EXPECT_EQ(ReadPickleText("(K\x01Nd."), "{1: None}");
  EXPECT_EQ(ReadPickleText("}K\x01K\x02s(K\x03K\x04u."), "{1: 2, 3: 4}");
  EXPECT_EQ(ReadPickleText("\x8f(K\x01K\x02\x90."), "set(1, 2)");
  EXPECT_EQ(ReadPickleText("(K\x01\x91."), "set(1)");
  EXPECT_EQ(ReadPickleText("K\x07"
                           "0K\x01"
                           "2\x86."),
            "(1, 1)");  // POP, DUP
  EXPECT_EQ(ReadPickleText("K\x01(K\x02K\x03"
                           "1\x85."),
            "(1)");  // POP_MARK
  EXPECT_EQ(ReadPickleText(Bytes("K\x05q\x00"
                                 "0h\x00r\x01\x00\x00\x00"
                                 "0j\x01\x00\x00\x00.")),
            "5");
  EXPECT_EQ(ReadPickleText("I5\np0\n0g0\n."), "5");
  EXPECT_EQ(ReadPickleText(Bytes("\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x05\x94"
                                 "0h\x00.")),
            "5");
  EXPECT_EQ(ReadPickleText(Bytes("(K\x01\x89tQ.")), "id<(1, False)>");
  EXPECT_EQ(ReadPickleText("Pthing\n."), "id<'thing'>");
}

TEST(Pickle, CallsBecomeRecords) {
  const std::string dict = PickleGlobal("collections", "OrderedDict");
  EXPECT_EQ(ReadPickleText(dict + ")R."), "{}");
  EXPECT_EQ(ReadPickleText(dict + ")R(K\x01K\x02u}b."), "{1: 2}");
  EXPECT_EQ(ReadPickleText(dict + "]K\x01K\x02\x86"
                                  "a\x85R."),
            "{1: 2}");
  EXPECT_EQ(ReadPickleText("c__builtin__\nset\n(K\x01l\x85R."), "set(1)");
  EXPECT_EQ(ReadPickleText(PickleGlobal("torch", "device") + "K\x01\x85R."), "torch.device(1)");
  EXPECT_EQ(ReadPickleText(PickleGlobal("torch", "float16") + "."), "torch.float16");
  EXPECT_EQ(ReadPickleText("\x8c\x05torch\x8c\x04Size\x93)\x85R."), "torch.Size(())");
  const std::string arguments = PickleGlobal("argparse", "Namespace");
  EXPECT_EQ(ReadPickleText(arguments + ")\x81}K\x01K\x02sb."), "argparse.Namespace() + {1: 2}");
  EXPECT_EQ(ReadPickleText("(iargparse\nNamespace\n}b."), "argparse.Namespace() + {}");
  EXPECT_EQ(ReadPickleText("(" + arguments + "K\x01o."), "argparse.Namespace(1)");
  EXPECT_EQ(ReadPickleText(arguments + ")}K\x01K\x02s\x92."), "argparse.Namespace() + {1: 2}");
  // An object that is also a container, and one whose state leads back to it.
  EXPECT_EQ(
      ReadPickleText(PickleGlobal("fairseq.logging.meters", "MetersDict") + ")R}b(K\x01K\x02u."),
      "fairseq.logging.meters.MetersDict() + {1: 2} + {}");
  const std::string cycle = Bytes("comegaconf\nDictConfig\n)\x81q\x00}X\x01\x00\x00\x00ph\x00sb.");
  const auto tree = PickleTree::Parse(cycle);
  ASSERT_TRUE(tree.ok()) << tree.status();
  EXPECT_EQ(tree->root().state()->Get("p"), &tree->root());
}

// Every way in which a pickle can call os.system, and related functions. The file that the command
// would make must not appear.
TEST(Pickle, RefusesCallsOfCode) {
  testing::TempFolder folder;
  const std::filesystem::path proof = folder.path() / "proof";
  const std::string command = PickleString("touch " + proof.string());
  const std::string system = PickleGlobal("os", "system");
  const struct {
    std::string pickle;
    std::string instruction;
    std::string name;
  } cases[] = {
      {system + command + "\x85R.", "REDUCE", "os.system"},
      {PickleGlobal("posix", "system") + command + "\x85R.", "REDUCE", "posix.system"},
      {PickleGlobal("nt", "system") + command + "\x85R.", "REDUCE", "nt.system"},
      {PickleGlobal("builtins", "eval") + command + "\x85R.", "REDUCE", "builtins.eval"},
      {PickleGlobal("__builtin__", "exec") + command + "\x85R.", "REDUCE", "__builtin__.exec"},
      {PickleGlobal("builtins", "getattr") + command + "\x85R.", "REDUCE", "builtins.getattr"},
      {PickleGlobal("builtins", "__import__") + command + "\x85R.", "REDUCE", "__import__"},
      {PickleGlobal("subprocess", "Popen") + command + "\x85R.", "REDUCE", "subprocess.Popen"},
      {PickleGlobal("functools", "partial") + command + "\x85R.", "REDUCE", "functools.partial"},
      {PickleString("os") + PickleString("system") + "\x93" + command + "\x85R.", "REDUCE",
       "os.system"},
      {system + command + "\x85\x81.", "NEWOBJ", "os.system"},
      {system + command + "\x85}\x92.", "NEWOBJ_EX", "os.system"},
      {"(" + command + "ios\nsystem\n.", "INST", "os.system"},
      {"(" + system + command + "o.", "OBJ", "os.system"},
      // reached through an allowed function or module
      {PickleGlobal("copyreg", "__newobj__") + system + command + "\x86R.", "REDUCE", "os.system"},
      {PickleGlobal("copyreg", "_reconstructor") + system + PickleGlobal("builtins", "object") +
           "N\x87R.",
       "REDUCE", "os.system"},
      {PickleGlobal("torch._tensor", "_rebuild_from_type_v2") + "(" + system + command + "tR.",
       "REDUCE", "os.system"},
      {PickleString("torch.serialization") + PickleString("os.system") + "\x93" + command +
           "\x85R.",
       "REDUCE", "torch.serialization.os.system"},
      {PickleGlobal("torchx", "run") + command + "\x85R.", "REDUCE", "torchx.run"},
      {PickleGlobal("", "eval") + command + "\x85R.", "REDUCE", ".eval"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.instruction + " " + c.name);
    const absl::Status status = PickleRefusal(c.pickle);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(Mentions(status, {"byte ", c.instruction + ": ", c.name, "expected calls of data",
                                  "nothing of it was run"}));
  }
  // The whole file is refused, even if the call's result is dropped.
  EXPECT_FALSE(PickleRefusal(system + command + "\x85R0N.").ok());
  EXPECT_FALSE(std::filesystem::exists(proof));
  // A reference that is not called is harmless.
  EXPECT_EQ(ReadPickleText(system + "."), "os.system");
}

TEST(Pickle, RefusesWhatCannotBeRead) {
  const struct {
    const char* name;
    std::string pickle;
    std::vector<std::string> expect;
  } cases[] = {
      {"empty", "", {"byte 0: ", "end of the pickle"}},
      {"unknown instruction", "N\xff.", {"byte 1: ", "found byte 255"}},
      {"protocol", "\x80\x06N.", {"byte 0: PROTO", "at most 5", "found 6"}},
      {"no STOP", "N", {"byte 1: ", "end of the pickle"}},
      {"two values", "NN.", {"STOP", "one value", "found 2"}},
      {"no value", ".", {"STOP", "found 0"}},
      {"open mark", "(N.", {"STOP", "1 marks"}},
      {"text behind", "N.N", {"STOP", "1 more bytes"}},
      {"long string",
       Bytes("X\xff\xff\xff\xff"
             "a."),
       {"BINUNICODE", "found 4294967295"}},
      {"string beyond the end",
       Bytes("X\x09\x00\x00\x00"
             "a."),
       {"9 more bytes", "found 2"}},
      {"64-bit size", "\x8d" + Number(~0ull, 8) + ".", {"BINUNICODE8", "18446744073709551615"}},
      {"64-bit bytes", "\x8e" + Number(1ull << 63, 8) + ".", {"BINBYTES8", "9223372036854775808"}},
      {"long frame", "\x95" + Number(1ull << 60, 8) + "N.", {"FRAME", "found 1152921504606846976"}},
      {"negative count", "\x8b" + Number(0xFFFFFFFF, 4) + ".", {"LONG4", "4294967295 more bytes"}},
      {"memo index", "Nr" + Number(0xFFFFFFFF, 4) + ".", {"LONG_BINPUT", "found 4294967295"}},
      {"memo of nothing", Bytes("h\x07."), {"BINGET", "found 7"}},
      {"memo hole", Bytes("Nq\x05h\x03."), {"BINGET", "found 3"}},
      {"memo text", "Np-1\n.", {"PUT", "\"-1\""}},
      {"put of nothing", Bytes("q\x00."), {"BINPUT", "found none"}},
      {"pop of nothing", "0.", {"POP", "found none"}},
      {"pop across a mark", "N(\x85.", {"TUPLE1", "expected 1 values", "found 0"}},
      {"tuple of too few", "N\x86.", {"TUPLE2", "found 1"}},
      {"no mark", "Nt.", {"TUPLE", "a mark", "found none"}},
      {"append to a number", "K\x01Na.", {"APPEND", "a list", "found 1"}},
      {"append across a mark", "](Na.", {"APPEND", "a list", "found none"}},
      {"item of a list", "]NNs.", {"SETITEM", "a dict", "a list"}},
      {"odd items", "}(NNNu.", {"SETITEMS", "found 3 values"}},
      {"odd dict", "(NNNd.", {"DICT", "found 3 values"}},
      {"unhashable key", "}]Ns.", {"SETITEM", "hashable", "found a list"}},
      {"set of a list", "](N\x90.", {"ADDITEMS", "a set"}},
      {"call of a value", "N)R.", {"REDUCE", "call of None"}},
      {"call of a result", PickleGlobal("torch", "f") + ")R)R.", {"an object of torch.f"}},
      {"arguments", PickleGlobal("torch", "f") + "NR.", {"tuple of arguments", "found None"}},
      {"keywords", PickleGlobal("torch", "f") + ")N\x92.", {"NEWOBJ_EX", "dict", "found None"}},
      {"class missing", "(o.", {"OBJ", "found none"}},
      {"names of a global", "NN\x93.", {"STACK_GLOBAL", "two strings", "found None"}},
      {"state of a global", PickleGlobal("os", "environ") + "}b.", {"BUILD", "os.environ"}},
      {"state of a list", "]}b.", {"BUILD", "a list"}},
      {"two states", PickleGlobal("torch", "f") + ")R}b}b.", {"BUILD", "second state"}},
      {"list and dict", PickleGlobal("torch", "f") + ")RNaNNs.", {"SETITEM", "one kind"}},
      {"extension 1", "\x82\x01.", {"EXT1", "extension registry"}},
      {"extension 2", "\x83\x01\x02.", {"EXT2", "extension registry"}},
      {"extension 4", Bytes("\x84\x01\x00\x00\x00."), {"EXT4", "extension registry"}},
      {"buffer", "\x97.", {"NEXT_BUFFER", "outside"}},
      {"text number", "I1.5\n.", {"INT", "\"1.5\""}},
      {"text float", "Fx\n.", {"FLOAT", "\"x\""}},
      {"no line end", "I15", {"INT", "no end of line"}},
      {"quotes", "Sabc\n.", {"STRING", "in quotes"}},
      {"escape", "S'\\q'\n.", {"STRING", "escape"}},
      {"unicode escape", "V\\u12\n.", {"UNICODE", "hexadecimal"}},
      {"code point", "V\\U00110000\n.", {"UNICODE", "code point"}},
      {"list in itself",
       Bytes("]q\x00h\x00"
             "a."),
       {"contains itself", "a list"}},
      {"list in its tuple",
       Bytes("]q\x00h\x00\x85"
             "a."),
       {"contains itself"}},
      {"dict in itself", Bytes("}q\x00Nh\x00s."), {"contains itself", "a dict"}},
      {"same key",
       "}" + PickleString("k") + "N" + "s" + PickleString("k") + "Ns.",
       {"every key once", "\"k\" twice"}},
      {"ordered dict", PickleGlobal("collections", "OrderedDict") + "K\x01\x85R.", {"pairs"}},
      {"ordered pairs", PickleGlobal("collections", "OrderedDict") + "]Na\x85R.", {"a pair"}},
      {"set argument", PickleGlobal("builtins", "set") + "K\x01\x85R.", {"set: expected"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::Status status = PickleRefusal(c.pickle);
    EXPECT_TRUE(Mentions(status, c.expect));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Pickle, LimitsDepth) {
  std::string inside_out = ")";
  for (int i = 0; i < 100'000; ++i) inside_out += "\x85";
  // Each list gets the next one after it was itself put into another list.
  std::string outside_in = Bytes("]q\x01");
  for (int i = 0; i < 100'000; ++i)
    outside_in += Bytes(
        "h\x01]q\x01"
        "a0");
  for (const std::string& pickle : {inside_out + ".", outside_in + "."}) {
    EXPECT_TRUE(Mentions(PickleRefusal(pickle), {"200 levels of nesting"}));
  }
  std::string longest = ")";
  for (int i = 1; i < 200; ++i) longest += "\x85";
  ASSERT_TRUE(PickleRefusal(longest + ".").ok());
  EXPECT_FALSE(PickleRefusal(longest + "\x85.").ok());
}

// Each level refers to the level below twice, so that a copy of every value would take 2^150 of
// them.
TEST(Pickle, SharedValuesTakeNoMemory) {
  std::string bomb = "K\x01";
  for (int i = 0; i < 150; ++i) bomb += "2\x86";
  const PickleLimits limits = {.max_values = 200, .max_references = 400};
  const auto tree = PickleTree::Parse(bomb + ".", limits);
  ASSERT_TRUE(tree.ok()) << tree.status();
  EXPECT_EQ(tree->root().height, 151);
  EXPECT_EQ(tree->root().items[0], tree->root().items[1]);
}

TEST(Pickle, LimitsMemory) {
  const auto repeat = [](std::string_view piece, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += piece;
    return text;
  };
  EXPECT_TRUE(Mentions(PickleRefusal("N.", {.max_bytes = 1}), {"at most 1 bytes", "found 2"}));
  EXPECT_TRUE(
      Mentions(PickleRefusal(repeat("]", 20) + ".", {.max_values = 10}), {"at most 10 values"}));
  EXPECT_TRUE(Mentions(PickleRefusal(repeat("N", 20) + ".", {.max_stack = 10}),
                       {"stack of at most 10 values"}));
  EXPECT_TRUE(
      Mentions(PickleRefusal(repeat("(", 20) + ".", {.max_stack = 10}), {"at most 10 marks"}));
  EXPECT_TRUE(Mentions(PickleRefusal("](" + repeat("N", 20) + "e.", {.max_references = 10}),
                       {"at most 10 places"}));
  EXPECT_TRUE(Mentions(PickleRefusal(PickleString("abcdef") + ".", {.max_string = 5}),
                       {"at most 5 bytes", "found 6"}));
  EXPECT_TRUE(
      Mentions(PickleRefusal("S'abcd'\n.", {.max_string = 5}), {"at most 5 bytes", "found 6"}));
}

TEST(PickleCalls, KnowsDataTypes) {
  for (const char* name : {"_rebuild_tensor_v2", "_rebuild_parameter"}) {
    EXPECT_TRUE(MayCall("torch._utils", name));
  }
  EXPECT_TRUE(MayCall("numpy.core.multiarray", "scalar"));
  EXPECT_TRUE(MayCall("builtins", "set"));
  EXPECT_FALSE(MayCall("builtins", "compile"));
  EXPECT_FALSE(MayCall("copyreg", "add_extension"));
  EXPECT_FALSE(MayCall("__main__", "Model"));
  EXPECT_FALSE(MayCall("numpyx", "scalar"));
  EXPECT_FALSE(MayCall("torch", "hub.load"));
}

}  // namespace
}  // namespace moeserve
