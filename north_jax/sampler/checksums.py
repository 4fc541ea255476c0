"""Whether a server's memory holds the weights of a folder: its checksums against those the folder must give.

The embedded server answers with the manifest's own sums (XXH3 of each tensor as on disk), which need only be equal.
SGLang (`srt/utils/weight_checker.py` of 0.5.23) sums what it made of the tensors: q, k and v in one, gate and up in
one, experts stacked, cast to its dtype, cut between tensor-parallel ranks. The same is built here from the folder and
summed the same way, so a push is proved tensor by tensor, and not only by servers agreeing with each other.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from north_jax.sampler.answer import SamplerError
from north_jax.weights.folder import CheckpointError, Folder

_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype("f4"), "float16": np.dtype("f2")}
_VOCAB_MULTIPLE = 64  # to which SGLang fills embeddings up with rows of zeros
_CPU_MULTIPLE = 32  # to which SGLang on a CPU fills up the width of MLPs and experts
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = {"experts.w13_weight": ("gate_proj", "up_proj"), "experts.w2_weight": ("down_proj",)}


class FolderSums:
    """The checksums that servers must give when they serve the folder `path`; made once, for any number of servers.

    `prepare` does the reading, so that it need not happen while servers pause. Errors: CheckpointError for a folder
    that is damaged, SamplerError for a layout that is not understood. Memory: one fused tensor at a time.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with Folder(self.path) as folder:  # whole, as far as headers and manifest say
            self._manifest = folder.manifest
        self._made: dict[tuple, dict[str, set[str]]] = {}

    def prepare(self, answer: dict[str, Any], server: dict[str, Any]) -> None:
        """Reads what `verify` will need for a server whose present /weights_checker and /server_info these are."""
        for rank in answer.get("ranks", []):
            self._expected(rank, server)

    def verify(self, answer: dict[str, Any], server: dict[str, Any], url: str) -> None:
        """Errors: SamplerError naming the first tensor in which the server's memory is not the folder's."""
        if "ranks" not in answer:
            wanted, found = self._manifest.get("checksums"), answer.get("checksums")
            if not wanted or not isinstance(found, dict):
                raise SamplerError(f"{url} cannot be compared with {self.path}: one of them has no checksums")
            pairs = {name: ({wanted.get(name)}, found.get(name)) for name in sorted(wanted.keys() | found.keys())}
        else:
            pairs = {}
            for number, rank in enumerate(answer["ranks"]):
                expected = self._expected(rank, server)
                pairs |= {f"{name} of rank {number}": (expected[name], s) for name, s in rank["checksums"].items()}
        if not pairs:
            raise SamplerError(f"{url} has no weights to sum up")
        for name, (wanted, found) in pairs.items():
            if found is None or found not in wanted:
                raise SamplerError(f"{url} does not hold the weights of {self.path}: tensor {name} differs")

    def _expected(self, rank: dict[str, Any], server: dict[str, Any]) -> dict[str, set[str]]:
        place = rank["parallelism_info"]
        place = place[0] if isinstance(place, list) else place
        if place["pp_size"] > 1:
            raise SamplerError("weights split into pipeline stages cannot be verified; serve with tensor parallelism")
        number, ranks, cuda = place["tp_rank"], place["tp_size"], server.get("device") == "cuda"
        dtype = _DTYPES.get(str(server.get("dtype")).removeprefix("torch."))
        key = (number, ranks, cuda, dtype, *rank["checksums"])
        if key not in self._made:
            with Folder(self.path) as folder:
                if folder.scheme is not None:
                    raise SamplerError(
                        f"{self.path} is quantised, and SGLang's sums of quantised weights are not known here"
                    )
                self._made[key] = _sums(folder, list(rank["checksums"]), number, ranks, cuda, dtype)
        return self._made[key]


def _sums(
    folder: Folder, names: list[str], rank: int, ranks: int, cuda: bool, dtype: np.dtype | None
) -> dict[str, set[str]]:
    """Server's name -> the sums it may have: one for each layout and dtype in which that tensor may be held."""
    held, used = set(folder.names()), set()
    digest = cuda_hash if cuda else lambda value: hashlib.sha256(_bytes(value)).hexdigest()[:16]
    expected = {}
    for name in names:
        sources = _sources(name, held)
        if missing := [source for row in sources for source in row if source not in held]:
            raise CheckpointError(f"{folder.path} lacks {missing[0]}, of which a server makes its {name}")
        used.update(source for row in sources for source in row)
        values = [[folder.read(source) for source in row] for row in sources]
        sums = set()
        for layout in _layouts(name, values, rank, ranks, folder.config, cuda):
            # A tensor may be kept wider than the rest (a router); every cast of the folder's values proves them.
            for cast in {layout.dtype, dtype} if dtype is not None else {layout.dtype, *_DTYPES.values()}:
                sums.add(digest(layout.astype(cast)))
        expected[name] = sums
    if ranks == 1 and (unused := sorted(held - used)):
        raise CheckpointError(f"the server holds nothing of tensor {unused[0]} in {folder.path}; is it the same model?")
    return expected


