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
prompt = "In the beginning God created"

# %% [markdown]
# A server of our own, that records which expert computes which token. To use a running one:
# `client = Client("127.0.0.1:8081")`.

# %%
server = Server(model, "--routing-records")
client = Client(server.grpc_address)
before = client.statistics()
answer = client.generate(prompt, max_tokens=32, temperature=0.0, routes=True)
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
# The experts of every token in the first routed block: a row for each token.

# %%
tokens = answer.routes.counts(block=0) if answer.routes and answer.routes.blocks else None

# %%
try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    print("matplotlib is not installed: no picture")
else:
    figure, panels = plt.subplots(2, 1, figsize=(10, 8), layout="constrained")
    panels[0].imshow(load, aspect="auto")
    panels[0].set(title="Share of the selections", xlabel="expert",
                  yticks=range(len(load)), yticklabels=statistics.labels())
    if tokens is not None:
        panels[1].imshow(tokens, aspect="auto")
        panels[1].set(title=f"Selections by each token, {statistics.labels()[0]}", xlabel="expert",
                      ylabel="token")
    figure.savefig(picture)
    print(f"wrote {picture}")

# %%
client.close()
server.stop()
