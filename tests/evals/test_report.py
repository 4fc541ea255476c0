"""The HTML report, built from synthetic workdirs (`tests/real/test_report_browser.py` opens it in a browser)."""

import copy
import json
import math
import random
import re
import shutil
import time

import pytest

from north_jax.agents.record import Rollout
from north_jax.chat.format import ChatFormat
from north_jax.chat.tokenizer import Tokenizer, train_tokenizer
from north_jax.evals import report, report_rollouts

SCRIPT_PAYLOAD = "</script><script>document.title='owned'</script>"
IMAGE_PAYLOAD = "<img src=x onerror=\"document.title='owned'\">"
HARNESSES = ("bash", "editor", "text")
TEMPLATES = {
    "terminal": ("create", "append", "rename", "move", "count-lines", "sort", "dedupe", "first-line", "key-lookup"),
    "software": ("off-by-one", "wrong-operator", "missing-return", "bad-default", "wrong-name"),
}
SYSTEM = "You are a software engineer working in a shell.\n\n## Tools\nbash(command: string)\n" + "Rules apply.\n" * 30


def interval(rng: random.Random, value: float, width: float) -> list[float]:
    return [value, max(0.0, value - width * rng.uniform(0.9, 1.1)), min(1.0, value + width * rng.uniform(0.9, 1.1))]


def table_row(rng: random.Random, group: str, name: str, tasks: int, level: float, gain: float) -> dict:
    width = 0.42 / math.sqrt(tasks)

    def figures(p: float, near: float, invalid: float) -> dict:
        return {
            "pass_at_1": interval(rng, p, width),
            "pass_at_8": interval(rng, min(0.97, p + 0.33), width),
            "near_greedy": interval(rng, near, width * 1.3),
            "invalid_rate": invalid,
            "turns": rng.uniform(2.5, 4),
            "tokens": rng.uniform(45, 90),
        }

    return {
        "group": group,
        "name": name,
        "tasks": tasks,
        "before": figures(level, level + 0.2, 0.061),
        "after": figures(min(level + gain, 0.96), min(level + 0.2 + gain / 4, 0.98), 0.018),
        "difference": [gain, gain - width * 0.7, gain + width * 0.7],
        "near_greedy_difference": [gain / 4, gain / 4 - width, gain / 4 + width],
    }


def results(rng: random.Random) -> dict:
    rows = [table_row(rng, "overall", "all held-out tasks", 96, 0.412, 0.131)]
    rows += [table_row(rng, "family", name, 48, level, 0.13) for name, level in (("terminal", 0.5), ("software", 0.33))]
    rows += [table_row(rng, "harness", name, 32, rng.uniform(0.3, 0.5), 0.12) for name in HARNESSES]
    for name, level, gain in (
        ("common in SFT", 0.61, 0.09),
        ("rare in SFT", 0.38, 0.21),
        ("never in training", 0.12, 0.02),
    ):
        rows.append(table_row(rng, "exposure", name, 32, level, gain))
    for family, names in TEMPLATES.items():
        for name in names:
            row = table_row(rng, "template", name, 7, rng.uniform(0, 0.8), rng.uniform(-0.05, 0.25))
            rows.append(row | {"note": family})
    return {
        "title": "First light: SFT, then asynchronous RL",
        "command": "python -m north_jax.main --config=configs/demo.py --workdir=runs/demo",
        "date": "2026-11-21 14:02",
        "wall_s": 1043.0,
        "hardware": {"cores": 2, "memory_gb": 7.8, "device": "cpu"},
        "facts": {"Parameters": 1_019_904, "Vocabulary": 1536, "Trajectories": 3120, "Held-out tasks": 96},
        "settings": {"temperature": 1.0, "top_p": 0.95, "near_greedy_temperature": 0.05, "samples": 8, "seeds": 3},
        "table": rows,
        "rl": {
            "idle_share": 0.214,
            "lag_mean": 3.42,
            "lag_max": 8,
            "kl_k3_lag0": 3.2e-9,
            "lag_histogram": {str(lag): n for lag, n in enumerate((120, 640, 1130, 1420, 980, 520, 210, 70, 8))},
            "queue": {"admitted": 812, "trained": 640, "filtered": 150, "failed": 2, "open": 20},
        },
    }


