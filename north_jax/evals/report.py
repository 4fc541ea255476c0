"""The HTML report of a run: one self-contained file, built from what the run left in its workdir.

`build_report(workdir)` reads five inputs and writes `workdir/report.html`. Every input and every key is optional: what
is absent or unreadable is named as missing in the page. Rates are fractions in [0, 1]; an INTERVAL is
`[value, low, high]` (95 %), or the bare value where no interval is known.

`results.json`, the figures of the table:

    {"title": "First light",                                   heading of the page
     "command": "python -m north_jax.main ...",                what to type to run it again
     "date": "2026-11-21 14:02",                               shown as it is
     "wall_s": 1043.0,                                         whole run, seconds (default: sum of the stages)
     "hardware": {"cores": 2, "memory_gb": 8.0, "device": "cpu"},
     "facts": {"Parameters": 1019000, "Held-out tasks": 96},   any further label -> number or text
     "settings": {"temperature": 1.0, "top_p": 0.95, "near_greedy_temperature": 0.05, "samples": 8, "seeds": 3},
     "table": [ROW, ...],
     "rl": {"idle_share": 0.21,                                learner's waiting time / its wall time
            "kl_k3_lag0": 3e-9,                                largest of any step, nats
            "lag_mean": 3.4, "lag_max": 7,                     learner steps
            "lag_histogram": {"0": 120, "1": 260},             lag in steps -> trained rollouts
            "queue": {"admitted": 812, "trained": 640, "filtered": 150, "failed": 2, "open": 20}}}     groups

    ROW = {"group": "overall" | "family" | "harness" | "exposure" | "template",
           "name": "terminal", "note": "optional small print", "tasks": 48,
           "before": FIGURES, "after": FIGURES,                SFT model, RL model
           "difference": INTERVAL,                             of pass@1, after - before
           "near_greedy_difference": INTERVAL}
    FIGURES = {"pass_at_1": INTERVAL, "pass_at_8": INTERVAL, "near_greedy": INTERVAL,
               "invalid_rate": 0.031, "turns": 3.2, "tokens": 61.5}         the last three are means

`exposure` rows carry the names "common in SFT", "rare in SFT", "never in training".

`stages.json` (or `"stages"` in results.json): `{"tasks": 3.1, "sft": 240.0, ...}`, wall seconds in order of running.

`sft/metrics.jsonl`, `rl/metrics.jsonl`: one object a line with `step` and scalars; the names read are in `CHARTS`.
`stage` in the SFT file marks the stages of the loss curve.

`report_rollouts.jsonl`: one rollout a line, in any number; at most 400 are shown. `report_rollouts.record` makes one.

    {"where": "before" | "after" | "rl", "step": 12, "task": "rename-0412", "family": "terminal", "template": "rename",
     "harness": "bash", "status": "solved", "detail": "", "reward": 1.0, "advantage": 0.43,
     "turns": [{"role": "system" | "user" | "tool", "text": "..."},
               {"role": "assistant", "tokens": [[text, sampler_logp, trainer_logp or null, weight_version], ...]}]}

`step` and `advantage` belong to `rl` rollouts. An assistant turn's token texts join to the sampled completion, markers
such as <|END_THINKING|> included: the reader splits reasoning, tool call and text by them.
"""

import base64
import hashlib
import json
import os
import pathlib
import re
from typing import Any

import jinja2

from north_jax.evals.report_rollouts import as_dict, as_number, as_text, choose_rollouts, parse_line, plain

MAX_POINTS = 1_500

GROUPS = {
    "overall": "",
    "family": "By family",
    "harness": "By harness",
    "exposure": "By how often SFT saw the template",
}

