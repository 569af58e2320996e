// Runs one request and adds its tokens and their experts to a token panel as they arrive.
import { streamEvents } from "./api.js";
import { count, decimal, seconds } from "./format.js";

// Returns the {text, logprob} of each token of an event, from a completion or a chat.
function tokensOf(choice) {
  const { logprobs, token_ids: ids } = choice;
  if (logprobs?.content) {
    return logprobs.content.map(({ token, logprob }) => ({ text: token, logprob }));
  }
  if (logprobs?.tokens) {
    return logprobs.tokens.map((text, i) => ({ text, logprob: logprobs.token_logprobs?.[i] }));
  }
  return (ids ?? []).map((id) => ({ text: `#${id}` }));
}

// Posts `body` to `path` and reads the stream. `onStart(promptTokenIds)` is called before the first
// token, `onChoice(choice)` for each event with a choice. Returns a sentence about the answer's
// size and speed, and whether all routing records fit the model.
export async function generate({ path, body, panel, signal, onStart = () => {},
  onChoice = () => {} }) {
  const begin = performance.now();
  let first = 0;
  let position = 0;
  let promptTokens = 0;
  let started = false;
  let generated = 0;
  let fits = true;
  let usage = null;
  for await (const event of streamEvents(path, body, signal)) {
    // Events that had arrived before the run was stopped.
    signal?.throwIfAborted();
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    if (!started) {
      started = true;
      const ids = event.prompt_token_ids ?? choice.prompt_token_ids ?? [];
      promptTokens = ids.length;
      position = body.echo ? 0 : promptTokens;
      onStart(ids);
    }
    for (const { text, logprob } of tokensOf(choice)) {
      if (first === 0) first = performance.now();
      const isGenerated = position >= promptTokens;
      if (isGenerated) ++generated;
      panel.add({ text, logprob, position: position++, generated: isGenerated });
    }
    if (choice.routing && !panel.addRouting(choice.routing)) fits = false;
    onChoice(choice);
  }
  panel.repaint();
  return { fits, summary: summarize(usage, generated, first || performance.now(), begin) };
}

function summarize(usage, generated, first, begin) {
  const now = performance.now();
  const time = (now - begin) / 1000;
  const rate = now > first ? (generated - 1) / ((now - first) / 1000) : NaN;
  return `${count(usage?.prompt_tokens)} prompt and ${count(generated)} generated tokens in ` +
    `${seconds(time)}, first after ${seconds((first - begin) / 1000)}` +
    (generated > 1 ? `, then ${rate < 100 ? decimal(rate) : count(rate)} a second.` : ".");
}
