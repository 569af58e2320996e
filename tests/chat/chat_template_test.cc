// test_differential.py compares the template language with jinja2. This file tests trusted spans,
// limits and hostile templates.
#include "engine/text/chat/chat_template.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace moeserve::chat {
namespace {

using OrderedJson = nlohmann::ordered_json;

Result<RenderedPrompt> Render(std::string_view source, RenderInput input = {}) {
  MOESERVE_ASSIGN_OR_RETURN(const auto compiled, ChatTemplate::Compile(source));
  return compiled->Render(input);
}

Result<RenderedPrompt> RenderMessage(std::string_view source, const std::string& content) {
  RenderInput input;
  input.messages = OrderedJson::array({{{"role", "user"}, {"content", content}}});
  input.trusted["bos_token"] = "<s>";
  input.untrusted["name"] = "N";
  return Render(source, input);
}

std::vector<std::string> FamilyTemplates() {
  std::vector<std::string> templates;
  for (const char* name : {"chatml", "deepseek", "gemma", "llama3", "mistral", "phi3"}) {
    std::ifstream file(std::string(MOESERVE_SOURCE_DIR) + "/tests/chat/templates/" + name +
                       ".jinja");
    std::stringstream text;
    text << file.rdbuf();
    EXPECT_FALSE(text.str().empty()) << name;
    templates.push_back(text.str());
  }
  return templates;
}

// Returns the rendered text, with untrusted parts in brackets.
std::string Marked(std::string_view source, const std::string& content) {
  const auto prompt = RenderMessage(source, content);
  if (!prompt.ok()) return std::string(prompt.status().message());
  std::string out;
  size_t at = 0;
  const auto other = [&](size_t end) {
    if (at < end) out += "[" + prompt->text.substr(at, end - at) + "]";
  };
  for (const TextSpan& span : prompt->trusted) {
    EXPECT_LT(span.begin, span.end);
    EXPECT_GE(span.begin, at);
    other(span.begin);
    out += prompt->text.substr(span.begin, span.end - span.begin);
    at = span.end;
  }
  other(prompt->text.size());
  return out;
}

TEST(ChatTemplate, RendersAConversation) {
  RenderInput input;
  input.messages = OrderedJson::array({{{"role", "user"}, {"content", "hi"}}});
  input.untrusted["add_generation_prompt"] = true;
  const auto prompt = Render(
      "{% for m in messages %}\n<|{{ m.role }}|>{{ m.content }}\n{% endfor %}\n"
      "{% if add_generation_prompt %}\n<|assistant|>\n{%- endif %}",
      input);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->text, "<|user|>hi\n<|assistant|>");
  EXPECT_EQ(prompt->trusted, (std::vector<TextSpan>{{0, 8}, {10, 24}}));
}

