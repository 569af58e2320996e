"""Reads the JSON of a completion with `return_routing` from standard input, prints its text and which
experts computed it.

    curl -s http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \
      -d '{"prompt": "rose: a shrub of", "max_tokens": 8, "return_routing": true}' |
      python3 experts_of_prompt.py

Needs a server with --routing-records. For each routed block, it prints the experts by the number of
times that they were chosen for a token of the prompt or of the answer (for a sub-token where tokens
are split), with the sum of their gate weights.
"""

import collections
import json
import sys


def main():
    answer = json.load(sys.stdin)
    if "error" in answer:
        sys.exit(f"experts_of_prompt.py: {answer['error']['message']}")
    if "routing_control" in answer:
        print("changed routing:", json.dumps(answer["routing_control"]))
    for choice in answer["choices"]:
        routing = choice.get("routing")
        if routing is None:
            sys.exit("experts_of_prompt.py: expected an answer with \"routing\": send "
                     "\"return_routing\": true")
        print(f"text: {choice['text']!r}")
        print_experts(routing)


def print_experts(routing):
    layout = routing["layout"]
    rows = layout["rows_per_token"]
    for block in layout["blocks"]:
        chosen, weights = collections.Counter(), collections.Counter()
        for token in range(routing["tokens"]):
            first = token * rows + block["first_row"]
            for row in range(first, first + block["sub_tokens"]):
                for route in range(routing["offsets"][row], routing["offsets"][row + 1]):
                    chosen[routing["experts"][route]] += 1
                    weights[routing["experts"][route]] += routing["weights"][route]
        listed = "  ".join(f"{expert}: {count} ({weights[expert]:.2f})"
                           for expert, count in chosen.most_common())
        print(f"layer {block['layer']} {block['block']}, {len(chosen)} of {block['experts']} "
              f"experts  {listed}")


if __name__ == "__main__":
    main()
