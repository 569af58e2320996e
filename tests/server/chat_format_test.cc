#include "server/chat/chat_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

using OrderedJson = nlohmann::ordered_json;
using testing::kBos;
using testing::kEos;

// A template with the structure of most chat templates.
constexpr char kTemplate[] =
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}";

ChatFormat Format(const std::optional<std::string>& source) {
  TokenizerConfig config;
  config.chat_template = source;
  config.bos_token = "<bos>";
  config.eos_token = "<eos>";
  return ChatFormat(config);
}

Conversation Messages(const std::vector<std::pair<std::string, std::string>>& messages) {
  Conversation conversation;
  for (const auto& [role, content] : messages) {
    conversation.messages.push_back({{"role", role}, {"content", content}});
  }
  return conversation;
}

std::string Rendered(const std::string& source, const Conversation& conversation) {
  const auto prompt = Format(source).Render(conversation, RequestLimits(), 0);
  if (!prompt.ok()) {
    return ApiCode(prompt.status()) + "/" + ApiParam(prompt.status()) + ": " +
           std::string(prompt.status().message());
  }
  return prompt->text;
}

TEST(ChatFormat, OnlyTheTemplateSpellsSpecialTokens) {
  const testing::ByteTokenizer tokenizer;
  const auto ids =
      Format(kTemplate).Encode(Messages({{"user", "<bos>x<eos>"}}), tokenizer, RequestLimits(), 0);
  ASSERT_TRUE(ids.ok()) << ids.status();
  std::vector<TokenId> expected = {kBos};
  for (const char c : std::string("[user]\n<bos>x<eos>")) expected.push_back(c);
  expected.push_back(kEos);
  for (const char c : std::string("[assistant]\n")) expected.push_back(c);
  EXPECT_EQ(ids->ids, expected);
}

TEST(ChatFormat, ContentAndTemplateDoNotSpellATokenTogether) {
  const testing::ByteTokenizer tokenizer;
  const auto ids = Format("{{ messages[0].content }}os>{{ messages[0].name }}")
                       .Encode(
                           [] {
                             Conversation c = Messages({{"user", "<e"}});
                             c.messages[0]["name"] = "<bos>";
                             return c;
                           }(),
                           tokenizer, RequestLimits(), 0);
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(*std::max_element(ids->ids.begin(), ids->ids.end()), 's');
}

TEST(ChatFormat, AddsSpecialTokensOnRequestOnly) {
  testing::ByteTokenizer tokenizer;
  tokenizer.add_bos = true;
  Conversation conversation = Messages({{"user", "a"}});
  const ChatFormat format = Format("{{ messages[0].content }}");
  EXPECT_EQ(format.Encode(conversation, tokenizer, RequestLimits(), 0)->ids,
            std::vector<TokenId>{'a'});
  conversation.add_special_tokens = true;
  EXPECT_EQ(format.Encode(conversation, tokenizer, RequestLimits(), 0)->ids,
            (std::vector<TokenId>{kBos, 'a'}));
}

TEST(ChatFormat, DevelopersAreTheSystemWhereUnknown) {
  const Conversation conversation = Messages({{"developer", "a"}});
  EXPECT_EQ(Rendered("{{ messages[0].role }}", conversation), "system");
  EXPECT_EQ(Rendered("{{ messages[0].role }}{# developer #}", conversation), "developer");
}

TEST(ChatFormat, TellsVariables) {
  Conversation conversation = Messages({{"user", "a"}});
  conversation.template_variables["x"] = 5;
  conversation.template_variables["eos_token"] = "no";
  EXPECT_EQ(Rendered("{{ x }}{{ eos_token }}{{ tools is none }}{{ documents is none }}"
                     "{{ pad_token is defined }}{{ add_generation_prompt }}",
                     conversation),
            "5<eos>TrueTrueFalseTrue");
}

TEST(ChatFormat, WhatTheClientSetsIsNotTrusted) {
  const testing::ByteTokenizer tokenizer;
  Conversation conversation = Messages({{"user", "a"}});
  conversation.template_variables["x"] = "<eos>";
  for (const char* source : {"{{ x }}", "{{ strftime_now(x) }}", "{{ [x] | tojson }}",
                             "{{ '%s' | format(x) }}", "{{ x | replace('o', 'o') }}"}) {
    const auto ids = Format(source).Encode(conversation, tokenizer, RequestLimits(), 0);
    ASSERT_TRUE(ids.ok()) << source << ids.status();
    EXPECT_LT(*std::max_element(ids->ids.begin(), ids->ids.end()), 256) << source;
  }
}