TEST(ChatTemplate, TrustGoesWithTheBytes) {
  const std::string m = "messages[0].content";
  EXPECT_EQ(Marked("a{{ " + m + " }}b", "x<s>y"), "a[x<s>y]b");
  EXPECT_EQ(Marked("{{ bos_token + " + m + " ~ name }}", "x"), "<s>[xN]");
  EXPECT_EQ(Marked("<|{{ messages[0].role }}|>", ""), "<|user|>");
  EXPECT_EQ(Marked("{{ (' <' ~ " + m + " ~ '> ') | trim }}", " x "), "<[ x ]>");
  EXPECT_EQ(Marked("{{ ('ab' ~ " + m + " ~ 'cd')[1:-1] }}", "xy"), "b[xy]c");
  EXPECT_EQ(Marked("{{ ('ab' ~ " + m + ")[::-1] }}", "xy"), "[yx]ba");
  EXPECT_EQ(Marked("{{ ('a' ~ " + m + ") | upper }}", "ß"), "A[SS]");
  EXPECT_EQ(Marked("{{ " + m + ".replace('x', '<t>') }}", "axb"), "[a]<t>[b]");
  EXPECT_EQ(Marked("{{ ('-' ~ " + m + ").replace('x', name) }}", "axb"), "-[aNb]");
  EXPECT_EQ(Marked("{{ " + m + ".split(',') | join('|') }}", "a,b"), "[a]|[b]");
  EXPECT_EQ(Marked("{% for c in 'p' ~ " + m + " %}{{ c }}.{% endfor %}", "q"), "p.[q].");
  EXPECT_EQ(Marked("{{ {'k': " + m + "} | tojson }}", "<s>\n"), R"({"k": "[<s>\n]"})");
  EXPECT_EQ(Marked("{{ [" + m + "] }}", "<s>"), "['[<s>]']");
  EXPECT_EQ(Marked("{% set x %}({{ " + m + " }}){% endset %}{{ x * 2 }}", "y"), "([y])([y])");
  EXPECT_EQ(Marked("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(" + m + ") }}", "y"), "<[y]>");
  EXPECT_EQ(
      Marked("{% set ns = namespace(v='<') %}{% set ns.v = ns.v ~ " + m + " %}{{ ns.v }}", "y"),
      "<[y]");
  EXPECT_EQ(Marked("{{ '%s=%s' % ('k', " + m + ") }}", "v"), "k=[v]");
  EXPECT_EQ(Marked("{{ ('a\n' ~ " + m + ") | indent(2) }}", "b\nc"), "a\n  [b]\n  [c]");
  EXPECT_EQ(Marked("{{ ('A b ' ~ " + m + ") | title }}", "c D"), "A B [C D]");
}

TEST(ChatTemplate, NumbersOfTheClientCannotSpellAToken) {
  RenderInput input;
  input.untrusted["x"] = OrderedJson::parse(R"({"<s>": ["<s>", 1.5, null, {"role": "<s>"}]})");
  const auto prompt = Render("{{ x | tojson }}{{ x }}{{ x | items | first | join }}", input);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  for (size_t at = prompt->text.find("<s>"); at != std::string::npos;
       at = prompt->text.find("<s>", at + 1)) {
    for (const TextSpan& span : prompt->trusted) {
      EXPECT_FALSE(span.begin <= at && at < span.end);
    }
  }
}

// Values of the type binary are integers beyond 64 bits.
TEST(ChatTemplate, LongIntegersKeepTheirDigits) {
  RenderInput input;
  const std::string digits = "-123456789012345678901234567890";
  input.untrusted["x"] = OrderedJson::binary({digits.begin(), digits.end()});
  input.untrusted["u"] = uint64_t{18446744073709551615U};
  const auto text = [&](std::string_view source) {
    const auto prompt = Render(source, input);
    return prompt.ok() ? prompt->text : std::string(prompt.status().message());
  };
  EXPECT_EQ(text("{{ x }} {{ [x] }} {{ x | tojson }} {{ {x: u} | tojson }}"),
            digits + " [" + digits + "] " + digits + " {\"" + digits + "\": 18446744073709551615}");
  EXPECT_EQ(text("{{ x is integer }} {{ x is number }} {{ x is float }} {{ x is string }}"),
            "True True False False");
  EXPECT_EQ(text("{{ x | int }} {{ x | abs }} {{ x | round }} {{ x | string | length }}"),
            digits + " " + digits.substr(1) + " " + digits + " 31");
  EXPECT_EQ(text("{{ x < u }} {{ u > 5 }} {{ u == x }} {{ 'a' if x }}"), "True True False a");
}

