// How models of different families write calls of tools and their reasoning.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moeserve::server {

// An answer with calls has the form
//   TEXT opening CALL separator CALL ... closing,
// where CALL is before_name NAME before_arguments ARGUMENTS after_arguments and ARGUMENTS is a JSON
// object, or a sequence of elements
//   before_key KEY before_value VALUE after_value,
// in which strings are written as they are and other values as JSON. TEXT, which may be empty, is
// what the model says first. A text that a syntax does not set is empty.
struct CallSyntax {
  std::string_view name;  // as in --tool-call-parser
  // A chat template that contains this text belongs to a model with this syntax; empty: none does.
  std::string_view template_text = {};
  std::string_view opening = {};
  std::string_view before_name;
  std::string_view before_arguments;
  std::string_view after_arguments = {};
  std::string_view separator = {};
  std::string_view closing = {};
  // A prefix of opening + before_name. Where the model writes it in its text, it must write a call.
  std::string_view trigger;
  // The number of characters that the chat template expects of a call's id; 0: any number.
  int id_length = 0;
  // Not empty: the parameters are elements.
  std::string_view before_key = {};
  std::string_view before_value = {};
  std::string_view after_value = {};
  // Whether the name is followed by a colon and the number of the call (Kimi-K2), with which it is
  // the call's id.
  bool has_index = false;
  // Whether other JSON may begin like a call. Then only the whole text up to the arguments of an
  // offered tool begins a call.
  bool plain_json = false;
  // Whether an answer has at most one call, whatever the request allows.
  bool single_call = false;
  // Whether the answer consists of messages that name their channel (gpt-oss).
  bool has_channels = false;
};

// Returns all known syntaxes, in the order in which templates are checked.
std::span<const CallSyntax> CallSyntaxes();

// Returns the syntax with this name; null if there is none.
const CallSyntax* FindCallSyntax(std::string_view name);

// Returns the syntax that belongs to a chat template, or the generic one. A template whose tags
// belong to the syntax of no row gets the generic one.
const CallSyntax& ChooseCallSyntax(std::string_view template_source);

// The texts around the part of an answer in which the model reasons.
struct ReasoningSyntax {
  std::string_view begin;
  std::string_view end;
};
inline constexpr ReasoningSyntax kThinkTags = {"<think>", "</think>"};

// Returns whether the models of a chat template write reasoning between kThinkTags.
bool HasThinkTags(std::string_view template_source);

// Returns the id of call number `call` of choice `choice` of the response that `response_id`, which
// must be unique, stands for. Ids of different responses, choices and calls differ.
std::string ToolCallId(const CallSyntax& syntax, std::string_view response_id, int choice,
                       int call);

}  // namespace moeserve::server
