"""Reference implementation of encoder-decoders of the native format, in plain PyTorch.

Written as routed_decoder.py is, and for the same reason.
"""

import torch

from routed_decoder import Json, RoutedDecoder
from routed_encoder import RoutedEncoder

Tensor = torch.Tensor


class RoutedPair:
    """An encoder, and a decoder that attends to the encoder's rows of a source."""

    def __init__(self, config: Json, tensors: dict[str, Tensor], bf16_products: bool = False) -> None:
        common = {key: value for key, value in config.items() if key not in ("encoder", "decoder")}
        stacks = {}
        for stack, kind, made in (("encoder", "routed_encoder", RoutedEncoder),
                                  ("decoder", "routed_decoder", RoutedDecoder)):
            own = {}
            for name, value in tensors.items():
                if name.startswith(f"{stack}."):
                    own[name.removeprefix(f"{stack}.")] = value
                elif not name.startswith(("encoder.", "decoder.")):
                    own[name] = value
            stack_config = {**common, **config[stack], "model_type": kind}
            stacks[stack] = made(stack_config, own, bf16_products=bf16_products)
        self.encoder, self.decoder = stacks["encoder"], stacks["decoder"]
        self.start = config["decoder_start_token_id"]

    def read(self, source: Tensor) -> None:
        """Computes the source [S], to which the decoder attends from now on."""
        self.decoder.source = self.decoder._round(self.encoder.rows(source))

    def greedy(self, source: Tensor, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
        self.read(source)
        return self.decoder.greedy(prompt, count)

    def beams(self, source: Tensor, prompt: Tensor, width: int, count: int, ends: set[int],
              penalty: float) -> list[tuple[float, list[int]]]:
        """Beam search by its definition, every beam computed anew: (score, tokens), best first."""
        self.read(source)
        running = [(0.0, [])]
        finished: list[tuple[float, list[int]]] = []
        for length in range(1, count + 1):
            candidates = []
            for beam, (score, tokens) in enumerate(running):
                text = torch.cat([prompt, torch.tensor(tokens, dtype=torch.long)])
                logprobs = self.decoder.forward(text)[-1].double().log_softmax(-1)
                candidates += [(-(score + float(p)), beam, token)
                               for token, p in enumerate(logprobs)]
            candidates.sort()
            best = candidates[:max(2, 1 + len(ends)) * width]
            following = []
            for rank, (negative, beam, token) in enumerate(best):
                text = [*running[beam][1], token]
                if token in ends or length == count:
                    if rank < width:
                        finished.append((-negative / length ** penalty, text))
                elif len(following) < width:
                    following.append((-negative, text))
            finished.sort(key=lambda item: -item[0])
            finished = finished[:width]
            running = following
            if not running:
                break
            if len(finished) == width and running[0][0] / length ** penalty <= finished[-1][0]:
                break
        return finished
