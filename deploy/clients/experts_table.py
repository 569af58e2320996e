"""Reads the JSON of /v1/experts/stats from standard input and prints the load of the experts.

    curl -s http://127.0.0.1:8080/v1/experts/stats | python3 experts_table.py

For each routed block, it prints a line of totals and a grid of experts. A cell of the grid has the
expert's id, a bar relative to the block's busiest expert, and the expert's share of the block's
selections. If a block has more than 64 experts, only the 16 busiest are printed.
"""

import json
import sys

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 8   # number of experts per line of the grid
MOST = 64     # largest number of experts in a block for which all experts are printed
BUSIEST = 16  # number of experts that are printed for a larger block


def cell(expert, count, chosen, most):
    if count == 0:
        return f"{expert:4} -  none"
    bar = BARS[min(len(BARS) - 1, len(BARS) * count // most)]
    return f"{expert:4} {bar}{100 * count / chosen:5.1f}%"


def print_block(block):
    counts = block["counts"]
    chosen = sum(counts)
    worked = sum(count > 0 for count in counts)
    print(f"\nlayer {block['layer']}, {block['block']}: {worked} of {len(counts)} experts worked, "
          f"{chosen} choices by {block['rows']} rows, "
          f"{block['distinct_experts_mean']:.1f} experts per token")
    order = range(len(counts))
    if len(counts) > MOST:
        order = sorted(order, key=lambda expert: -counts[expert])[:BUSIEST]
        print(f"  the {BUSIEST} busiest:")
    cells = [cell(expert, counts[expert], chosen, max(counts)) for expert in order]
    for start in range(0, len(cells), COLUMNS):
        print("".join(cells[start:start + COLUMNS]))


def main():
    sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show the bars
    stats = json.load(sys.stdin)
    if not stats["layers"]:
        print(f"{stats['model']} has no experts: every token uses all of its parameters")
        return
    print("Experts: number, bar, share of the block's choices")
    for block in stats["layers"]:
        print_block(block)
    print()
    print(f"tokens run through the model    {stats['tokens']}")
    print(f"activation ratio                {stats['activation_ratio']:.3f}  "
          "(share of all experts that were chosen)")
    print(f"activated parameters per token  {stats['activated_parameters_per_token']:.0f}  "
          f"(of them {stats['always_active_parameters']} for every token; "
          "embeddings and head excluded)")


if __name__ == "__main__":
    main()