GLOSSARY = {
    "pass@1": "Chance that one sampled rollout solves a task: the mean reward over all samples.",
    "pass@8": "Chance that at least one of 8 sampled rollouts solves a task (unbiased estimator).",
    "near-greedy": "pass@1 at a temperature near 0, where the model nearly always takes its likeliest token. RL that "
    "only sharpens the model raises pass@1 at temperature 1 but not this.",
    "interval": "95 % confidence interval. Where that of a difference excludes 0, chance is an unlikely explanation.",
    "invalid call": "An assistant turn that cannot be parsed, or names no tool, or gives it wrong arguments.",
    "turns, tokens": "Means per rollout: assistant turns, and tokens sampled by the model.",
    "reward": "1 if the task's verifier passes in the sandbox, else 0. Nothing else is rewarded.",
    "group": "The 8 rollouts of one task in one go; each one's advantage is its reward minus the mean of the others.",
    "lag": "Staleness: learner steps taken between the weights that sampled a token and the step that trains on it.",
    "idle": "Share of the learner's wall time spent waiting for rollouts.",
    "ratio": "exp(trainer log-probability − sampler log-probability) of a sampled token. 1 means both agree.",
    "k3 KL": "Mean of r − 1 − log r over sampled tokens, r the ratio. At lag 0 sampler and learner have the same "
    "weights: what is left is their numerical mismatch.",
    "capped tokens": "Share of trained tokens whose ratio is above CISPO's cap and was cut back to it.",
    "|Δ log p|": "Mean absolute difference between trainer and sampler log-probability per token: staleness and "
    "numerical mismatch together.",
    "entropy": "Mean uncertainty of the next-token distribution over sampled tokens, in nats.",
    "admitted, filtered": "Groups that entered the queue; of these, the ones without signal (all solved or all failed) "
    "leave it untrained.",
}

# One entry per chart: file, heading, glossary term, unit, [(metric, legend)], and how the axis behaves.
CHARTS = (
    {"file": "sft", "title": "SFT loss", "unit": "nats per trained token", "series": [("loss", "loss")]},
    {
        "file": "rl",
        "title": "Training reward",
        "term": "reward",
        "unit": "%",
        "series": [("reward", "reward")],
        "zero": True,
    },
    {
        "file": "rl",
        "title": "Entropy",
        "term": "entropy",
        "unit": "nats per token",
        "series": [("entropy", "entropy")],
        "zero": True,
    },
    {
        "file": "rl",
        "title": "Mean ratio",
        "term": "ratio",
        "unit": "",
        "series": [("ratio_mean", "ratio")],
        "reference": 1.0,
    },
    {
        "file": "rl",
        "title": "Capped tokens",
        "term": "capped tokens",
        "unit": "%",
        "series": [("capped_share", "above cap")],
        "zero": True,
    },
    {
        "file": "rl",
        "title": "|Δ log p|",
        "term": "|Δ log p|",
        "unit": "nats per token",
        "series": [("logp_gap_mean", "gap")],
        "zero": True,
    },
    {
        "file": "rl",
        "title": "Lag",
        "term": "lag",
        "unit": "learner steps",
        "series": [("lag_mean", "mean"), ("lag_max", "max")],
        "zero": True,
        "smooth": False,
    },
    {
        "file": "rl",
        "title": "Learner idle",
        "term": "idle",
        "unit": "%",
        "series": [("idle_share", "idle")],
        "zero": True,
    },
    {
        "file": "rl",
        "title": "Rollout length",
        "term": "turns, tokens",
        "unit": "tokens",
        "series": [("completion_tokens_mean", "tokens")],
        "zero": True,
    },
    {
        "file": "rl",
        "title": "Invalid calls",
        "term": "invalid call",
        "unit": "%",
        "series": [("invalid_call_rate", "invalid")],
        "zero": True,
    },
)


