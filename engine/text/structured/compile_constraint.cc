#include "engine/text/structured/compile_constraint.h"

#include <exception>
#include <utility>

#include "base/error_text.h"
#include "engine/text/structured/compiled.h"
#include "engine/text/structured/grammars/grammar_compiler.h"
#include "engine/text/structured/schemas/schema_compiler.h"
#include "engine/text/structured/text_formats/format_compiler.h"
#include "engine/text/structured/text_formats/plain_texts.h"

namespace moeserve {
namespace structured {
namespace {

// Returns a grammar for responses whose whole text is accepted by `dfa`.
Result<Grammar> WholeText(ByteDfa dfa, DfaPtr any_string, const ByteSet& spellable,
                          CompileBudget* budget) {
  MOESERVE_RETURN_IF_ERROR(dfa.Finish(spellable, budget));
  Grammar grammar;
  grammar.dfas = {std::move(any_string), std::make_shared<const ByteDfa>(std::move(dfa))};
  ScalarNode node;
  node.dfa = 1;
  grammar.nodes.push_back({node});
  grammar.root = 0;
  MOESERVE_RETURN_IF_ERROR(grammar.Finish(spellable, budget));
  if (grammar.nodes[0].distance < kUnreachable) return grammar;
  return absl::InvalidArgumentError("no text matches that the model's vocabulary can spell");
}

Result<Grammar> CompileGrammar(const ConstraintSpec& spec, const VocabularyIndex& vocabulary,
                               const ConstraintLimits& limits) {
  CompileBudget budget(limits.states, limits.compile_time);
  const DfaPtr& any_string = vocabulary.string_masks().dfa;
  const ByteSet& spellable = vocabulary.spellable();
  switch (spec.kind) {
    case ConstraintSpec::Kind::kJsonObject:
      return CompileSchema(R"({"type": "object"})", {}, limits, any_string, spellable, &budget);
    case ConstraintSpec::Kind::kJsonSchema:
      return CompileSchema(spec.text, {spec.strict, spec.closed_objects}, limits, any_string,
                           spellable, &budget);
    case ConstraintSpec::Kind::kRegex: {
      MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, RegexDfa(spec.text, limits, &budget));
      return WholeText(std::move(dfa), any_string, spellable, &budget);
    }
    case ConstraintSpec::Kind::kChoice: {
      MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, ChoiceDfa(spec.choices, limits, &budget));
      return WholeText(std::move(dfa), any_string, spellable, &budget);
    }
    case ConstraintSpec::Kind::kGrammar:
      return CompileGrammarText(spec.text, limits, any_string, spellable, &budget);
    case ConstraintSpec::Kind::kFormat:
      if (spec.format == nullptr) return absl::InvalidArgumentError("the format is missing");
      return CompileFormat(*spec.format, limits, any_string, spellable, &budget);
  }
  return absl::InvalidArgumentError("unknown kind of constraint");
}

Result<Grammar> Compile(const ConstraintSpec& spec, const VocabularyIndex& vocabulary,
                        const ConstraintLimits& limits) {
  MOESERVE_ASSIGN_OR_RETURN(Grammar grammar, CompileGrammar(spec, vocabulary, limits));
  const int64_t shortest = grammar.nodes[grammar.root].distance;
  if (shortest <= limits.shortest_answer) return grammar;
  return absl::InvalidArgumentError(Concat("the shortest text that matches has ", shortest,
                                           " bytes, more than ", limits.shortest_answer));
}

}  // namespace
}  // namespace structured

Result<std::shared_ptr<const CompiledConstraint>> CompileConstraint(
    const ConstraintSpec& spec, std::shared_ptr<const VocabularyIndex> vocabulary,
    const ConstraintLimits& limits) {
  try {
    MOESERVE_ASSIGN_OR_RETURN(structured::Grammar grammar,
                              structured::Compile(spec, *vocabulary, limits));
    std::vector<uint32_t> mask(vocabulary->mask_words());
    auto compiled =
        std::make_shared<const structured::Compiled>(std::move(grammar), std::move(vocabulary));
    const std::unique_ptr<ConstraintState> state = compiled->NewState();
    state->AllowedTokens(mask, structured::kNoLimit);
    if (state->overworked()) return OverworkedError();
    return compiled;
  } catch (const std::exception& error) {
    // The JSON library reports its errors by exceptions.
    return absl::InvalidArgumentError(std::string("the constraint cannot be read: ") +
                                      error.what());
  }
}

}  // namespace moeserve
