"""Reference implementation of the encoders of the native format, in plain PyTorch.

Written as routed_decoder.py is, and for the same reason. A text is computed whole.
"""

import torch
from torch.nn import functional

from routed_decoder import RoutedDecoder, activate

Tensor = torch.Tensor


class RoutedEncoder(RoutedDecoder):
    """An encoder with its head, or a decoder with a pooling."""

    @torch.no_grad()
    def rows(self, tokens: Tensor, types: Tensor | None = None) -> Tensor:
        """Rows [T, d] of tokens [T] behind the final norm; `types` [T] of the tokens are 0."""
        self.types = torch.zeros_like(tokens) if types is None else types
        return self.hidden(tokens, self.new_cache())

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.config["token_types"] == 0:
            return super()._embed(tokens, positions)
        # The norm of the sum of embeddings must see the types, too.
        normed, self.config["embedding_norm"] = self.config["embedding_norm"], False
        x = super()._embed(tokens, positions) + self.tensors["embed_type.weight"][self.types]
        self.config["embedding_norm"] = normed
        return self._outer_norm(x, "embed_norm") if normed else x

    def _layer(self, x: Tensor) -> Tensor:
        """The layer before the matrix of the head."""
        layer = self.config["head"].get("layer")
        if layer is None:
            return x
        x = activate(self._linear(x, "head.layer"), layer["activation"])
        return self._outer_norm(x, "head.layer_norm") if layer.get("norm", False) else x

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits of the vocabulary or of labels of rows [n, d]."""
        x = self._layer(rows)
        if self.config["head"]["kind"] != "masked_lm":
            return self._linear(x, "classifier").to(self.wide)
        head = "embed" if self.config["tie_word_embeddings"] else "head"
        logits = (x @ self.tensors[f"{head}.weight"].t()).to(self.wide)
        return logits + self.tensors["head.bias"] if self.config["head_bias"] else logits

    @torch.no_grad()
    def text(self, rows: Tensor) -> Tensor:
        """The vector of a text of rows [T, d], or the logits of its labels."""
        pooling = self.config["pooling"]
        pool = {"mean": lambda: rows.mean(0), "max": lambda: rows.amax(0), "cls": lambda: rows[0],
                "last": lambda: rows[-1]}
        x = pool[pooling["kind"]]()
        if self.config["head"]["kind"] == "sequence_classification":
            return self.logits(x[None])[0]
        for i, dense in enumerate(pooling.get("dense", [])):
            x = activate(self._linear(x, f"pooling.dense.{i}"), dense.get("activation", "none"))
        return functional.normalize(x, dim=0) if pooling.get("normalize", False) else x