def _sources(name: str, held: set[str]) -> list[list[str]]:
    """The folder's tensors in the server's `name`: a row of them for each expert, one row without experts."""
    for fused, parts in _EXPERTS.items():
        if name.endswith(fused):
            stem = name.removesuffix(fused) + "experts."
            count = 1 + max((int(n[len(stem) :].split(".")[0]) for n in held if n.startswith(stem)), default=0)
            return [[f"{stem}{expert}.{part}.weight" for part in parts] for expert in range(count)]
    for fused, parts in _FUSED.items():
        if name.endswith(f".{fused}.weight"):
            return [[name.replace(fused, part) for part in parts]]
    tied = name == "lm_head.weight" and name not in held
    return [["model.embed_tokens.weight" if tied else name]]


def _layouts(
    name: str, values: list[list[np.ndarray]], rank: int, ranks: int, config, cuda: bool
) -> Iterator[np.ndarray]:
    """The ways in which rank `rank` of `ranks` may hold the tensor: its share, or (replicated) the whole."""
    for number, count in {(rank, ranks), (0, 1)}:
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            (value,) = values[0]
            if (padded := _padded(value, 0, _VOCAB_MULTIPLE)).shape[0] % count == 0:
                yield np.split(padded, count)[number]
        elif name.endswith("qkv_proj.weight"):
            groups = min(count, config.num_key_value_heads)
            places = [(number, count), *[(number * groups // count, groups)] * 2]
            yield np.concatenate([np.split(v, n)[at] for v, (at, n) in zip(values[0], places, strict=True)])
        elif name.endswith((*_EXPERTS, "gate_up_proj.weight", "down_proj.weight")):
            axis = 1 if name.endswith(("down_proj.weight", "w2_weight")) else 0
            # The CPU server widens what lies between up and down to its multiple, with zeros.
            width = values[0][0].shape[axis]
            for wide in {width + -width % multiple for multiple in (count, _CPU_MULTIPLE * count)}:
                widened = [[_padded(value, axis, wide) for value in row] for row in values]
                shares = [[np.split(value, count, axis)[number] for value in row] for row in widened]
                yield from _fused(name, shares, cuda)
        elif name.endswith("o_proj.weight"):
            yield np.split(values[0][0], count, 1)[number]
        else:
            yield values[0][0]
    if name.endswith(tuple(_EXPERTS)) and ranks > 1 and len(values) % ranks == 0:  # expert parallelism
        own = len(values) // ranks
        yield from _fused(name, values[rank * own : (rank + 1) * own], cuda)


def _fused(name: str, rows: list[list[np.ndarray]], cuda: bool) -> Iterator[np.ndarray]:
    joined = np.stack([np.concatenate(row) for row in rows])
    yield joined if name.endswith(tuple(_EXPERTS)) else joined[0]
    if cuda and name.endswith("w13_weight"):  # SGLang may lay the rows of gate and up in turns
        yield np.stack([np.stack(row, 1).reshape(-1, row[0].shape[1]) for row in rows])


def _padded(value: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    missing = -value.shape[axis] % multiple
    return np.pad(value, [(0, missing if at == axis else 0) for at in range(value.ndim)])


def _bytes(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


# -- SGLang's sum of a CUDA tensor (kernels/ops/memory/gpu_tensor_hash.py of 0.5.23) --

_SEED = 0x243F6A88
_SEEDS = _SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF
_TILE = 8192  # words
_STEP = 256 * _TILE  # words of one device call


def cuda_hash(value: np.ndarray) -> str:
    """The 64-bit hash that SGLang's kernel gives a tensor in GPU memory, as 16 hexadecimal digits.

    Two 32-bit sums of mixed (word, position) per tile of 8192 words, the tiles' pairs added up and mixed once more.
    """
    raw = _bytes(value)
    words = np.pad(raw, (0, -len(raw) % 4)).view(np.uint32)
    if not len(words):
        return f"{0:016x}"
    size, total = np.uint32(4 * len(words) & 0xFFFFFFFF), 0
    for begin in range(0, len(words), _STEP):
        part = words[begin : begin + _STEP]
        whole = np.pad(part, (0, _STEP - len(part)))  # one shape, so one compilation
        tiles = np.asarray(_tiles(whole, np.uint32(begin), np.uint32(len(part)), size), np.uint64)
        high, low = tiles[:, : -(-len(part) // _TILE)]
        total += int((high << np.uint64(32) | low).sum(dtype=np.uint64))
    total &= (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ total >> shift) * factor & (1 << 64) - 1
    return f"{total ^ total >> 31:016x}"


@jax.jit
def _tiles(words_N: jax.Array, begin: jax.Array, count: jax.Array, size: jax.Array) -> jax.Array:
    """[2, tiles]: the two sums of each tile, of which the first `count` words are the tensor's from `begin` on."""
    local_N = jnp.arange(_STEP, dtype=jnp.uint32)
    at_N = local_N + begin
    halves = []
    for seed, factor, turn in zip(_SEEDS, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
        place_N = (at_N * jnp.uint32(factor) + jnp.uint32(seed)) ^ (at_N << turn | at_N >> (32 - turn))
        mixed_N = jnp.where(local_N < count, _mixed(words_N ^ place_N), jnp.uint32(0))
        halves.append(_mixed(mixed_N.reshape(-1, _TILE).sum(1, dtype=jnp.uint32) ^ size))
    return jnp.stack(halves)


def _mixed(words: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ words >> shift) * jnp.uint32(factor)
    return words ^ words >> 16