def metric_lines(rng: random.Random) -> tuple[list[dict], list[dict]]:
    sft = [
        {"step": s, "stage": str(1 + (s > 260)), "loss": 6.2 * math.exp(-s / 70) + 0.35 + rng.gauss(0, 0.05)}
        for s in range(1, 401)
    ]
    rl = []
    for s in range(1, 81):
        lag = 2 + s % 4
        rl.append(
            {
                "step": s,
                "reward": min(1, max(0, 0.42 + 0.2 * (1 - math.exp(-s / 25)) + rng.gauss(0, 0.06))),
                "entropy": 0.21 - 0.001 * s + rng.gauss(0, 0.008),
                "ratio_mean": 1 + rng.gauss(0.001, 0.003),
                "capped_share": max(0, rng.gauss(0.001, 0.001)),
                "logp_gap_mean": abs(rng.gauss(0.006, 0.002)),
                "lag_mean": lag + rng.uniform(0, 1),
                "lag_max": lag + 3,
                "idle_share": min(1, max(0, rng.gauss(0.2, 0.1))),
                "completion_tokens_mean": 62 + rng.gauss(0, 4),
                "invalid_call_rate": max(0, 0.06 - 0.0006 * s + rng.gauss(0, 0.008)),
            }
        )
    return sft, rl


def sampled(rng: random.Random, texts: list[str], where: str, version: int) -> list[list]:
    out = []
    for text in texts:
        logp = -rng.expovariate(8)
        out.append([text, logp, logp + rng.gauss(0, 0.05) if where == "rl" else None, str(version)])
    if where == "rl":
        out[-1][1:3] = -0.9, -0.9 + math.log(1.6)
        out[-1][3] = str(version + 4)
    return out


def words(text: str) -> list[str]:
    return re.findall(r"<\|[A-Z_]+\|>|\s?\w+|\W", text)


