"""The rollouts of the report's reader: recorded one a line, and chosen, bounded and compacted for the page.

The line's schema is in `report.py`. What is read here may be damaged: the readers at the end turn anything into a value
or into nothing, and never raise.
"""

import codecs
import itertools
import json
import math
import pathlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a report is built without starting what made the rollouts
    from north_jax.agents.record import Rollout
    from north_jax.chat.tokenizer import Tokenizer

MAX_ROLLOUTS = 400
MAX_ROLLOUT_BYTES = 4_500_000  # of embedded JSON; with curves and page the file stays under 6 MB
MAX_TURN_CHARS = 12_000
MAX_TURN_TOKENS = 4_000


def record(
    rollout: "Rollout",
    tokenizer: "Tokenizer",
    *,
    where: str,
    step: int | None = None,
    advantage: float | None = None,
    trainer_logprobs: Sequence[float] | None = None,
) -> dict[str, Any]:
    """One line of `report_rollouts.jsonl` (a JSON object) from a rollout.

    where: "before", "rl" or "after". step, advantage, trainer_logprobs [S] (the learner's log-probability of each token
    of the conversation, at sampled tokens) belong to "rl".
    """
    versions: dict[int, str] = {}
    for start, end, version in rollout.versions:
        versions |= dict.fromkeys(range(start, end), version)
    turns: list[dict] = []
    for sampled, run in itertools.groupby(range(len(rollout.ids)), key=lambda i: rollout.mask[i]):
        places = list(run)
        ids = [rollout.ids[i] for i in places]
        if not sampled:
            turns += _context(ids, tokenizer)
            continue
        tokens = [
            [text, rollout.logprobs[i], None if trainer_logprobs is None else trainer_logprobs[i], versions.get(i)]
            for i, text in zip(places, _texts(ids, tokenizer), strict=True)
        ]
        turns.append({"role": "assistant", "tokens": tokens})
    names = ("task", "family", "template", "harness", "status", "detail", "reward")
    line = {"where": where, "step": step, "advantage": advantage}
    return line | {name: getattr(rollout, name) for name in names} | {"turns": turns}