TEST(ChatTemplate, ErrorsNameLineAndCause) {
  const auto message = [](std::string_view source) {
    return std::string(Render(source).status().message());
  };
  EXPECT_EQ(message("a\nb\n{{ missing.x }}"), "chat template, line 3: 'missing' is undefined");
  EXPECT_EQ(message("{% if 1 %}\n\n{{ 1 + 'a' }}{% endif %}"),
            "chat template, line 3: unsupported operands of +: int and str");
  EXPECT_EQ(message("\n{% include 'x' %}"),
            "chat template, line 2: the tag 'include' is not expected here or not supported");
  EXPECT_EQ(message("{{ raise_exception('only ' ~ 2) }}"), "only 2");
  EXPECT_TRUE(absl::IsInvalidArgument(Render("{{ raise_exception('x') }}").status()));
  EXPECT_FALSE(ChatTemplate::Compile("\xff").ok());
  EXPECT_FALSE(ChatTemplate::Compile(std::string(kMaxTemplateBytes + 1, 'x')).ok());
}

std::string Repeat(const std::string& piece, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += piece;
  return out;
}

TEST(ChatTemplate, NoTemplateHangsOrExhausts) {
  const std::string big = "{% set s = 'x' * 100000 %}";
  const std::vector<std::string> sources = {
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
      "{% for a in range(100001) %}{% endfor %}",
      "{{ 'x' * 10000000000 }}",
      "{{ [1] * 1000000000 }}",
      "{{ 'ab' * 9223372036854775807 }}",
      "{{ 2 ** 64 }}{{ 10 ** 400 }}",
      "{{ 9223372036854775807 + 1 }}",
      "{% set ns = namespace(x='a') %}{% for i in range(99999) %}{% set ns.x = ns.x ~ ns.x %}{% "
      "endfor %}",
      "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor "
      "%}",
      "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% "
      "endfor %}",
      "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% "
      "endfor %}"
      "{{ ns.x }}",
      "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% "
      "endfor %}"
      "{{ ns.x == ns.x }}",
      "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% "
      "endfor %}"
      "{{ ns.x | tojson }}",
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
      "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
      big + "{% for i in range(100000) %}{{ s }}{% endfor %}",
      big + "{% for i in range(100000) %}{% set t = s.replace('x', 'yy') %}{% endfor %}",
      big + "{% for i in range(100000) %}{% set t = s.split('x') %}{% endfor %}",
      big + "{% for i in range(100000) %}{% set t = s[99999] %}{% endfor %}",
      big + "{% for i in range(100000) %}{% set t = s | length %}{% endfor %}",
      big +
          "{% set p = 'x' * 50000 ~ 'y' %}{% for i in range(100000) %}{% set t = p in s %}{% "
          "endfor %}",
      "{{ 'x' | indent(1000000000000) }}",
      "{{ {'a': 1} | tojson(indent=1000000000000) }}",
      "{{ '%.1000f' % 1e300 }}",
      "{{ 'a'.ljust(100000000000) }}",
      "{{ strftime_now('%c' * 1000) }}",
      "{{ range(-9223372036854775807, 9223372036854775807) }}",
      Repeat("{{ (", 100000),
      "{{ " + Repeat("(", 5000) + "1" + Repeat(")", 5000) + " }}",
      "{{ " + Repeat("[", 5000) + Repeat("]", 5000) + " }}",
      "{{ " + Repeat("not ", 50000) + "1 }}",
      "{{ " + Repeat("-", 50000) + "1 }}",
      "{{ 1" + Repeat(" + 1", 50000) + " }}",
      "{{ a" + Repeat(".a", 50000) + " }}",
      "{{ a" + Repeat("[0]", 50000) + " }}",
      "{{ a" + Repeat("()", 50000) + " }}",
      "{{ a" + Repeat("|upper", 50000) + " }}",
      "{{ 1" + Repeat(" if 1 else 1", 50000) + " }}",
      "{{ a" + Repeat(" is b", 50000) + " }}",
      "{{ a" + Repeat(" is eq a", 50000) + " }}",
      Repeat("{% if 1 %}", 50000),
      Repeat("{% for a in b %}", 50000),
      Repeat("{% macro a() %}", 50000),
      Repeat("{% set x %}", 50000),
      "{% set " + Repeat("(", 50000) + "a = 1 %}",
      "{% set ns = namespace() %}{% for i in range(99999) %}{% set m = namespace(p=ns) %}"
      "{% set ns.q = m %}{% endfor %}" +
          big + "{% for i in range(100000) %}{{ s }}{% endfor %}",
  };
  for (const std::string& source : sources) {
    const auto start = std::chrono::steady_clock::now();
    const auto prompt = Render(source);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_FALSE(prompt.ok()) << source.substr(0, 120);
    EXPECT_LT(prompt.status().message().size(), 300u);
    EXPECT_LT(took.count(), 30.0) << source.substr(0, 120);
    if (took.count() > 2.0)
      std::printf("%.1f s: %s\n", took.count(), source.substr(0, 100).c_str());
  }
}

