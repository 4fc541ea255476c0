"""Times kernels on the accelerator that is here, beside what else is installed; `tools/bench.py kernels` runs it.

Every contestant is first held against float32 on a short row, then timed on rotating inputs: medians, forward alone and
forward with backward. Rates count the operations that the results need (pallas_kernels/attention/work.py) and stand
beside those of a product of two large bfloat16 matrices and of a copy, measured in the same run.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from north_jax.model import moe
from pallas_kernels import attention
from pallas_kernels.attention import work
from pallas_kernels.attention.shapes import NORTH, Shape
from pallas_kernels.dispatch import combine, gather, sort_by_expert
from pallas_kernels.programs import splash

BF16 = jnp.bfloat16
SAMPLES, SAMPLE_S = 7, 0.02
ATTENTION = ("full_8k_packed", "window_32k", "full_32k", "window_128k", "full_128k", "window_8k_packed")
TOKENS = (8192, 65536)
WIDTH, EXPERT, EXPERTS, CHOSEN = 2048, 768, 128, 8  # North Mini Code's experts
Contestant = Callable[..., jax.Array]


@dataclasses.dataclass
class Row:
    """Seconds of one contestant, None where it did not run, and why not; error relative to XLA's own in bfloat16."""

    op: str
    shape: str
    name: str
    forward: float | None = None
    both: float | None = None
    error: float | None = None
    why: str = ""


def seconds(function: Callable, inputs: list[tuple]) -> float:
    """Median seconds of a call, the inputs taken in turn, in samples of at least 20 ms."""
    jax.block_until_ready([function(*one) for one in inputs])
    count, found = 1, []
    while len(found) < SAMPLES:
        started = time.perf_counter()
        results = [function(*inputs[i % len(inputs)]) for i in range(count)]
        jax.block_until_ready(results[-1])
        took = time.perf_counter() - started
        if took < SAMPLE_S and count < 64:
            count *= 2
        else:
            found.append(took / count)
    return statistics.median(found)


def with_gradients(function: Contestant, count: int) -> Callable:
    """(the function's arguments, its output's gradient) -> (output, the first `count` arguments' gradients)."""

    def both(*arguments):
        *arguments, gradient = arguments
        out, pull = jax.vjp(lambda *x: function(*x, *arguments[count:]), *arguments[:count])
        return out, *pull(gradient)

    return both


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_contestants(shape: Shape) -> dict[str, Contestant]:
    """(q_BSHK, k_BSGK, v_BSGK) -> out_BSHK by name: ours, and what is installed.

    Whoever knows no packing gets the documents as rows of a batch, which is the best that can be done for it.
    """

    def ours(q, k, v, backend="auto"):
        ids = None if shape.document is None else jnp.arange(shape.S)[None] // shape.document
        spans = attention.spans(shape.S, window=shape.window, segment_ids_BS=ids)
        return attention.attention(q, k, v, *spans, window=shape.window, backend=backend)[0]

    def dot_product(q, k, v, call, **how):
        rows = (-1, shape.document or shape.S)
        window = None if shape.window is None else (shape.window - 1, 0)
        parts = (x.reshape(*rows, *x.shape[2:]) for x in (q, k, v))
        return call(*parts, is_causal=True, local_window_size=window, **how).reshape(q.shape)

    found = {"ours": ours}
    if jax.default_backend() == "gpu":
        found["cuDNN"] = functools.partial(dot_product, call=jax.nn.dot_product_attention, implementation="cudnn")
    if shape.S <= 8192:  # scores are quadratic
        found["XLA"] = functools.partial(dot_product, call=jax.nn.dot_product_attention, implementation="xla")
    if importlib.util.find_spec("tokamax"):
        import tokamax

        found["tokamax"] = functools.partial(dot_product, call=tokamax.dot_product_attention)
    if jax.default_backend() == "tpu":
        found["splash"] = functools.partial(by_splash, shape=shape)
    return found


def by_splash(q, k, v, shape: Shape):
    """Attention as jax ships it for TPUs."""
    S = shape.S
    ids_S = jnp.arange(S, dtype=jnp.int32) // (shape.document or S)
    q_GRSK = (q[0] * shape.K**-0.5).reshape(S, shape.G, -1, shape.K).transpose(1, 2, 0, 3)
    out_GRSK = splash(shape)(q_GRSK, *(x[0].transpose(1, 0, 2) for x in (k, v)), ids_S)
    return out_GRSK.transpose(2, 0, 1, 3).reshape(q.shape)


def attention_inputs(shape: Shape, seed: int) -> tuple:
    """(q, k, v, the output's gradient), bfloat16."""
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (shape.H, shape.G, shape.G, shape.H)
    return tuple(jax.random.normal(key, (1, shape.S, n, shape.K), BF16) for key, n in zip(keys, heads, strict=True))