def _texts(ids: Sequence[int], tokenizer: "Tokenizer") -> list[str]:
    """The text of each token; a character whose bytes are split over tokens appears at the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(tokenizer.decode_bytes([id_]), final=i == len(ids) - 1) for i, id_ in enumerate(ids)]


def _context(ids: Sequence[int], tokenizer: "Tokenizer") -> list[dict]:
    """The turns in tokens that were not sampled; tool results are shown as the tool printed them, not as JSON."""
    starts = [i for i, id_ in enumerate(ids) if id_ == tokenizer.start_of_turn]
    turns = []
    for start, end in itertools.pairwise([*starts, len(ids)]):
        turn = ids[start:end]
        text = tokenizer.decode([id_ for id_ in turn if id_ not in tokenizer.marker_names])
        if tokenizer.start_tool_result in turn:
            turns.append({"role": "tool", "text": _printed(text)})
        elif tokenizer.chatbot not in turn:  # which would be the generation prompt
            turns.append({"role": "user" if tokenizer.user in turn else "system", "text": text})
    return turns


def _printed(text: str) -> str:
    try:
        results = [value for item in json.loads(text) for value in item["results"].values()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return text
    contents = [as_dict(value).get("content", value) for value in results]
    return "\n".join(x if isinstance(x, str) else json.dumps(x) for x in contents)


def choose_rollouts(path: pathlib.Path, notes: list[str]) -> tuple[dict[str, Any], int]:
    """Picks the rollouts to embed: round-robin over (where, family, harness, solved), spread over templates and steps.

    Deterministic in the file's content. Returns ({"texts": [...], "rollouts": [...]}, number in the file): turn texts
    are stored once in `texts`, a turn is `[role, text index or -1, tokens or null]`. Appends to `notes` what it left
    out.
    """
    empty = {"texts": [], "rollouts": []}
    if not path.is_file():
        notes.append(f"{path.name} is missing: no rollouts to read.")
        return empty, 0
    buckets: dict[tuple[str, ...], list[tuple[int, str, int]]] = defaultdict(list)
    total = bad = 0
    with path.open("rb") as file:  # two passes, so that only the chosen ones are ever held in memory
        while line := file.readline():
            rollout = parse_line(line)
            if not isinstance(rollout, dict) or not isinstance(rollout.get("turns"), list):
                bad += bool(line.strip())
                continue
            total += 1
            key = [as_text(rollout.get(name)) for name in ("where", "family", "harness")]
            key.append(str(_solved(rollout)))
            order = int(as_number(rollout.get("step")) or 0)
            buckets[tuple(key)].append((order, as_text(rollout.get("template")), file.tell() - len(line)))
        if bad:
            notes.append(f"{path.name}: {bad} line(s) are not rollouts and were left out.")
        queues = [_spread(sorted(members)) for _, members in sorted(buckets.items())]
        texts: dict[str, int] = {}
        chosen: list[tuple[tuple, dict]] = []
        size = 0
        for rank in range(max(map(len, queues), default=0)):
            for offset in [queue[rank] for queue in queues if rank < len(queue)]:
                file.seek(offset)
                compact, order = _compact(parse_line(file.readline()), known := dict(texts))
                cost = len(json.dumps([compact, list(known)[len(texts) :]]))
                if len(chosen) < MAX_ROLLOUTS and size + cost <= MAX_ROLLOUT_BYTES:
                    chosen.append(((*order, offset), compact))
                    texts, size = known, size + cost
            if len(chosen) >= MAX_ROLLOUTS or size > 0.95 * MAX_ROLLOUT_BYTES:
                break
    chosen.sort(key=lambda pair: pair[0])
    return {"texts": list(texts), "rollouts": [compact for _, compact in chosen]}, total


def _spread(members: list[tuple[int, str, int]]) -> list[int]:
    """Offsets reordered so that every prefix is spread over steps, and over templates before any comes twice."""
    bits = max(1, (len(members) - 1).bit_length())
    ranked = sorted(range(len(members)), key=lambda i: int(format(i, f"0{bits}b")[::-1], 2))
    seen: Counter[str] = Counter()
    keyed = []
    for place, i in enumerate(ranked):
        _, template, offset = members[i]
        keyed.append((seen[template], place, offset))
        seen[template] += 1
    return [offset for _, _, offset in sorted(keyed)]


def _compact(rollout: dict, texts: dict[str, int]) -> tuple[dict, tuple]:
    turns = []
    for turn in rollout["turns"]:
        turn = as_dict(turn)
        tokens = turn.get("tokens")
        if isinstance(tokens, list) and tokens:
            kept = [_token(token) for token in tokens[:MAX_TURN_TOKENS]]
            if len(tokens) > len(kept):
                kept.append([f"\n… {len(tokens) - len(kept)} tokens left out", None, None, None])
            turns.append([as_text(turn.get("role")), -1, kept])
            continue
        text = as_text(turn.get("text"))
        if len(text) > MAX_TURN_CHARS:
            half = MAX_TURN_CHARS // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
        turns.append([as_text(turn.get("role")), texts.setdefault(text, len(texts)), None])
    names = ("where", "task", "family", "template", "harness", "status", "detail")
    compact: dict[str, Any] = {name: as_text(rollout.get(name)) for name in names}
    compact |= {name: as_number(rollout.get(name)) for name in ("step", "reward", "advantage")}
    compact |= {"solved": _solved(rollout), "turns": turns}
    where = {"before": 0, "rl": 1, "after": 2}.get(compact["where"], 3)
    return compact, (where, compact["step"] or 0, compact["task"])


def _token(token: Any) -> list:
    fields = (list(token) if isinstance(token, list) else [token]) + [None] * 4
    return [
        as_text(fields[0]),
        *(None if x is None else round(x, 4) for x in map(as_number, fields[1:3])),
        _version(fields[3]),
    ]


def _version(x: Any) -> int | str | None:
    return x if isinstance(x, int | str) and not isinstance(x, bool) else None


def _solved(rollout: dict) -> bool:
    return (as_number(rollout.get("reward")) or 0) > 0


# ---- reading what may be absent or damaged ---------------------------------------------------------------------------


def parse_line(line: bytes) -> Any:
    """The JSON value, or None where it is none."""
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


def as_dict(x: Any) -> dict:
    """x, or an empty dict."""
    return x if isinstance(x, dict) else {}


def as_text(x: Any) -> str:
    """x in words; None is empty. Lone surrogates, which cannot be written, become question marks."""
    if isinstance(x, str):
        return x.encode("utf-8", errors="replace").decode("utf-8")
    return "" if x is None else plain(x)


def as_number(x: Any) -> float | None:
    """x as a finite float below 1e15 in size, or None."""
    try:
        value = None if isinstance(x, bool | list | dict) or x is None else float(x)
    except (ValueError, OverflowError):
        return None
    return value if value is not None and math.isfinite(value) and abs(value) < 1e15 else None


def plain(x: Any) -> str:
    """A number with thousands separators and at most 4 significant decimals; anything else as it is, or as JSON."""
    number = as_number(x) if not isinstance(x, str) else None
    if number is None:
        return as_text(x) if isinstance(x, str) else json.dumps(x, default=str)
    return f"{number:,.0f}" if number == round(number) else f"{number:,.4g}"