// Templates that abuse one construct; each is refused with a message that contains `reason`.
TEST(ChatTemplate, AbusesAreRefused) {
  const std::string name(300, 'a');
  const std::pair<std::string, std::string> kCases[] = {
      // A loop whose condition asks for elements that the condition has not decided on.
      {"{% set ns = namespace(l=none) %}{% for x in [1, 2, 3] if ns.l is none or ns.l.length > 99 "
       "%}"
       "{% set ns.l = loop %}{% endfor %}",
       "later elements"},
      // In a tag, only filters may follow filters.
      {"{% filter upper is not string %}{% endfilter %}", ""},
      {"{% filter upper()()|lower %}{% endfilter %}", ""},
      {"{% set x | upper is string | lower %}{% endset %}", ""},
      {"{{ 'a' | map(*(['map'] * 20000)) | list }}", "nested too deeply"},
      {"{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x.count] %}"
       "{% endfor %}",
       "nested too deeply"},
      {"{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% for y in [ns.x] %}"
       "{% set ns.x = loop %}{% endfor %}{% endfor %}",
       "nested too deeply"},
      {"{% set " + name + " = 1 %}", "a name is too long"},
  };
  for (const auto& [source, reason] : kCases) {
    const auto result = RenderMessage(source, "x");
    ASSERT_FALSE(result.ok()) << source;
    EXPECT_NE(result.status().message().find(reason), std::string_view::npos) << result.status();
  }
}

