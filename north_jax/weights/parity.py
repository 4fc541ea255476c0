"""The decoder against recorded outputs of the reference implementation (transformers, float32, eager).

One comparison for tests and `tools/parity.py`: it takes whatever cases the recording holds. Names in a recording:
`len{n}/…` one unpadded sequence (logits, log-probabilities, `trace/…` intermediate values, `logits_window_plus_1`),
`pad_{side}/…` a padded batch, `grad/…` the gradient of the mean next-token loss of `pad_right`, `greedy/…`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from north_jax.model import Decoder, init_cache, own_pages
from north_jax.weights.hf import to_tensors

# Float32 sums in another order move the logits of the recorded models by up to 2e-5; the mildest wrong equation by 1.
LOGITS = 5e-5
GRADIENT = 1e-4
SUM_LOGPROB = 1e-3  # a sum over tens of tokens
PREFILLS = (1, 5, 11, 20)
PAGE = 8

Recording = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference in one quantity, absolute unless `relative` (then to the reference's largest value)."""

    name: str
    value: float
    tolerance: float
    relative: bool = False

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance; never for NaN."""
        return self.value <= self.tolerance


def compare(model: Decoder, recording: Recording) -> Iterator[Difference]:
    """Every quantity of the recording that the model can be asked for, in the order of the file's groups.

    Raises ValueError when the recording has no known quantity.
    """
    lengths = sorted(int(m.group(1)) for key in recording if (m := re.fullmatch(r"len(\d+)/input_ids", key)))
    if not lengths:
        raise ValueError("the recording holds no len*/input_ids, so there is nothing to compare; give an oracle.npz")
    for n in lengths:
        yield from sequence(model, recording, n)
    for side in ("left", "right"):
        if f"pad_{side}/input_ids" in recording:
            yield from padded(model, recording, side)
    for prefill in PREFILLS:
        if prefill < lengths[-1]:
            yield cached(model, recording, lengths[-1], prefill)
    if "grad/mean_nll" in recording:
        yield from gradients(model, recording)
    if "greedy/new_ids" in recording:
        yield from greedy(model, recording)


def sequence(model: Decoder, recording: Recording, n: int) -> Iterator[Difference]:
    """One unpadded sequence: logits, log-probabilities, and the trace and the wider window where recorded."""
    prefix = f"len{n}"
    ids_BS = jnp.asarray(recording[f"{prefix}/input_ids"])[None]
    logits_BSV, trace = _traced(model, ids_BS)
    logits_SV = np.asarray(logits_BSV)[0]
    yield _absolute(f"{prefix}/logits", logits_SV, recording[f"{prefix}/logits"])
    if f"{prefix}/token_logprobs" in recording:
        logps_S = _next_logprobs(logits_SV[None], np.asarray(ids_BS))[0]
        yield _absolute(f"{prefix}/token_logprobs", logps_S, recording[f"{prefix}/token_logprobs"])
        total = recording[f"{prefix}/sum_logprob"]
        yield _absolute(f"{prefix}/sum_logprob", logps_S.sum(), total, SUM_LOGPROB)
    for key in recording:
        if not key.startswith(f"{prefix}/trace/"):
            continue
        name = key.removeprefix(f"{prefix}/trace/")
        if name not in trace:
            raise ValueError(f"the recording's {key} is not a quantity of this model; give the model's own recording")
        tolerance = 0.0 if name.endswith("indices") else LOGITS
        yield _absolute(key, np.asarray(trace[name])[0], recording[key], tolerance)
    if (key := f"{prefix}/logits_window_plus_1") in recording:
        logits_BSV, _ = _traced(_with_config(model, window_inclusive=True), ids_BS)
        yield _absolute(key, np.asarray(logits_BSV)[0], recording[key])


def padded(model: Decoder, recording: Recording, side: str) -> Iterator[Difference]:
    """A padded batch: logits and summed log-probabilities at its real tokens."""
    prefix = f"pad_{side}"
    ids_BS, mask_BS = np.asarray(recording[f"{prefix}/input_ids"]), np.asarray(recording[f"{prefix}/attention_mask"])
    positions_BS = jnp.asarray(recording[f"{prefix}/position_ids"])
    logits_BSV, _ = _traced(model, jnp.asarray(ids_BS), positions_BS, jnp.asarray(mask_BS))
    logits_BSV = np.asarray(logits_BSV)
    real = mask_BS.astype(bool)
    yield _absolute(f"{prefix}/logits", logits_BSV[real], np.asarray(recording[f"{prefix}/logits"])[real])
    pairs = real[:, 1:] & real[:, :-1]
    sums_B = np.where(pairs, _next_logprobs(logits_BSV, ids_BS), 0.0).sum(axis=1)
    yield _absolute(f"{prefix}/sum_logprob", sums_B, recording[f"{prefix}/sum_logprob"], SUM_LOGPROB)


def cached(model: Decoder, recording: Recording, n: int, prefill: int) -> Difference:
    """Logits of `prefill` tokens fed at once and the rest one by one, in the second of two rows, against all at once.

    The first row meanwhile sees padding only.
    """
    ids_S = np.asarray(recording[f"len{n}/input_ids"])
    tables = own_pages(2, n, PAGE)
    kv = init_cache(model.config, tables.full_BW.size, PAGE, dtype=model.embedding_VD.dtype)
    hidden = []
    for start, stop in [(0, prefill), *((t, t + 1) for t in range(prefill, n))]:
        positions_S = np.arange(start, stop)
        ids_BS = jnp.asarray(np.stack([np.zeros_like(ids_S[start:stop]), ids_S[start:stop]]))
        positions_BS = jnp.asarray(np.stack([-np.ones_like(positions_S), positions_S]))
        x_BSD, kv = _step(model, ids_BS, positions_BS, kv, tables)
        hidden.append(x_BSD[1])
    logits_SV = np.asarray(model.logits(jnp.concatenate(hidden)))
    return _absolute(f"cached/prefill{prefill}", logits_SV, recording[f"len{n}/logits"])


def gradients(model: Decoder, recording: Recording) -> Iterator[Difference]:
    """Mean next-token loss of the right-padded batch, its recorded gradients, and the norm over all parameters."""
    ids_BS = jnp.asarray(recording["pad_right/input_ids"])
    mask_BS = jnp.asarray(recording["pad_right/attention_mask"])
    positions_BS = jnp.asarray(recording["pad_right/position_ids"])
    graph, params = nnx.split(model)

    def loss(params):
        logits_BSV = nnx.merge(graph, params)(ids_BS, positions_BS=positions_BS, segment_ids_BS=mask_BS)
        logps_BS = jax.nn.log_softmax(logits_BSV[:, :-1])
        logps_BS = jnp.take_along_axis(logps_BS, ids_BS[:, 1:, None], axis=-1)[..., 0]
        targets_BS = (mask_BS[:, 1:] * mask_BS[:, :-1]).astype(bool)
        return -jnp.sum(jnp.where(targets_BS, logps_BS, 0.0)) / jnp.sum(targets_BS)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    ours = to_tensors(nnx.merge(graph, grads))
    yield _absolute("grad/mean_nll", np.asarray(value), recording["grad/mean_nll"])
    real_ids = np.asarray(ids_BS)[np.asarray(mask_BS) > 0]
    for key in recording:
        name = key.removeprefix("grad/")
        if key.startswith("grad/model."):
            got, expected = _as_recorded(ours, name), np.asarray(recording[key])
            if name == "model.embed_tokens.weight" and (real_ids == 0).any():
                # torch's padding_idx 0 leaves the look-up out of the gradient of row 0, which matters only where
                # id 0 stands for a real token; then the row holds another quantity than ours.
                got, expected = got[1:], expected[1:]
            yield Difference(key, _largest(got, expected) / float(np.abs(expected).max()), GRADIENT, relative=True)
    if "grad/global_norm" in recording:
        norm = np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in ours.values()))
        expected = float(recording["grad/global_norm"])
        yield Difference("grad/global_norm", abs(norm - expected) / expected, GRADIENT, relative=True)


def greedy(model: Decoder, recording: Recording) -> Iterator[Difference]:
    """Greedy continuation with the cache: how many ids differ, and the log-probabilities of the recorded ids."""
    prompt_S = np.asarray(recording["greedy/prompt_ids"])
    expected_S = np.asarray(recording["greedy/new_ids"])
    tables = own_pages(1, len(prompt_S) + len(expected_S), PAGE)
    kv = init_cache(model.config, tables.full_BW.size, PAGE, dtype=model.embedding_VD.dtype)
    feed, at, chosen, logps = prompt_S, 0, [], []
    for expected in expected_S:
        positions_BS = jnp.arange(at, at + len(feed))[None]
        x_BSD, kv = _step(model, jnp.asarray(feed)[None], positions_BS, kv, tables)
        logits_V = model.logits(x_BSD[0, -1])
        chosen.append(int(jnp.argmax(logits_V)))
        logps.append(float(jax.nn.log_softmax(logits_V)[int(expected)]))
        at, feed = at + len(feed), np.asarray([expected])  # follow the recording, so that one slip counts once
    yield Difference("greedy/new_ids", float(np.sum(np.asarray(chosen) != expected_S)), 0.0)
    yield _absolute("greedy/logprobs", np.asarray(logps), recording["greedy/logprobs"])


@nnx.jit
def _traced(model: Decoder, ids_BS, positions_BS=None, segment_ids_BS=None) -> tuple[jax.Array, dict[str, jax.Array]]:
    trace: dict[str, jax.Array] = {}
    x_BSD = model.hidden(ids_BS, positions_BS=positions_BS, segment_ids_BS=segment_ids_BS, trace=trace)
    return model.logits(x_BSD), trace


@nnx.jit
def _step(model: Decoder, ids_BS, positions_BS, cache, tables):
    return model.step(ids_BS, positions_BS, cache, tables)


def _as_recorded(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A tensor by its recorded name: experts are stacked there, and gate and up fused, gate rows first."""
    if name in tensors:
        return tensors[name]

    def stacked(matrix: str) -> np.ndarray:
        prefix = name.rpartition(".")[0]
        pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.{matrix}\.weight")
        experts = sorted(int(m.group(1)) for tensor in tensors if (m := pattern.fullmatch(tensor)))
        return np.stack([tensors[f"{prefix}.{e}.{matrix}.weight"] for e in experts])

    if name.endswith("gate_up_proj"):
        return np.concatenate([stacked("gate_proj"), stacked("up_proj")], axis=1)
    return stacked("down_proj")


