# %% [markdown]
# # Which experts work on a text?
#
# The cells of this file run in a notebook (Jupyter with Jupytext, VS Code, Spyder) or as a script:
#
#     python expert_heat_map.py MODEL [PICTURE.png]
#
# Without matplotlib, it prints the busiest experts only.

# %%
import sys

import numpy as np

from moeserve import Client, Server

model = sys.argv[1] if len(sys.argv) > 1 else "deploy/models/mh-moe"
picture = sys.argv[2] if len(sys.argv) > 2 else "experts.png"
prompt = "rose: a shrub of"

# %% [markdown]
# A server of our own, that records which expert computes which token. To use a running one:
# `client = Client("127.0.0.1:8081")`.

# %%
server = Server(model, "--routing-records")
client = Client(server.grpc_address)
before = client.statistics()
answer = client.generate(prompt, max_tokens=48, temperature=0.7, top_p=0.9, seed=39, stop="\n",
                         routes=True)
statistics = client.statistics().since(before)
print(prompt + answer.text)

# %% [markdown]
# The load of every expert: a row for each routed block.

# %%
load = statistics.load()
for label, shares in zip(statistics.labels(), load):
    best = np.argsort(np.nan_to_num(-shares, nan=0.0))[:3]
    print(f"{label}: " + ", ".join(f"expert {e} {100 * shares[e]:.1f} %" for e in best))

# %% [markdown]
# The experts of every word in each routed block: a row for each word, with the shares of the experts in
# the selections of its tokens.

# %%
ids = np.concatenate([client.tokenize(prompt), answer.token_ids])
# The last token was never computed, so it has no experts.
words = client.words(ids[:-1])
blocks = answer.routes.blocks if answer.routes else ()
labels = [repr(word.text.strip(" "))[1:-1] for word in words]
shares = []
for number, block in enumerate(blocks):
    counts = answer.routes.word_counts(words, number)
    shares.append(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    best = counts.argmax(axis=1)
    print(f"layer {block.layer} {block.block}: "
          + ", ".join(f"{label} {expert}" for label, expert in zip(labels, best)))

# %%
try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    print("matplotlib is not installed: no picture")
else:
    shown = blocks[:6]  # more would be too narrow
    figure = plt.figure(figsize=(3 + 2.2 * max(len(shown), 3), 4 + 0.2 * len(words)),
                        layout="constrained")
    if shown:
        upper, lower = figure.subfigures(2, 1, height_ratios=[3, 1 + 0.2 * len(words)])
        panel = upper.subplots()
        upper.colorbar(panel.imshow(load, aspect="auto"))
        panel.set(title="Share of the selections", xlabel="expert", yticks=range(len(load)),
                  yticklabels=statistics.labels())
        panels = lower.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for panel, block, share in zip(panels, shown, shares):
            panel.imshow(share, aspect="auto")
            panel.set(title=f"layer {block.layer} {block.block}", xlabel="expert")
        # Between dollar signs, matplotlib expects formulas.
        panels[0].set(yticks=range(len(words)),
                      yticklabels=[label.replace("$", r"\$") for label in labels])
    figure.savefig(picture)
    print(f"wrote {picture}")

# %%
client.close()
server.stop()