def build_report(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `workdir/report.html` from what is there and returns its path.

    Inputs: see the module's docstring. Raises NotADirectoryError if `workdir` is not a folder; an absent or damaged
    input is named in the page instead.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise NotADirectoryError(f"There is no folder {workdir} to report on: pass the --workdir of a run.")
    notes: list[str] = []
    results = as_dict(_read_json(workdir / "results.json", notes))
    stages = as_dict(results.get("stages"))
    if not stages or (workdir / "stages.json").exists():
        stages = as_dict(_read_json(workdir / "stages.json", notes)) or stages
    metrics = {name: _read_metrics(workdir / name / "metrics.jsonl", notes) for name in ("sft", "rl")}
    rollouts, total = choose_rollouts(workdir / "report_rollouts.jsonl", notes)
    page = _template().render(
        title=as_text(results.get("title")) or "north_jax run",
        head=_head(results, stages),
        verdict=_verdict(results),
        settings=as_dict(results.get("settings")),
        groups=_table(results),
        stages=_bars(stages),
        lag=_lag(as_dict(results.get("rl"))),
        queue=_queue(as_dict(as_dict(results.get("rl")).get("queue"))),
        glossary=GLOSSARY,
        notes=notes,
        shown=len(rollouts["rollouts"]),
        total=total,
        script_hash=_script_hash(),
        data=_embed({"charts": _charts(metrics), "reader": rollouts}),
    )
    path = workdir / "report.html"
    partial = path.with_suffix(".html.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


# ---- figures ---------------------------------------------------------------------------------------------------------


def _head(results: dict, stages: dict) -> list[tuple[str, str]]:
    hardware = as_dict(results.get("hardware"))
    seconds = [x for x in map(as_number, stages.values()) if x is not None]
    wall = as_number(results.get("wall_s"))
    if wall is None and seconds:
        wall = sum(seconds)
    parts = [
        as_text(hardware.get("device")),
        f"{plain(hardware['cores'])} cores" if as_number(hardware.get("cores")) is not None else "",
        f"{plain(hardware['memory_gb'])} GB memory" if as_number(hardware.get("memory_gb")) is not None else "",
    ]
    rows = [
        ("Date", as_text(results.get("date")) or "missing"),
        ("Wall time", duration(wall)),
        ("Hardware", ", ".join(filter(None, parts)) or "missing"),
    ]
    rows += [(as_text(name), plain(value)) for name, value in as_dict(results.get("facts")).items()]
    return [*rows, ("Command", as_text(results.get("command")) or "missing")]


def _verdict(results: dict) -> dict[str, Any]:
    row = next((row for row in _rows(results) if row["group"] == "overall"), None)
    if row is None or None in (row["before"]["pass_at_1"], row["after"]["pass_at_1"]):
        return {"missing": True}
    before, after = row["before"]["pass_at_1"]["value"], row["after"]["pass_at_1"]["value"]
    difference = row["difference"] or {"value": after - before, "low": None, "high": None}
    low, high = difference["low"], difference["high"]
    chance = "interval missing" if low is None else f"95 % interval {signed(low)} to {signed(high)}"
    sentence = f"With RL, pass@1 {_moved(difference)} from {percent(before)} % to {percent(after)} % "
    sentence += f"({signed(difference['value'])} points, {chance}); near-greedy pass@1 "
    near = [row[side]["near_greedy"] for side in ("before", "after")]
    if None in near:
        sentence += "is missing."
    else:
        how = _moved(row["near_greedy_difference"])
        sentence += f"{how} from {percent(near[0]['value'])} % to {percent(near[1]['value'])} %."
    return {"missing": False, "sentence": sentence.replace(" %", "\u00a0%"), "row": row, "difference": difference}


def _moved(difference: dict | None) -> str:
    if difference is None or difference["low"] is None:
        return "went"
    return "rose" if difference["low"] > 0 else "fell" if difference["high"] < 0 else "moved within noise,"


def _table(results: dict) -> list[tuple[str, str, list[dict]]]:
    rows = _rows(results)
    groups = [(key, title, [row for row in rows if row["group"] == key]) for key, title in GROUPS.items()]
    return [*groups, ("template", "By template", [row for row in rows if row["group"] == "template"])]


def _rows(results: dict) -> list[dict]:
    return [_row(row) for row in _list(results.get("table")) if isinstance(row, dict)]


def _row(row: dict) -> dict[str, Any]:
    out = {name: as_text(row.get(name)) for name in ("group", "name", "note")}
    out |= {"tasks": as_number(row.get("tasks"))}
    out |= {name: _interval(row.get(name)) for name in ("difference", "near_greedy_difference")}
    for side in ("before", "after"):
        figures = as_dict(row.get(side))
        out[side] = {name: _interval(figures.get(name)) for name in ("pass_at_1", "pass_at_8", "near_greedy")}
        out[side] |= {name: as_number(figures.get(name)) for name in ("invalid_rate", "turns", "tokens")}
    return out


def _interval(x: Any) -> dict[str, float | None] | None:
    low = high = None
    if isinstance(x, list) and len(x) == 3:
        x, low, high = map(as_number, x)
    value = as_number(x)
    if low is None or high is None:
        low = high = None
    return None if value is None else {"value": value, "low": low, "high": high}


def _bars(stages: dict) -> list[dict]:
    items = [(as_text(name), as_number(x)) for name, x in stages.items()]
    items = [(name, max(x, 0.0)) for name, x in items if x is not None]
    whole, start, out = sum(x for _, x in items), 0.0, []
    for name, seconds in items if whole > 0 else []:
        share = 100 * seconds / whole
        out.append({"name": name, "left": start, "width": share, "text": duration(seconds), "share": share})
        start += share
    return out


def _lag(rl: dict) -> dict[str, Any]:
    pairs = [(as_number(lag), as_number(count)) for lag, count in as_dict(rl.get("lag_histogram")).items()]
    pairs = sorted((lag, count) for lag, count in pairs if lag is not None and count is not None and count >= 0)
    whole, most = sum(c for _, c in pairs), max((c for _, c in pairs), default=0)
    bars = [
        {
            "name": plain(lag),
            "left": 0,
            "width": 100 * count / most,
            "text": plain(count),
            "share": 100 * count / whole,
        }
        for lag, count in (pairs if most > 0 else [])
    ]
    fresh = as_number(rl.get("kl_k3_lag0"))
    figures = {name: as_number(rl.get(name)) for name in ("lag_mean", "lag_max", "idle_share")}
    return {"bars": bars, "fresh": None if fresh is None else f"{fresh:.1e}"} | figures


def _queue(queue: dict) -> dict[str, Any] | None:
    names = ("admitted", "trained", "filtered", "failed", "open")
    counts = {name: as_number(queue.get(name)) for name in names}
    if None in counts.values():
        return None
    return {"counts": counts, "off": counts["admitted"] - sum(counts[name] for name in names[1:])}


def _charts(metrics: dict[str, list[dict]]) -> list[dict]:
    out = []
    for chart in CHARTS:
        rows = metrics[chart["file"]]
        stride = -(-len(rows) // MAX_POINTS) if rows else 1
        series = []
        for key, label in chart["series"]:
            points = [(row["step"], as_number(row.get(key))) for row in rows[::stride]]
            points = [[x, float(f"{y:.4g}")] for x, y in points if y is not None]
            if points:
                series.append({"label": label, "points": points})
        keys = ", ".join(key for key, _ in chart["series"])
        missing = "" if series else f"Missing: {keys} in {chart['file']}/metrics.jsonl."
        out.append(
            chart
            | {
                "series": series,
                "missing": missing,
                "stride": stride,
                "stages": _stages(chart, rows),
                "help": GLOSSARY.get(chart.get("term")),
            }
        )
    return out


def _stages(chart: dict, rows: list[dict]) -> list[list]:
    """[[first step, label]] where the metric `stage` changes."""
    marks: list[list] = []
    for row in rows if chart["file"] == "sft" else []:
        name = as_text(row.get("stage"))
        label = f"stage {name}" if name.isdigit() else name
        if label and (not marks or marks[-1][1] != label):
            marks.append([row["step"], label])
    return marks


# ---- reading what may be absent or damaged ---------------------------------------------------------------------------


def _read_json(path: pathlib.Path, notes: list[str]) -> Any:
    try:
        value = parse_line(path.read_bytes())
    except OSError:
        notes.append(f"{path.name} is missing.")
        return None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object: its figures are left out.")
    return value


def _read_metrics(path: pathlib.Path, notes: list[str]) -> list[dict]:
    name = f"{path.parent.name}/{path.name}"
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        notes.append(f"{name} is missing.")
        return []
    values = [parse_line(line) for line in lines if line.strip()]
    steps: dict[float, dict] = {}
    for value in values:
        step = as_number(as_dict(value).get("step"))
        if step is not None:
            steps[step] = steps.get(step, {}) | value | {"step": step}  # a resumed run repeats steps: the last wins
    bad = sum(as_number(as_dict(value).get("step")) is None for value in values)
    if bad:
        notes.append(f"{name}: {bad} line(s) without a step were left out.")
    return [steps[step] for step in sorted(steps)]


def _list(x: Any) -> list:
    return x if isinstance(x, list) else []


# ---- page ------------------------------------------------------------------------------------------------------------


def percent(x: float | None) -> str:
    """A fraction as per cent with one decimal, without the sign; a dash for None."""
    return "–" if x is None else f"{100 * x:.1f}".replace("-", "−")


def signed(x: float | None) -> str:
    """A difference of fractions in points with its sign."""
    return "–" if x is None else f"{100 * x:+.1f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds as '7.4 s', '3 min 05 s' or '2 h 04 min'; 'missing' for None."""
    if seconds is None:
        return "missing"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _embed(data: dict) -> str:
    """JSON that is safe inside a script element: no '<', no line separators, no NaN."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _source() -> str:
    return pathlib.Path(__file__).with_name("report.html").read_text(encoding="utf-8")


def _script_hash() -> str:
    """CSP hash of the template's one script, so that no other script can run in the page."""
    script = re.search(r"<script>(.*?)</script>", _source(), re.DOTALL)
    return base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "signed": signed, "plain": plain}
    return environment.from_string(_source())