TEST(ChatTemplate, WorkOutsideOfTheBudgetIsLinear) {
  std::string comments;
  for (int i = 0; i < 200'000; ++i) comments += "x{##}";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(ChatTemplate::Compile(comments).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  // The error about an unknown attribute has a part of its name only.
  RenderInput input;
  const auto result = Render(
      "{% for x in [1] %}{{ ([loop['aaaaaaaaaa' * 1000000]] * 300000) | length }}{% endfor %}",
      input);
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST(ChatTemplate, CyclesAreFreed) {
  // The leak checker of the sanitizer build detects cycles that are not freed.
  const auto prompt = Render(
      "{% set ns = namespace() %}{% set ns.self = ns %}{% set ns.list = [ns] %}"
      "{% macro f() %}{{ f is defined }}{% endmacro %}{% set ns.f = f %}"
      "{% for x in [1, 2] %}{% macro g() %}{% endmacro %}{% set ns.loop = loop %}{% endfor %}"
      "{{ ns.loop.index }}{{ ns.loop.last }}{{ f() }}");
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->text, "2TrueTrue");
  EXPECT_FALSE(Render("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}").ok());
}

// The largest conversation that the server accepts must use less than half of every limit.
TEST(ChatTemplate, ALongConversationStaysInsideTheLimits) {
  RenderInput input;
  for (int i = 0; i < 2048; ++i) {
    input.messages.push_back(
        {{"role", i % 2 == 0 ? "user" : "assistant"}, {"content", std::string(1900, 'x')}});
  }
  input.trusted = OrderedJson({{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"tools", nullptr}});
  input.limits.max_steps /= 2;
  input.limits.max_bytes /= 2;
  for (const std::string& source : FamilyTemplates()) {
    const auto prompt = Render(source, input);
    EXPECT_TRUE(prompt.ok()) << source.substr(0, 80) << prompt.status();
  }
}

// Every operation on a large text must be charged for the bytes that it touches: twenty of them
// must exceed a limit that their evaluation without the text's bytes does not reach.
TEST(ChatTemplate, WorkIsChargedByTheByte) {
  constexpr const char* kOperations[] = {
      // subscripts and comparisons
      "{s: 1}[s]", "d[s]", "d[t]", "s in d", "d.get(s)", "s[s]", "s[0]", "s[-1]", "s[1:]", "s[::2]",
      "s[::-1]", "s == t", "s != t", "s < t", "s <= t", "s > t", "s >= t", "s is eq t",
      "s is sameas t", "s is lt t", "'b' in s", "s in t", "s in [t]", "[s] == [t]", "s ~ t",
      "s + t", "s * 2", "'%s' % s", "s % ()", "dict(d)[t]",
      // methods
      "w.strip()", "w.lstrip()", "w.rstrip()", "s.strip('ab')", "s.split('b')", "s.rsplit('b')",
      "s.split()", "s.rsplit()", "s.splitlines()", "s.partition('b')", "s.rpartition('b')",
      "s.startswith(t)", "s.endswith(t)", "s.startswith((t, t))", "s.replace('b', 'c')",
      "s.replace('x', s, 1)", "s.removeprefix(t)", "s.removesuffix(t)", "s.upper()", "s.lower()",
      "s.title()", "s.capitalize()", "s.find('b')", "s.rfind('b')", "s.count('b')", "s.count('')",
      "s.join(['', ''])", "''.join([s])", "s.ljust(2)", "s.rjust(2)", "s.format()",
      "'{}'.format(s)", "n.isdigit()", "n.isdecimal()", "n.isnumeric()", "w.isspace()",
      "u.isupper()", "s.islower()", "[s].index(t)", "[s].count(t)",
      // filters
      "s | upper", "s | lower", "s | title", "s | capitalize", "s | length", "s | count",
      "w | trim", "s | replace('b', 'c')", "s | tojson", "s | tojson(ensure_ascii=true)",
      "{s: 1} | tojson", "s | string", "s | safe", "s | escape", "s | e", "s | indent",
      "'a' | indent(s)", "[s] | join", "[1, 2] | join(s)", "n | int", "n | float", "s | reverse",
      "[s, t] | sort", "[s, t] | unique", "[s, t] | min", "[s, t] | max", "d | dictsort",
      "{s: 1, t: 2} | items", "[s] | map('upper') | list", "[s] | select('eq', t) | list",
      "[s] | string", "{'a': s} | string", "'%s' | format(s)", "[d] | map(attribute=s) | list",
      "[s, t] | sum(start='')",
      // tests and functions
      "s is lower", "u is upper", "s is in t", "namespace(d)"};
  constexpr size_t kBytes = size_t{1} << 20;
  const auto render = [&](const std::string& operation, size_t bytes) {
    RenderInput input;
    const std::string text(bytes, 'a');
    input.untrusted = OrderedJson({{"s", text}, {"t", text}, {"d", {{text, 1}}}});
    input.untrusted["w"] = std::string(bytes, ' ');
    input.untrusted["n"] = std::string(bytes, '1');
    input.untrusted["u"] = std::string(bytes, 'A');
    input.limits.max_steps = 250'000;
    input.limits.max_bytes = size_t{1} << 40;
    return Render("{% for i in range(20) %}{% set x = " + operation + " %}{% endfor %}", input);
  };
  ASSERT_TRUE(render("1", kBytes).ok());
  for (const std::string operation : kOperations) {
    const auto small = render(operation, 4);
    EXPECT_TRUE(small.ok() || small.status().message().find("work") == std::string::npos)
        << operation << small.status();
    const absl::Status large = render(operation, kBytes).status();
    EXPECT_NE(large.message().find("too much work"), std::string::npos) << operation << large;
  }
}

TEST(ChatTemplate, SpansOfTrustedTextAreCharged) {
  // Every second character is trusted.
  RenderInput input;
  input.untrusted["t"] = "b";
  input.limits.max_bytes = size_t{40} << 20;
  const auto prompt = Render("{% set s = ('a' ~ t) * 4000000 %}{{ s | length }}", input);
  EXPECT_NE(prompt.status().message().find("the template needs too much memory"), std::string::npos)
      << prompt.status();
}

TEST(ChatTemplate, TimeIsLimited) {
  RenderInput input;
  input.limits.max_time = std::chrono::seconds(0);
  const auto prompt =
      Render("{% for i in range(10000) %}{% for j in range(10) %}x{% endfor %}{% endfor %}", input);
  EXPECT_NE(prompt.status().message().find("too much time"), std::string::npos) << prompt.status();
}

TEST(ChatTemplate, LongRefusalsAreCut) {
  const auto prompt = RenderMessage("{{ raise_exception('é' * 100000) }}", "b");
  EXPECT_EQ(prompt.status().message().size(), 4096u);
}

TEST(ChatTemplate, ThreadsShareATemplate) {
  const auto compiled =
      ChatTemplate::Compile("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].content) }}");
  ASSERT_TRUE(compiled.ok());
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      RenderInput input;
      input.messages =
          OrderedJson::array({{{"content", std::string(10, static_cast<char>('a' + t))}}});
      for (int i = 0; i < 200; ++i) {
        const auto prompt = (*compiled)->Render(input);
        ASSERT_TRUE(prompt.ok());
        EXPECT_EQ(prompt->text, "<" + std::string(10, static_cast<char>('a' + t)) + ">");
      }
    });
  }
}