def attention_rows(name: str, shape: Shape) -> Iterator[Row]:
    """A row of figures per contestant."""
    window, document = shape.window and min(shape.window, 1024), shape.document and min(shape.document, 512)
    short = dataclasses.replace(shape, S=min(shape.S, 2048), window=window, document=document)
    allowed = attention_contestants(short)
    inputs = [attention_inputs(shape, seed) for seed in range(2)]
    for who, function in attention_contestants(shape).items():
        row = Row("attention", name, who)
        try:
            row.error = attention_error(allowed[who], short)
            row.forward = seconds(jax.jit(function), [one[:3] for one in inputs])
            row.both = seconds(jax.jit(with_gradients(function, 3)), inputs)
        except Exception as error:
            row.why = reason(error)
        yield row


def attention_error(function: Contestant, shape: Shape) -> float:
    """The largest error of output and gradients against float32, over that of XLA's products in bfloat16."""
    inputs = attention_inputs(shape, 0)

    def by(backend: str) -> Callable:
        return jax.jit(with_gradients(functools.partial(attention_contestants(shape)["ours"], backend=backend), 3))

    exact = by("reference")(*(x.astype(jnp.float32) for x in inputs))
    return worst_ratio(jax.jit(with_gradients(function, 3))(*inputs), by("xla")(*inputs), exact)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts_contestants() -> dict[str, Contestant]:
    """(x_ND, gate_EDF, up_EDF, down_EFD, weights_NE, indices_NC) -> out_ND by name: dispatch, products, combine."""

    def ours(x, gate, up, down, weights, indices, backend="auto"):
        return moe.experts_grouped(x, weights, indices, gate, up, down, backend=backend)

    def by_product(x, gate, up, down, weights, indices, product):
        order_P, inverse_NC, sizes_E = sort_by_expert(indices, EXPERTS)
        rows_PD = gather(x, order_P, inverse_NC)
        hidden_PF = jax.nn.silu(product(rows_PD, gate, sizes_E)) * product(rows_PD, up, sizes_E)
        weights_NC = jnp.take_along_axis(weights, indices, axis=1)
        return combine(product(hidden_PF, down, sizes_E), weights_NC, order_P, inverse_NC)

    found = {"ours": ours, "ragged_dot": functools.partial(by_product, product=jax.lax.ragged_dot)}
    if importlib.util.find_spec("tokamax"):
        import tokamax

        found["tokamax"] = functools.partial(by_product, product=tokamax.ragged_dot)
    return found


def experts_inputs(tokens: int, seed: int) -> tuple:
    """(x, gate, up, down, weights, indices, the output's gradient), routed by random logits."""
    keys = jax.random.split(jax.random.key(seed), 6)
    x, gradient = (jax.random.normal(key, (tokens, WIDTH), BF16) for key in keys[:2])
    gate, up, down = (
        jax.random.normal(key, (EXPERTS, *shape), BF16) * shape[0] ** -0.5
        for key, shape in zip(keys[2:5], ((WIDTH, EXPERT), (WIDTH, EXPERT), (EXPERT, WIDTH)), strict=True)
    )
    weights, indices = moe.route(jax.random.normal(keys[5], (tokens, EXPERTS)), CHOSEN, "sigmoid", False)
    return x, gate, up, down, weights, indices, gradient


def experts_rows(tokens: int) -> Iterator[Row]:
    """A row of figures per contestant."""
    inputs = [experts_inputs(tokens, seed) for seed in range(2)]
    for who, function in experts_contestants().items():
        row = Row("experts", f"{tokens} tokens", who)
        try:
            row.error = experts_error(function)
            row.forward = seconds(jax.jit(function), [one[:6] for one in inputs])
            row.both = seconds(jax.jit(with_gradients(function, 4)), inputs)
        except Exception as error:
            row.why = reason(error)
        yield row


def experts_error(function: Contestant) -> float:
    """As `attention_error`, on 256 tokens."""
    inputs = experts_inputs(256, 0)
    exact_inputs = [x.astype(jnp.float32) if x.dtype == BF16 else x for x in inputs]
    by_xla = jax.jit(with_gradients(experts_contestants()["ragged_dot"], 4))
    with jax.default_matmul_precision("highest"):
        exact = by_xla(*exact_inputs)
    return worst_ratio(jax.jit(with_gradients(function, 4))(*inputs), by_xla(*inputs), exact)


# -- the run -----------------------------------------------------------------------------------------------------------


