"""Prints what the experts did, from the JSON of /v1/experts/stats on standard input.

    curl -s http://127.0.0.1:8080/v1/experts/stats | python3 experts_table.py

Under each routed block there is one character for each expert, in tenths of the busiest one's load:
"9" is the busiest, "." was never chosen.
"""

import json
import math
import sys

BUSIEST = 4  # experts listed by number
WIDTH = 64   # experts in one line of loads


def load_line(counts):
    most = max(counts, default=0)
    return "".join("." if count == 0 else str(math.ceil(9 * count / most)) for count in counts)


def print_block(block):
    counts = block["counts"]
    chosen = sum(counts)
    worked = sum(count > 0 for count in counts)
    order = sorted(range(len(counts)), key=lambda expert: -counts[expert])
    busiest = "  ".join(f"{expert}: {100 * counts[expert] / chosen:.1f}%"
                        for expert in order[:BUSIEST] if counts[expert])
    print(f"{block['layer']:5}  {block['block']:12}  {len(counts):7}  {worked:6}  {block['rows']:6}  "
          f"{chosen:8}  {block['distinct_experts_mean']:9.2f}  {busiest}")
    loads = load_line(counts)
    for start in range(0, len(loads), WIDTH):
        print(f"{'load' if start == 0 else '':>12}  {loads[start:start + WIDTH]}")


def main():
    stats = json.load(sys.stdin)
    if not stats["layers"]:
        print(f"{stats['model']} has no experts: every token uses all of its parameters")
        return
    print(f"{'layer':5}  {'block':12}  experts  worked    rows   choices  per token  "
          "busiest experts, share of choices")
    for block in stats["layers"]:
        print_block(block)
    print()
    print(f"tokens run through the model    {stats['tokens']}")
    print(f"activation ratio                {stats['activation_ratio']:.3f}  "
          "(share of all experts that were chosen)")
    print(f"activated parameters per token  {stats['activated_parameters_per_token']:.0f}  "
          f"({stats['always_active_parameters']} of them whatever the route; "
          "without embeddings and head)")


if __name__ == "__main__":
    main()