def rollout(rng: random.Random, where: str, number: int) -> dict:
    family = rng.choice(list(TEMPLATES))
    template = rng.choice(TEMPLATES[family])
    solved = rng.random() < 0.45
    step = rng.randrange(1, 81) if where == "rl" else 0
    command = f"sed -i 's/range(n)/range(n + 1)/' {template}.py"
    turns = [
        {"role": "system", "text": SYSTEM},
        {
            "role": "user",
            "text": f"The function `total_{number}` in `lib/{template}.py` leaves out the last item. Fix it.",
        },
    ]
    thoughts = ("I look at the file first.", "The range ends one too early.", "The tests pass now, so I submit.")
    calls = (f"cat lib/{template}.py", command, "submit")
    replies = (f"def total_{number}(n):\n    return sum(i for i in range(n))\n", "")
    for k, (thought, call) in enumerate(zip(thoughts, calls, strict=True)):
        action = json.dumps([{"tool_call_id": str(k), "tool_name": "bash", "parameters": {"command": call}}])
        text = f"{thought}<|END_THINKING|><|START_ACTION|>{action}<|END_ACTION|><|END_OF_TURN_TOKEN|>"
        turns.append({"role": "assistant", "tokens": sampled(rng, words(text), where, 4 * (step // 4))})
        if k < 2:
            turns.append({"role": "tool", "text": replies[k]})
    failed = rng.choice(("wrong", "invalid_action", "out_of_budget"))
    return {
        "where": where,
        "step": step if where == "rl" else None,
        "task": f"{template}-{number:04d}",
        "family": family,
        "template": template,
        "harness": rng.choice(HARNESSES),
        "status": "solved" if solved else failed,
        "detail": "" if solved else "the verifier's 2nd assertion fails",
        "reward": float(solved),
        "advantage": 0.571 if where == "rl" and solved else -0.429 if where == "rl" else None,
        "turns": turns,
    }


def payload_rollout() -> dict:
    """A rollout whose every text tries to leave its place; the first of the reader's list."""
    bad = SCRIPT_PAYLOAD + IMAGE_PAYLOAD + "\u2028<!--<script>"
    return {
        "where": "before",
        "step": None,
        "task": "!" + bad,
        "family": bad,
        "template": bad,
        "harness": bad,
        "status": bad,
        "detail": bad,
        "reward": 1.0,
        "turns": [
            {"role": "system", "text": bad},
            {"role": "user", "text": bad},
            {"role": "assistant", "tokens": [[bad, -0.1, None, bad], ["<|END_THINKING|>", -0.2, None, "0"]]},
            {"role": "tool", "text": bad},
        ],
    }


def make_workdir(workdir, *, rollouts: int = 900, seed: int = 0):
    """A workdir as a run of the demo would leave it; model output and task names carry injection payloads."""
    rng = random.Random(seed)
    for name in ("sft", "rl"):
        (workdir / name).mkdir(parents=True, exist_ok=True)
    (workdir / "results.json").write_text(json.dumps(results(rng)))
    stages = {
        "tasks": 2.4,
        "trajectories": 61,
        "tokenizer": 3.2,
        "sft": 242,
        "eval before": 96,
        "rl": 512,
        "eval after": 91,
    }
    (workdir / "stages.json").write_text(json.dumps(stages | {"report": 0.4}))
    for name, lines in zip(("sft", "rl"), metric_lines(rng), strict=True):
        (workdir / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [payload_rollout()] + [rollout(rng, ("before", "rl", "rl", "after")[i % 4], i) for i in range(rollouts)]
    (workdir / "report_rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("demo"))


def test_builds_quickly_one_bounded_self_contained_file(workdir):
    start = time.perf_counter()
    path = report.build_report(workdir)
    assert time.perf_counter() - start < 3
    assert path == workdir / "report.html"
    assert path.stat().st_size < 6_000_000
    page = path.read_text()
    markup = page.replace(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1), "")
    assert re.findall(r"\b(?:src|href)\s*=|@import|url\(|fetch\(|//(?!\s|www\.w3\.org)", markup) == []
    assert "default-src 'none'" in page


def test_holds_the_figures(workdir):
    page = report.build_report(workdir).read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.split("<h2>Learning curves")[0]))
    assert "With RL, pass@1 rose from 41.2 % to 54.3 % (+13.1 points, 95 % interval +10.1 to +16.1)" in text
    assert "near-greedy pass@1 moved within noise, from 61.2 % to 64.5 %" in text
    for expected in ("17 min 23 s", "cpu, 2 cores, 7.8 GB memory", "1,019,904", "2026-11-21 14:02", "By harness"):
        assert expected in text
    for name in ("terminal", "software", *HARNESSES, "common in SFT", "rare in SFT", "never in training"):
        assert f" {name} " in text
    assert "All 14 templates" in text
    rest = page.split("<h2>Time, staleness")[1]
    assert "8 min 32 s" in rest and "<b>812</b>admitted" in rest and "off by" not in rest
    data = embedded(page)
    assert [c["title"] for c in data["charts"] if c["missing"]] == []
    assert data["charts"][0]["stages"] == [[1, "stage 1"], [261, "stage 2"]]


def test_model_output_stays_text(workdir):
    page = report.build_report(workdir).read_text()
    assert SCRIPT_PAYLOAD not in page and "<img" not in page
    assert page.count("</script>") == 2 and page.count("<script") == 2
    assert embedded(page)["reader"]["rollouts"][0]["task"] == "!" + payload_rollout()["task"][1:]


def test_results_text_stays_text(tmp_path):
    make_workdir(tmp_path, rollouts=4)
    figures = json.loads((tmp_path / "results.json").read_text())
    figures |= {"title": IMAGE_PAYLOAD, "command": SCRIPT_PAYLOAD, "facts": {IMAGE_PAYLOAD: SCRIPT_PAYLOAD}}
    figures["table"][1]["name"] = IMAGE_PAYLOAD
    (tmp_path / "results.json").write_text(json.dumps(figures))
    (tmp_path / "stages.json").write_text(json.dumps({IMAGE_PAYLOAD: 3}))
    page = report.build_report(tmp_path).read_text()
    assert SCRIPT_PAYLOAD not in page and "<img" not in page


def test_rollouts_cover_and_repeat(workdir):
    first, total = report_rollouts.choose_rollouts(workdir / "report_rollouts.jsonl", [])
    again, _ = report_rollouts.choose_rollouts(workdir / "report_rollouts.jsonl", [])
    assert first == again and total == 901 and len(first["rollouts"]) == report_rollouts.MAX_ROLLOUTS
    seen = {(r["where"], r["harness"], r["family"], r["solved"]) for r in first["rollouts"]}
    assert {
        (where, harness, family, solved)
        for where in ("before", "rl", "after")
        for harness in HARNESSES
        for family in TEMPLATES
        for solved in (True, False)
    } <= seen
    assert {r["template"] for r in first["rollouts"] if r["where"] == "rl"} == {
        t for ts in TEMPLATES.values() for t in ts
    }
    assert len({r["step"] for r in first["rollouts"] if r["where"] == "rl"}) > 50
    assert first["texts"].count(SYSTEM) == 1


def test_record_splits_a_rollout_into_turns_and_tokens(tmp_path):
    tools = [{"name": "bash", "description": "Run a command", "parameters": {"type": "object", "properties": {}}}]
    train_tokenizer(["a small text to learn from, é"] * 3, tmp_path / "tok", vocab_size=300)
    tokenizer = Tokenizer.load(tmp_path / "tok")
    chat = ChatFormat(tokenizer, platform="Platform.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say <|END_TEXT|> é"},
        {"role": "assistant", "thinking": "Echo é.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
        {"role": "tool", "content": 'line 1\n"two"\n'},
        {"role": "assistant", "thinking": "", "content": "done"},
    ]
    rendered = chat.render(messages, tools)
    ids, mask = rendered.ids, [int(weight > 0) for weight in rendered.weights]
    middle = ids.index(tokenizer.start_tool_result)
    spans = [(0, middle, "0"), (middle, len(ids), "4")]
    logprobs = [-0.25 * sampled for sampled in mask]
    played = Rollout(
        task="t-1",
        family="terminal",
        template="t",
        harness="bash",
        seed=0,
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=spans,
        status="solved",
        detail="",
        turns=2,
        seconds=1.0,
    )
    line = report_rollouts.record(
        played, tokenizer, where="rl", step=3, advantage=0.5, trainer_logprobs=[2 * x for x in logprobs]
    )
    assert (line["where"], line["step"], line["task"], line["reward"]) == ("rl", 3, "t-1", 1.0)
    roles = [turn["role"] for turn in line["turns"]]
    assert roles == ["system", "system", "user", "assistant", "tool", "assistant"]
    assert [turn["text"] for turn in line["turns"] if turn["role"] in ("user", "tool")] == [
        "Say <|END_TEXT|> é",
        'line 1\n"two"\n',
    ]
    tokens = line["turns"][3]["tokens"]
    text = "".join(t[0] for t in tokens)
    assert text.startswith("Echo é.<|END_THINKING|><|START_ACTION|>[") and '{"command": "ls"}' in text
    assert text.endswith("]<|END_ACTION|><|END_OF_TURN_TOKEN|>")
    assert all(t[1:] == [-0.25, -0.5, "0"] for t in tokens)
    assert {t[3] for t in line["turns"][5]["tokens"]} == {"4"}
    assert report_rollouts.record(played, tokenizer, where="after")["turns"][3]["tokens"][0][2] is None
    (tmp_path / "report_rollouts.jsonl").write_text(json.dumps(line) + "\n")
    assert len(embedded(report.build_report(tmp_path).read_text())["reader"]["rollouts"]) == 1


def test_long_rollouts_are_cut_with_a_note(tmp_path):
    long = rollout(random.Random(0), "rl", 1)
    long["turns"][0]["text"] = "x" * 20_000
    long["turns"][2]["tokens"] = [[" word", -0.123456789, -0.2, 3]] * 5_000
    lines = [json.dumps(long | {"task": f"t{i}"}) + "\n" for i in range(60)]
    (tmp_path / "report_rollouts.jsonl").write_text("".join(lines))
    path = report.build_report(tmp_path)
    assert path.stat().st_size < 6_000_000
    page = path.read_text()
    assert "8000 characters left out" in page and "1000 tokens left out" in page
    assert 1 < len(embedded(page)["reader"]["rollouts"]) < 60


def test_many_steps_are_thinned(tmp_path):
    (tmp_path / "rl").mkdir()
    lines = [json.dumps({"step": s, "reward": 0.5}) + "\n" for s in range(10_000)]
    (tmp_path / "rl/metrics.jsonl").write_text("".join(lines))
    chart = next(
        c for c in embedded(report.build_report(tmp_path).read_text())["charts"] if c["title"] == "Training reward"
    )
    assert chart["stride"] == 7 and len(chart["series"][0]["points"]) <= report.MAX_POINTS


def test_an_empty_workdir_says_what_is_missing(tmp_path):
    page = report.build_report(tmp_path).read_text()
    for name in ("results.json", "stages.json", "sft/metrics.jsonl", "rl/metrics.jsonl", "report_rollouts.jsonl"):
        assert f"{name} is missing" in page
    assert "No verdict yet." in page and "Missing: the table of figures" in page and "Missing: rl.queue" in page


@pytest.mark.parametrize(
    "name", ["results.json", "stages.json", "sft/metrics.jsonl", "rl/metrics.jsonl", "report_rollouts.jsonl"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00{", b"[1, 2]", b'{"step": NaN}\n7\n"x"\n[]\n{"turns": 3}'])
def test_one_piece_missing_or_damaged(workdir, tmp_path, name, content):
    shutil.copytree(workdir, tmp_path / "w")
    path = tmp_path / "w" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    page = report.build_report(tmp_path / "w").read_text()
    assert page.endswith("</html>") and ("Missing" in page or content == b"")


def spots(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from spots(child, (*path, key))


def put(value, path, junk):
    """A copy of `value` with `junk` at `path`."""
    if not path:
        return junk
    value = copy.copy(value)
    value[path[0]] = put(value[path[0]], path[1:], junk)
    return value


@pytest.mark.parametrize(
    "junk",
    [None, "x", True, [], {}, [None] * 3, {"a": []}, math.nan, -math.inf, 10**400, -1e300],
    ids=lambda x: str(x)[:9],
)
def test_any_value_may_be_junk(tmp_path, junk, monkeypatch):
    (tmp_path / "rl").mkdir()
    template = report._template()
    monkeypatch.setattr(report, "_template", lambda: template)  # compiled once: this test builds hundreds of pages
    rng = random.Random(1)
    good = results(rng) | {"stages": {"sft": 3.0}}
    good["table"] = good["table"][:1]
    one, line = rollout(rng, "rl", 1), metric_lines(rng)[1][0]
    one["turns"] = one["turns"][1:3]
    one["turns"][1]["tokens"] = one["turns"][1]["tokens"][:1]

    def check(name, value):
        (tmp_path / name).write_text(json.dumps(value) + "\n")
        page = report.build_report(tmp_path).read_text()
        embedded(page)
        assert page.endswith("</html>")

    for path in spots(good):
        check("results.json", put(good, path, junk))
    for path in spots(one):
        check("report_rollouts.jsonl", put(one, path, junk))
    for path in spots(line):
        check("rl/metrics.jsonl", put(line, path, junk))


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ([0.1, 0.02, 0.18], "With RL, pass@1 rose from"),
        ([-0.1, -0.18, -0.02], "With RL, pass@1 fell from"),
        ([0.01, -0.04, 0.06], "With RL, pass@1 moved within noise, from"),
        (None, "interval missing"),
    ],
)
def test_verdict_says_what_the_interval_allows(tmp_path, difference, words):
    figures = results(random.Random(0))
    figures["table"] = [figures["table"][0] | {"difference": difference}]
    (tmp_path / "results.json").write_text(json.dumps(figures))
    assert words in report.build_report(tmp_path).read_text()


def test_queue_that_lost_a_group_says_so(tmp_path):
    figures = results(random.Random(0))
    figures["rl"]["queue"]["trained"] -= 3
    (tmp_path / "results.json").write_text(json.dumps(figures))
    assert "The sum is off by 3: a group was lost" in report.build_report(tmp_path).read_text()


def test_resumed_metrics_keep_the_last_line_of_a_step(tmp_path):
    (tmp_path / "rl").mkdir()
    lines = [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 2, "reward": 0.9}, {"step": 3}]
    (tmp_path / "rl/metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 4, "rew')
    chart = next(
        c for c in embedded(report.build_report(tmp_path).read_text())["charts"] if c["title"] == "Training reward"
    )
    assert chart["series"][0]["points"] == [[1, 0.1], [2, 0.9]]


def test_no_workdir_is_an_error(tmp_path):
    with pytest.raises(NotADirectoryError, match=r"no folder .*absent to report on: pass the --workdir"):
        report.build_report(tmp_path / "absent")
