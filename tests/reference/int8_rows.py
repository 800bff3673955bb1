"""The activation rounding of integer-format matmul, as a transformers model can run it.

A weight stored in an integer format (Q8_0, Q4_1, K-quants ...) is multiplied with activations that are
themselves int8 in groups of 32 values: `q = round((x / amax) * 127)`, ties to even, `d = amax / 127`, and a
group of zeros stays zero. `use_int8_rows` makes the linear layers of a torch model see `q * d` in place of
`x`. What then remains between such a model and an engine that follows this contract is the order of f32
additions only, so a comparison may be tight where one with a plain f32 model must be loose.
"""

import torch

GROUP = 32


def round_rows(x: torch.Tensor, margins: list | None = None) -> torch.Tensor:
    """`x` `[..., k]` f32, k a multiple of 32, with every group of 32 rounded to int8 times its scale.

    Appends to `margins` how near each row's values come to a rounding tie, `[rows]` in units of one code: an
    engine whose sums differ in the last bits rounds a value nearer than its own error to the other side.
    """
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    amax = groups.abs().amax(dim=-1, keepdim=True)
    safe = torch.where(amax == 0, torch.ones_like(amax), amax)
    scaled = (groups / safe) * 127.0
    q = torch.round(scaled)
    if margins is not None:
        margins.append((0.5 - (scaled - q).abs()).flatten(-2).amin(dim=-1))
    return (q * (amax / 127.0)).reshape(x.shape)


def use_int8_rows(model: torch.nn.Module, names: set[str], margins: list | None = None) -> None:
    """Rounds the input of every linear layer of `model` whose module name is in `names`."""
    left = set(names)
    for name, module in model.named_modules():
        if name in left:
            module.register_forward_pre_hook(lambda _, args: (round_rows(args[0], margins), *args[1:]))
            left.remove(name)
    if left:
        raise ValueError(f"no such modules: {sorted(left)}")