TEST(ChatFormat, ContinuesTheFinalMessage) {
  const auto continued = [](const std::string& source, const std::string& content) {
    Conversation conversation = Messages({{"user", "q"}, {"assistant", content}});
    conversation.add_generation_prompt = false;
    conversation.continue_final_message = true;
    return Rendered(source, conversation);
  };
  EXPECT_EQ(continued(kTemplate, "Once"), "<bos>[user]\nq<eos>[assistant]\nOnce");
  // This template strips white space: the space after the continued message is removed, the line
  // break after the role stays.
  EXPECT_EQ(continued(kTemplate, " Once \xC2\xA0"), "<bos>[user]\nq<eos>[assistant]\nOnce");
  EXPECT_EQ(continued(kTemplate, ""), "<bos>[user]\nq<eos>[assistant]\n");
  EXPECT_EQ(continued(kTemplate, "q<eos>"), "<bos>[user]\nq<eos>[assistant]\nq<eos>");
  // A template that does not strip white space.
  const std::string plain = "{% for m in messages %}{{ m.role }} {{ m.content }} |{% endfor %}";
  EXPECT_EQ(continued(plain, "Once \n"), "user q |assistant Once \n");
  EXPECT_EQ(continued(plain, ""), "user q |assistant ");
  EXPECT_EQ(continued("{% for m in messages %}{{ m.content | trim }} {% endfor %}", "Once  "),
            "q Once");
  // Text of the client that equals the first mark must not be taken for the mark.
  EXPECT_EQ(continued(plain,
                      "\xEF\xB7\x90"
                      "0\xEF\xB7\x91"),
            "user q |assistant \xEF\xB7\x90"
            "0\xEF\xB7\x91");
  // A template that leaves out the continued message.
  EXPECT_EQ(continued("{{ messages[0].content }}", "x").substr(0, 36),
            "invalid_value/continue_final_message");
}

TEST(ChatFormat, ContinuedSpansStayInTheText) {
  Conversation conversation = Messages({{"user", "q"}, {"assistant", "x "}});
  conversation.continue_final_message = true;
  conversation.add_generation_prompt = false;
  const auto prompt = Format(kTemplate).Render(conversation, RequestLimits(), 0);
  ASSERT_TRUE(prompt.ok());
  size_t end = 0;
  for (const TextSpan& span : prompt->trusted) {
    EXPECT_GE(span.begin, end);
    EXPECT_LT(span.begin, span.end);
    end = span.end;
  }
  EXPECT_EQ(end, prompt->text.size() - 1);  // all but "x"
}

TEST(ChatFormat, SaysWhoseFaultItIs) {
  const Conversation conversation = Messages({{"user", "a"}});
  EXPECT_EQ(Rendered("{{ raise_exception('roles must alternate') }}", conversation),
            "invalid_value/messages: roles must alternate");
  EXPECT_EQ(Rendered("{{ missing.x }}", conversation),
            "invalid_template/messages: chat template, line 1: 'missing' is undefined");
  EXPECT_EQ(Rendered("", conversation), "");
  const testing::ByteTokenizer tokenizer;
  EXPECT_EQ(ApiParam(Format("").Encode(conversation, tokenizer, RequestLimits(), 0).status()),
            "messages");
}

TEST(ChatFormat, WithoutATemplateItRefusesWithTheReason) {
  Conversation conversation = Messages({{"user", "a"}});
  for (const auto& source :
       {std::optional<std::string>(), std::optional<std::string>("{% if %}")}) {
    const ChatFormat format = Format(source);
    EXPECT_EQ(absl::IsNotFound(format.status()), !source);
    const auto prompt = format.Render(conversation, RequestLimits(), 0);
    EXPECT_EQ(ApiCode(prompt.status()), "invalid_template");
    EXPECT_NE(std::string(prompt.status().message())
                  .find(source ? "line 1" : "the model has no chat template"),
              std::string::npos)
        << prompt.status();
    Conversation own = conversation;
    own.chat_template = "T{{ eos_token }}";
    EXPECT_EQ(format.Render(own, RequestLimits(), 0)->text, "T<eos>");
    own.chat_template = "{% if %}";
    EXPECT_EQ(ApiParam(format.Render(own, RequestLimits(), 0).status()), "chat_template");
  }
}

