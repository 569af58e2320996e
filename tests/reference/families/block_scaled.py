"""Rounds matrices to formats with one scale per block, and packs them as checkpoints store them."""

import torch
import torch.nn.functional as F

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_fp8(matrix, rows, columns):
    """Returns E4M3 values [n, k], scales f32 [ceil(n/rows), ceil(k/columns)] and the widened f32."""
    n, k = matrix.shape
    padded = F.pad(matrix, (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448.0
    full = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
    values = (matrix / full).to(torch.float8_e4m3fn)
    return values, scales, values.float() * full


def to_mxfp4(matrices):
    """Returns blocks U8 [..., k/32, 16], scales U8 [..., k/32] and the widened f32 [..., k]."""
    groups = matrices.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120))) - 2
    scaled = groups * 2.0**-exponent
    code = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    widened = (E2M1[code] * scaled.sign() * 2.0**exponent).flatten(-2)
    code = code + 8 * (scaled < 0)
    blocks = (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)
    return blocks, (exponent.squeeze(-1) + 127).to(torch.uint8), widened


def apply_fp8(model, block):
    """Rounds the layers' matrices in place; returns what replaces them in the state dict.

    Routers, embeddings and the head stay as they are, as in published files.
    """
    stored = {}
    for name, parameter in model.named_parameters():
        plain = "layers" not in name or name.endswith(("gate.weight", "norm.weight"))
        if plain or parameter.dim() < 2:
            continue
        matrices = parameter.data if parameter.dim() == 3 else parameter.data[None]
        packed = [to_fp8(matrix, *block) for matrix in matrices]
        parameter.data.copy_(torch.stack([p[2] for p in packed]).reshape(parameter.shape))
        stored[name] = packed
    return stored


def fp8_state(state, stored):
    """Returns the state dict of transformers' files with FP8 matrices; experts are not stacked."""
    state = dict(state)
    for name, packed in stored.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name[: -len("gate_up_proj")]
            for e, (values, scales, _) in enumerate(packed):
                half = values.shape[0] // 2
                # Blocks of the joined matrix must not cross the border between gate and up.
                assert scales.shape[0] % 2 == 0
                for part, key in enumerate(("gate_proj", "up_proj")):
                    rows = slice(part * half, (part + 1) * half)
                    blocks = slice(part * scales.shape[0] // 2, (part + 1) * scales.shape[0] // 2)
                    state[f"{prefix}{e}.{key}.weight"] = values[rows].contiguous()
                    state[f"{prefix}{e}.{key}.weight_scale_inv"] = scales[blocks].contiguous()
        elif name.endswith("experts.down_proj"):
            prefix = name[: -len("down_proj")]
            for e, (values, scales, _) in enumerate(packed):
                state[f"{prefix}{e}.down_proj.weight"] = values
                state[f"{prefix}{e}.down_proj.weight_scale_inv"] = scales
        else:
            state[name] = packed[0][0]
            state[name + "_scale_inv"] = packed[0][1]
    return state


def apply_mxfp4(model):
    """Rounds the experts of gpt-oss in place; returns what replaces them in the state dict."""
    stored = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, widened = to_mxfp4(parameter.data.transpose(1, 2))
            parameter.data.copy_(widened.transpose(1, 2))
            stored[name] = (blocks, scales)
    return stored


def mxfp4_state(state, stored):
    state = dict(state)
    for name, (blocks, scales) in stored.items():
        del state[name]
        state[name + "_blocks"] = blocks
        state[name + "_scales"] = scales
    return state
