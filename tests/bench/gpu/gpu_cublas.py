"""Baseline of the experts with cuBLAS's grouped matrix products, which allow unequal widths.

cuBLAS takes the number of rows per expert from the host. The timing excludes copying these numbers
to the host, so the baseline looks faster than it is.
"""

import ctypes
import itertools
import pathlib

import torch

from gpu_common import Device, Tensor
from gpu_moe import Layer, Routed, activate

_BF16 = 14  # CUDA_R_16BF
_COMPUTE_F32 = 68  # CUBLAS_COMPUTE_32F
_NO_TRANSPOSE, _TRANSPOSE = 0, 1


def library() -> ctypes.CDLL:
    """Returns the cuBLAS library that PyTorch has loaded."""
    torch.mm(*(torch.ones(16, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if "/libcublas.so" in path:
            return ctypes.CDLL(path)
    raise RuntimeError("PyTorch has not loaded libcublas")


class Grouped:
    """Computes out[g] = rows[g] @ weights[g].T for all g, with matrices of any sizes, in one call.
    """

    def __init__(self, blas: ctypes.CDLL, rows: list[Tensor], weights: list[Tensor],
                 out: list[Tensor]) -> None:
        self.call = blas.cublasGemmGroupedBatchedEx
        self.call.restype = ctypes.c_int
        count = len(rows)
        self.kept = (rows, weights, out)

        def integers(values: list[int]) -> ctypes.Array:
            return (ctypes.c_int * count)(*values)

        def pointers(tensors: list[Tensor]) -> Tensor:
            return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device="cuda")

        # cuBLAS is column-major, so it computes out^T [N, r] = weights [N, K] rows^T [K, r].
        self.addresses = (pointers(weights), pointers(rows), pointers(out))
        a, b, c = (ctypes.c_void_p(t.data_ptr()) for t in self.addresses)
        self.arguments = (
            integers([_TRANSPOSE] * count), integers([_NO_TRANSPOSE] * count),
            integers([w.shape[0] for w in weights]), integers([len(r) for r in rows]),
            integers([w.shape[1] for w in weights]), (ctypes.c_float * count)(*[1.0] * count),
            a, _BF16, integers([w.stride(0) for w in weights]),
            b, _BF16, integers([r.stride(0) for r in rows]),
            (ctypes.c_float * count)(*[0.0] * count),
            c, _BF16, integers([o.stride(0) for o in out]),
            count, integers([1] * count), _COMPUTE_F32)

    def run(self) -> None:
        # current_blas_handle() binds the handle to the current stream.
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        status = self.call(handle, *self.arguments)
        if status != 0:
            raise RuntimeError(f"cublasGemmGroupedBatchedEx: status {status}")


class CublasExperts:
    """Computes one layer of experts for the routes of one case."""

    def __init__(self, device: Device, blas: ctypes.CDLL, layer: Layer, r: Routed) -> None:
        shape = layer.shape
        flat = r.experts.flatten()
        counts = torch.bincount(flat, minlength=shape.experts).tolist()
        self.layer, self.r = layer, r
        widest = max(shape.hidden)

        def empty(width: int) -> Tensor:
            return torch.zeros(len(flat), width, dtype=torch.bfloat16, device=device.name)

        self.rows, self.y, self.results = (empty(shape.width) for _ in range(3))
        self.halves = [empty(widest) for _ in range(2 if shape.gated else 1)]
        self.act = empty(widest)
        ends = list(itertools.accumulate(counts))
        first: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        second: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for e, (end, count) in enumerate(zip(ends, counts)):
            if count == 0:
                continue
            span, f = slice(end - count, end), shape.hidden[e]
            w1, w2 = layer.narrow[e]
            for i, half in enumerate(self.halves):
                for to, value in zip(first, (self.rows[span], w1[i * f:(i + 1) * f],
                                             half[span, :f])):
                    to.append(value)
            for to, value in zip(second, (self.act[span, :f], w2, self.y[span])):
                to.append(value)
        self.first, self.second = Grouped(blas, *first), Grouped(blas, *second)

    def run(self) -> Tensor:
        shape, r = self.layer.shape, self.r
        order = r.experts.flatten().argsort(stable=True)
        torch.index_select(r.x, 0, order // shape.k, out=self.rows)
        self.first.run()
        hidden = activate(self.halves[0], shape.activation)
        if shape.gated:
            torch.mul(hidden, self.halves[1], out=self.act)
        else:
            self.act.copy_(hidden)
        self.second.run()
        self.results[order] = self.y
        results = self.results.view(-1, shape.k, shape.width)
        return (results.float() * r.weights[:, :, None]).sum(1)