def worst_ratio(found, xla, exact) -> float:
    """The largest over results of: error of `found` over error of `xla`, root mean squares."""

    def error(got, expected) -> float:
        return float(jnp.sqrt(jnp.mean((got.astype(jnp.float32) - expected) ** 2)))

    return max(error(ours, right) / error(theirs, right) for ours, theirs, right in zip(found, xla, exact, strict=True))


def reason(error: Exception) -> str:
    """One line of it."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


def machine_rates() -> tuple[float, float]:
    """(operations/s of a bfloat16 product of 8192 x 8192, bytes/s of a copy of 1 GiB, read and written)."""
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), BF16) for i in range(2))
    rate = 2 * 8192**3 / seconds(jax.jit(jnp.matmul), [(a, b), (b, a)])
    big = jnp.zeros(2**29, BF16)
    return rate, 2 * big.nbytes / seconds(jax.jit(lambda x: x + 1), [(big,)])


def flops(row: Row) -> tuple[int, int]:
    """(forward, forward with backward) operations that the row's results need."""
    if row.op == "attention":
        shape = NORTH[row.shape]
        forward, backward = work.flops(work.seen_pairs(*work.spans_of(shape), shape.S), shape.H, shape.K)
        return forward, forward + backward
    forward = 3 * 2 * int(row.shape.split()[0]) * CHOSEN * WIDTH * EXPERT
    return forward, 3 * forward


def torch_rows(budget_s: float) -> list[Row]:
    """PyTorch's, timed in a process of its own; none where it is not installed with CUDA."""
    if jax.default_backend() != "gpu" or not importlib.util.find_spec("torch"):
        return []
    child = pathlib.Path(__file__).with_name("bench_torch.py")
    try:
        done = subprocess.run([sys.executable, child], capture_output=True, text=True, timeout=budget_s)
        return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode().splitlines()
        return [Row(**json.loads(line)) for line in lines if line.startswith("{")]


def table(rows: list[Row], rate: float) -> str:
    """A Markdown table; shares are of the measured rate of a large product."""
    lines = ["| op | shape | | forward | | | forward + backward | | | error / XLA's |", "| --- " * 10 + "|"]
    for row in rows:
        cells = []
        for took, needed in zip((row.forward, row.both), flops(row), strict=True):
            fits = took is not None
            cells += [f"{took * 1e3:.2f} ms", f"{needed / took / 1e12:.0f} TFLOP/s"] if fits else [row.why or "-", ""]
            cells += [f"{needed / took / rate:.0%}" if fits else ""]
        error = "" if row.error is None else f"{row.error:.2f}"
        lines.append(f"| {row.op} | {row.shape} | {row.name} | " + " | ".join(cells) + f" | {error} |")
    return "\n".join(lines)


def bench_kernels(folder: pathlib.Path, budget_s: float) -> None:
    """Prints rows as they come; writes `folder`/CHIP.json and CHIP.md. What does not fit the budget is not begun."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when the backend starts, here
    if jax.default_backend() == "cpu":
        raise SystemExit("no accelerator is here, so there is nothing to time; tools/kernels.py gives static bounds")
    started = time.perf_counter()
    rows = torch_rows(budget_s / 3)
    rate, bandwidth = machine_rates()
    chip = jax.devices()[0].device_kind
    packages = [name for name in ("jax", "jaxlib", "libtpu", "torch", "tokamax") if importlib.util.find_spec(name)]
    versions = {name: importlib.metadata.version(name) for name in packages}
    measured = f"{rate / 1e12:.0f} TFLOP/s of a large bfloat16 product, {bandwidth / 1e9:.0f} GB/s of a copy"
    print(f"{chip}: {measured}, measured")
    plans = [functools.partial(attention_rows, name, NORTH[name]) for name in ATTENTION]
    plans += [functools.partial(experts_rows, tokens) for tokens in TOKENS]
    for plan in plans:
        if time.perf_counter() - started > budget_s:
            print(f"left out for want of time: {plan.args}")
            continue
        for row in plan():
            rows.append(row)
            print(table([row], rate).splitlines()[-1], flush=True)
    date = datetime.date.today().isoformat()
    figures = {"chip": chip, "date": date, "versions": versions, "flops": rate, "bandwidth": bandwidth}
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / chip.lower().replace(" ", "_")
    rows.sort(key=lambda row: (row.op, row.shape))
    figures["rows"] = [dataclasses.asdict(row) for row in rows]
    name.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    head = f"Measured on {chip}, {date}, {named}; {measured}.\n\n"
    name.with_suffix(".md").write_text(head + table(rows, rate) + "\n")
    print(f"wrote {name}.json and {name}.md after {time.perf_counter() - started:.0f} s")