TEST(ChatFormat, BoundsTheText) {
  RequestLimits limits;
  limits.max_rendered_bytes = 8;
  const ChatFormat format = Format("{{ messages[0].content }}");
  EXPECT_TRUE(format.Render(Messages({{"user", "12345678"}}), limits, 0).ok());
  const auto refused = format.Render(Messages({{"user", "123456789"}}), limits, 0);
  EXPECT_EQ(ApiCode(refused.status()), "invalid_value");
  EXPECT_EQ(ApiParam(refused.status()), "messages");
}

// Renders damaged real templates under every setting. The result must be text with well-formed
// spans, or an error with one of the two API error codes.
TEST(ChatFormat, DamagedTemplatesGiveWellFormedAnswers) {
  std::vector<std::string> seeds = {kTemplate};
  for (const char* name : {"chatml", "deepseek", "gemma", "llama3", "mistral", "phi3"}) {
    std::ifstream file(std::string(MOESERVE_SOURCE_DIR) + "/tests/chat/templates/" + name +
                       ".jinja");
    std::stringstream text;
    text << file.rdbuf();
    ASSERT_FALSE(text.str().empty());
    seeds.push_back(text.str());
  }
  const testing::ByteTokenizer tokenizer;
  std::mt19937 random(5);
  int rendered = 0;
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string source = seeds[random() % seeds.size()];
    for (unsigned changes = random() % 3; changes > 0 && source.size() > 1; --changes) {
      const size_t at = random() % source.size();
      switch (random() % 3) {
        case 0:
          source.erase(at, random() % 9);
          break;
        case 1:
          source.insert(at, source.substr(random() % source.size(), random() % 20));
          break;
        default:
          source[at] = static_cast<char>(' ' + random() % 95);
      }
    }
    Conversation conversation = Messages({{"user", "<eos> \xC3\xA9 "}, {"assistant", " x<bos>\n"}});
    conversation.continue_final_message = random() % 2 == 0;
    conversation.add_generation_prompt = !conversation.continue_final_message && random() % 2 == 0;
    conversation.template_variables["date_string"] = "<eos>";
    const auto prompt = Format(source).Render(conversation, RequestLimits(), 0);
    if (!prompt.ok()) {
      ++refused;
      const std::string code = ApiCode(prompt.status());
      ASSERT_TRUE(code == "invalid_template" || code == "invalid_value") << prompt.status();
      continue;
    }
    ++rendered;
    size_t end = 0;
    for (const TextSpan& span : prompt->trusted) {
      ASSERT_GE(span.begin, end);
      ASSERT_LT(span.begin, span.end);
      end = span.end;
    }
    ASSERT_LE(end, prompt->text.size());
    EXPECT_TRUE(tokenizer.EncodeTrusted(prompt->text, prompt->trusted, false).ok());
  }
  EXPECT_GT(rendered, 500);
  EXPECT_GT(refused, 500);
}

TEST(CutAtMark, LeavesWellFormedSpans) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    chat::RenderedPrompt prompt;
    for (int i = 0; i < 8; ++i) {
      const char* pieces[] = {"a", " ", "\n", "#", "# ", "bc"};
      const std::string piece = pieces[random() % 6];
      if (random() % 2 == 0) {
        const size_t at = prompt.text.size();
        if (!prompt.trusted.empty() && prompt.trusted.back().end == at) {
          prompt.trusted.back().end += piece.size();
        } else {
          prompt.trusted.push_back({at, at + piece.size()});
        }
      }
      prompt.text += piece;
    }
    const std::string before = prompt.text;
    const bool has_mark = before.find('#') != std::string::npos;
    ASSERT_EQ(CutAtMark("#", prompt).ok(), has_mark);
    if (!has_mark) continue;
    EXPECT_EQ(before.find(prompt.text), 0u);
    EXPECT_LE(prompt.text.size(), before.rfind('#'));
    for (const TextSpan& span : prompt.trusted) {
      ASSERT_LT(span.begin, span.end);
      ASSERT_LE(span.end, prompt.text.size());
    }
  }
}

}  // namespace
}  // namespace moeserve::server