def _with_config(model: Decoder, **changes) -> Decoder:
    """The same parameters (shared) under a changed config."""
    config = dataclasses.replace(model.config, **changes)
    changed = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    nnx.update(changed, nnx.state(model))
    return changed


def _next_logprobs(logits_BSV: np.ndarray, ids_BS: np.ndarray) -> np.ndarray:
    logps_BSV = np.asarray(jax.nn.log_softmax(jnp.asarray(logits_BSV)))
    return np.take_along_axis(logps_BSV[:, :-1], ids_BS[:, 1:, None], axis=-1)[..., 0]


def _absolute(name: str, ours, expected, tolerance: float = LOGITS) -> Difference:
    return Difference(name, _largest(np.asarray(ours), np.asarray(expected)), tolerance)


def _largest(ours: np.ndarray, expected: np.ndarray) -> float:
    if ours.shape != expected.shape:
        raise ValueError(f"shapes differ: ours {ours.shape}, recorded {expected.shape}; is this the recording's model?")
    return float(np.max(np.abs(ours.astype(np.float64) - expected.astype(np.float64)), initial=0.0))


def drift(model: Decoder, other: Decoder, ids_BS: np.ndarray, *, rows: int = 4) -> dict[str, float]:
    """How the next-token distributions of `other` differ from those of `model` on the same tokens, `rows` at a time.

    With p and q their log-probabilities: logp_mean, logp_max of |p - q| of the token that follows (nats); kl_mean of
    KL(model || other) (nats); top1_share of places where both prefer the same token; nll, nll_other (nats a token).
    """
    logits = nnx.jit(lambda m, ids_BS: jax.nn.log_softmax(m(ids_BS)[:, :-1].astype(jnp.float32)))
    gaps, kls, same, own, others = [], [], [], [], []
    for start in range(0, len(ids_BS), rows):
        ids = jnp.asarray(ids_BS[start : start + rows])
        p_BSV, q_BSV = logits(model, ids), logits(other, ids)
        p_BS, q_BS = (jnp.take_along_axis(x, ids[:, 1:, None], -1)[..., 0] for x in (p_BSV, q_BSV))
        gaps.append(jnp.abs(p_BS - q_BS))
        kls.append((jnp.exp(p_BSV) * (p_BSV - q_BSV)).sum(-1))
        same.append(p_BSV.argmax(-1) == q_BSV.argmax(-1))
        own.append(-p_BS)
        others.append(-q_BS)
    mean = {"logp_mean": gaps, "kl_mean": kls, "top1_share": same, "nll": own, "nll_other": others}
    result = {name: float(jnp.concatenate([x.reshape(-1) for x in values]).mean()) for name, values in mean.items()}
    return result | {"logp_max": float(max(gap.max() for gap in gaps))}