// Random templates, made from pieces and from damaged real templates, must end soon with a text or
// an error.
TEST(ChatTemplate, RandomTemplatesDoNoHarm) {
  std::vector<std::string> seeds = FamilyTemplates();
  std::ifstream file(std::string(MOESERVE_SOURCE_DIR) + "/tests/chat/language.txt");
  for (std::string line; std::getline(file, line);) seeds.push_back(line);
  const std::vector<std::string> pieces = {
      "{{",          "}}",     "{%",       "%}",     "{#",          "#}",
      "-",           "(",      ")",        "[",      "]",           "{",
      "}",           "'",      "\"",       "\\",     "\n",          "if",
      "for",         "in",     "set",      "x",      "messages",    "loop",
      ".",           ",",      ":",        "|",      "~",           "=",
      "==",          " ",      "range(9)", "1",      "0.5",         "macro",
      "else",        "endif",  "endfor",   "is",     "not",         "é",
      "namespace()", "tojson", "['a']",    "[::-1]", "* 999999999", "9223372036854775807",
      "-1"};
  RenderInput input;
  input.messages = OrderedJson::array(
      {{{"role", "user"}, {"content", "hé <s>"}}, {{"role", "assistant"}, {"content", nullptr}}});
  input.limits.max_steps = 20000;
  input.limits.max_bytes = 1 << 20;
  std::mt19937 random(11);
  int rendered = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string source = seeds[random() % seeds.size()];
    for (int change = static_cast<int>(random() % 4); change >= 0 && !source.empty(); --change) {
      const size_t at = random() % source.size();
      const size_t size = random() % 12;
      switch (random() % 4) {
        case 0:
          source.erase(at, size);
          break;
        case 1:
          source.insert(at, source.substr(random() % source.size(), size));
          break;
        default:
          source.insert(at, pieces[random() % pieces.size()]);
      }
    }
    const auto prompt = Render(source, input);
    if (!prompt.ok()) continue;
    ++rendered;
    size_t end = 0;
    for (const TextSpan& span : prompt->trusted) {
      ASSERT_GE(span.begin, end);
      ASSERT_LT(span.begin, span.end);
      end = span.end;
    }
    ASSERT_LE(end, prompt->text.size());
  }
  EXPECT_GT(rendered, 500);
}

}  // namespace
}  // namespace moeserve::chat
