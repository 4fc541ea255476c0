"""PyTorch's side of `tools/bench.py kernels`, in a process of its own: a line of JSON per row, as bench_kernels.Row."""

import json
import statistics
import time

import torch
import torch.nn.functional as F

ATTENTION = {  # tokens, window, document
    "full_8k_packed": (8192, None, 2048),
    "window_32k": (32768, 4096, None),
    "full_32k": (32768, None, None),
    "full_128k": (131072, None, None),
    "window_128k": (131072, 4096, None),
}
HEADS, GROUPS, HEAD = 32, 4, 128
WIDTH, EXPERT, EXPERTS, CHOSEN = 2048, 768, 128, 8


def seconds(function) -> float:
    """Median of seven samples of at least 20 ms."""
    function()
    torch.cuda.synchronize()
    count, found = 1, []
    while len(found) < 7:
        started = time.perf_counter()
        for _ in range(count):
            function()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
        if took < 0.02 and count < 64:
            count *= 2
        else:
            found.append(took / count)
    return statistics.median(found)


def report(op: str, shape: str, name: str, function, leaves) -> None:
    """Times `function` alone and with gradients to the leaves."""
    row = {"op": op, "shape": shape, "name": name}
    try:
        with torch.no_grad():
            row["forward"] = seconds(function)
        out = function()
        gradient = torch.randn_like(out)
        del out

        def both():
            torch.autograd.grad(function(), leaves, gradient)

        row["both"] = seconds(both)
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    print(json.dumps(row), flush=True)
    torch.cuda.empty_cache()


def attention(shape: str, S: int, window: int | None, document: int | None) -> None:
    """SDPA where it has the mask, FlexAttention for windows."""
    B, S = (1, S) if document is None else (S // document, document)

    def heads(count: int) -> torch.Tensor:
        return torch.randn(B, count, S, HEAD, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = heads(HEADS), heads(GROUPS), heads(GROUPS)
    if window is None:
        report("attention", shape, "torch SDPA",
               lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v))  # fmt: skip
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b, h, i, j):
        return (j <= i) & (i - j < window) if window else j <= i

    mask = create_block_mask(seen, None, None, S, S, device="cuda")
    compiled = torch.compile(flex_attention)
    report("attention", shape, "torch Flex", lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True), (q, k, v))


def experts(tokens: int) -> None:
    """Dispatch, three `_grouped_mm`, combine."""
    x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate, up = (
        (torch.randn(EXPERTS, WIDTH, EXPERT, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5).requires_grad_()
        for _ in range(2)
    )
    down = (torch.randn(EXPERTS, EXPERT, WIDTH, device="cuda", dtype=torch.bfloat16) * EXPERT**-0.5).requires_grad_()
    weights, chosen = torch.randn(tokens, EXPERTS, device="cuda").sigmoid().topk(CHOSEN)

    def layer() -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).int()
        rows = x[order // CHOSEN]
        hidden = F.silu(torch._grouped_mm(rows, gate, offs=ends)) * torch._grouped_mm(rows, up, offs=ends)
        out = torch._grouped_mm(hidden, down, offs=ends) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, out)

    report("experts", f"{tokens} tokens", "torch _grouped_mm", layer, (x, gate, up, down))


if __name__ == "__main__" and torch.cuda.is_available():
    for n in (8192, 65536):
        experts(n)
    for shape, sizes in ATTENTION.items():
        attention(shape, *sizes)
