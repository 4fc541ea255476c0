import json

import pytest

from north_jax.train.metrics import METRICS, MetricsWriter, read_metrics


def test_every_metric_has_a_unit_and_a_definition():
    for name, (unit, definition) in METRICS.items():
        assert name.isidentifier() and unit and definition.endswith(".")


def test_lines_are_appended_and_later_ones_dropped_on_resume(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 6):
        writer.write(step, {"loss": 1 / step, "lr": 0.5}, stage="sft1")
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the process was killed here
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]

    writer = MetricsWriter(path, after_step=3)
    writer.write(4, {"loss": 0.25})
    writer.close()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["stage"] == "sft1" and lines[0]["loss"] == 1.0 and lines[0]["time"] > 1e9
    assert "stage" not in lines[3]


def test_unknown_names_and_values_that_are_not_finite_are_refused(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(KeyError, match="metric 'los' has no definition"):
        writer.write(1, {"los": 1.0})
    with pytest.raises(ValueError, match="metric 'loss' is nan at step 2"):
        writer.write(2, {"loss": float("nan")})
    writer.close()
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_a_line_that_is_no_metric_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    for line, message in (("hello", "m.jsonl:2 is damaged"), ('{"loss": 1}', "m.jsonl:2 has no step")):
        path.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(ValueError, match=message):
            read_metrics(path)
