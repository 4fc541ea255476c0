"""The HTTP contract, against the real server in its own process."""

import asyncio
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from north_jax.sampler.client import SamplerClient, SamplerError, SamplerUnavailable
from north_jax.sampler.process import SamplerProcess
from north_jax.weights import hf

ROOT = pathlib.Path(__file__).parents[2]
SLOTS, CONTEXT, EOS, VOCAB = 4, 64, 3, 97
LONG = {"max_new_tokens": CONTEXT, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, make_model):
    root = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        hf.save(root / f"v{seed}", make_model(seed), version=f"v{seed}", step=seed)
    return root


@pytest.fixture(scope="module")
def process(folders, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sampler")
    with SamplerProcess(folders / "v0", workdir, slots=SLOTS, context=CONTEXT) as process:
        yield process


@pytest.fixture
def server(process, folders):
    """The URL of the server, alive and back at its first weights."""
    process.checkpoint = folders / "v0"
    process.ensure_alive()
    ask(process.url, "/continue_generation", {})
    ask(process.url, "/abort_request", {"abort_all": True})
    assert ask(process.url, "/update_weights_from_disk", {"model_path": str(folders / "v0")})[0] == 200
    return process.url


def ask(url, path, body=None, timeout_s=60):
    """(status, parsed answer)."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=timeout_s) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def generate(url, **body):
    return ask(url, "/generate", body)


def in_background(url, **body):
    """Start a /generate; the returned function waits for its answer."""
    box = []
    thread = threading.Thread(target=lambda: box.append(generate(url, **body)))
    thread.start()

    def join():
        thread.join(60)
        return box[0]

    return join


def client_of(url, **changes):
    return SamplerClient(url, **{"vocab_size": VOCAB, "context": CONTEXT, "timeout_s": 60.0} | changes)


def test_generate_answers_as_sglang(server):
    params = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
    status, answer = generate(server, input_ids=[5, 6, 7], sampling_params=params, rid="r1", return_logprob=True)
    assert status == 200
    assert set(answer) == {"output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    triples = meta.pop("output_token_logprobs")
    assert [triple[1:] for triple in triples] == [[i, None] for i in answer["output_ids"]]
    assert all(-50 < triple[0] <= 0 for triple in triples)
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 6},
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "cached_tokens": 0,
        "weight_version": "v0",
        "weight_versions": [{"version": "v0", "start": 0, "end": 6}],
        "output_token_logprobs_length": 6,
        "num_retractions": 0,
    }


def test_batches_and_n_are_lists(server):
    params = {"max_new_tokens": 5, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    _, batch = generate(server, input_ids=[[5, 6], [7]], sampling_params=params, rid=["a", "b"])
    assert [a["meta_info"]["id"] for a in batch] == ["a", "b"]
    assert [a["meta_info"]["prompt_tokens"] for a in batch] == [2, 1]
    _, several = generate(server, input_ids=[5, 6], sampling_params=params | {"n": 3})
    assert len({tuple(a["output_ids"]) for a in several}) == 3
    _, single = generate(server, input_ids=[5, 6], sampling_params=params)
    assert single["output_ids"] == several[0]["output_ids"] == batch[0]["output_ids"]
    _, mixed = generate(server, input_ids=[[5], [6]], sampling_params=[LONG, params])
    assert [a["meta_info"]["completion_tokens"] for a in mixed] == [CONTEXT - 1, 5]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "input_ids is missing"),
        ({"text": "hello"}, "no tokenizer, so the sampler takes input_ids only"),
        ({"text": "hello", "input_ids": [5]}, "either text or input_ids"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [5] * CONTEXT}, "64 tokens leaves no room in the context of 64"),
        ({"input_ids": [5, VOCAB]}, "token id 97 in input_ids is outside the vocabulary of 97"),
        ({"input_ids": [[5], [VOCAB]]}, "token id 97"),
        ({"input_ids": [5], "stream": 1}, "stream must be true or false"),
        ({"input_ids": [5], "sampling_params": {"stop": "x"}}, "stop strings need a tokenizer"),
        ({"input_ids": [5], "logprob_start_len": 0}, "logprob_start_len=0 is not implemented"),
        ({"input_ids": [5], "top_logprobs_num": 2}, "top_logprobs_num=2 is not implemented"),
        ({"input_ids": [5], "colour": 1}, "colour is not a field"),
        ({"input_ids": [5], "sampling_params": {"temprature": 1}}, "sampling_params.temprature is not a field"),
        ({"input_ids": [5], "sampling_params": {"regex": "a"}}, "sampling_params.regex='a' is not implemented"),
        ({"input_ids": [5], "rid": 4}, "rid must be text"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "have one rid"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "2 prompts with 1 sampling_params and 2 rids"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(server, body, sentence):
    status, answer = generate(server, **body)
    assert status == 400
    assert sentence in answer["error"]["message"]
    assert ask(server, "/ready")[0] == 200


def test_checksums_are_those_of_the_manifest_that_is_served(server, folders, tmp_path, make_model):
    def of(folder):
        return json.loads((folder / "north_manifest.json").read_text())["checksums"]

    _, answer = ask(server, "/weights_checker", {"action": "checksum"})
    assert (answer["success"], answer["weight_version"]) == (True, "v0")
    assert answer["checksums"] == of(folders / "v0") != of(folders / "v1")
    # It is the engine's weights that are summed, not the folder's: this one is gone by then.
    gone = tmp_path / "gone"
    shutil.copytree(folders / "v1", gone)
    ask(server, "/update_weights_from_disk", {"model_path": str(gone), "weight_version": "n"})
    shutil.rmtree(gone)
    _, answer = ask(server, "/weights_checker", {"action": "checksum"})
    assert (answer["checksums"], answer["weight_version"]) == (of(folders / "v1"), "n")
    for body in ({}, {"action": "snapshot"}, {"action": "checksum", "colour": 1}):
        assert ask(server, "/weights_checker", body)[0] == 400


def test_without_a_tokenizer_chats_are_refused_by_name(server):
    status, answer = ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert status == 400 and "no tokenizer" in answer["error"]["message"]
    assert ask(server, "/v1/models")[1]["data"][0]["id"] == "v0"


def test_information(server, process, folders):
    assert ask(server, "/health")[0] == 200
    status, info = ask(server, "/model_info")
    assert (status, info["weight_version"], info["model_path"]) == (200, "v0", str(folders / "v0"))
    _, before = ask(server, "/server_info")
    generate(server, input_ids=[5], sampling_params=LONG)
    _, after = ask(server, "/server_info")
    assert after["generated_tokens"] - before["generated_tokens"] == CONTEXT - 1
    assert after["compilations"] == before["compilations"]
    assert (after["queue_length"], after["running"], after["max_running_requests"]) == (0, 0, SLOTS)


def test_update_weights(server, folders):
    _, old = generate(server, input_ids=[5, 6], sampling_params=LONG)
    body = {"model_path": str(folders / "v1"), "weight_version": "seventeen"}
    assert ask(server, "/update_weights_from_disk", body)[0] == 200
    info = ask(server, "/model_info")[1]
    assert (info["weight_version"], info["model_path"]) == ("seventeen", str(folders / "v1"))
    _, new = generate(server, input_ids=[5, 6], sampling_params=LONG)
    assert new["output_ids"] != old["output_ids"]
    assert new["meta_info"]["weight_versions"] == [{"version": "seventeen", "start": 0, "end": CONTEXT - 2}]
    assert ask(server, "/update_weights_from_disk", {"model_path": str(folders / "v0")})[0] == 200
    assert ask(server, "/model_info")[1]["weight_version"] == "v0"
    assert generate(server, input_ids=[5, 6], sampling_params=LONG)[1]["output_ids"] == old["output_ids"]


def test_a_bad_folder_leaves_the_weights_alone(server, folders, tmp_path, tiny_config):
    broken = tmp_path / "broken"
    shutil.copytree(folders / "v1", broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    other = tmp_path / "other"
    shutil.copytree(folders / "v1", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    (other / "north_manifest.json").unlink()
    for path, sentence in (
        (tmp_path / "missing", "does not exist"),
        (broken, "truncated or damaged"),
        (other, "another model configuration"),
    ):
        status, answer = ask(server, "/update_weights_from_disk", {"model_path": str(path), "weight_version": "x"})
        assert (status, answer["success"]) == (400, False)
        assert sentence in answer["message"]
    status, answer = ask(server, "/update_weights_from_disk", {"model_path": "a", "load_format": "dummy"})
    assert (status, answer["error"]["message"]) == (
        400,
        "load_format='dummy' is not implemented by this sampler; leave it out",
    )
    info = ask(server, "/model_info")[1]
    assert (info["weight_version"], info["model_path"]) == ("v0", str(folders / "v0"))


def test_update_while_paused_splits_the_versions(server, folders):
    ask(server, "/pause_generation", {"mode": "in_place"})
    waiting = in_background(server, input_ids=[5, 6, 7], sampling_params=LONG)
    body = {"model_path": str(folders / "v1"), "weight_version": "new", "flush_cache": True}
    assert ask(server, "/update_weights_from_disk", body)[0] == 200
    assert ask(server, "/continue_generation", {})[0] == 200
    status, answer = waiting()
    assert status == 200
    spans = answer["meta_info"]["weight_versions"]
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == CONTEXT - 3
    assert spans[-1]["version"] == "new"


def test_pause_modes_and_flush(server):
    status, answer = ask(server, "/pause_generation", {"mode": "gently"})
    assert status == 400
    assert "pause mode 'gently' is not known" in answer["error"]["message"]
    assert ask(server, "/pause_generation", {"mode": "retract"})[1]["status"] == "ok"
    assert ask(server, "/flush_cache")[0] == 200
    assert ask(server, "/continue_generation", {})[1]["status"] == "ok"


def test_abort_answers_200_with_type_abort(server):
    ask(server, "/pause_generation", {"mode": "in_place"})
    waiting = in_background(server, input_ids=[5], sampling_params=LONG, rid="gone")
    while not ask(server, "/server_info")[1]["queue_length"]:
        time.sleep(0.01)
    assert ask(server, "/abort_request", {"rid": "gone"})[0] == 200
    status, answer = waiting()
    assert status == 200
    finish = answer["meta_info"]["finish_reason"]
    assert finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert ask(server, "/abort_request", {})[0] == 400


def test_a_lost_connection_ends_its_request_and_a_retry_joins_it(server):
    ask(server, "/pause_generation", {"mode": "in_place"})
    body = json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 9}, "rid": "twice"}).encode()
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(urllib.request.Request(server + "/generate", data=body), timeout=0.3)
    while ask(server, "/server_info")[1]["queue_length"]:
        time.sleep(0.01)
    request = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}, "rid": "twice"}
    both = [in_background(server, **request) for _ in range(2)]
    time.sleep(0.3)
    assert ask(server, "/server_info")[1]["queue_length"] == 1
    status, answer = generate(server, input_ids=[8], rid="twice")
    assert status == 400
    assert "belongs to another request" in answer["error"]["message"]
    ask(server, "/continue_generation", {})
    first, second = (join()[1] for join in both)
    assert first == second  # even without a seed


# --- the client, against the same server ---


def test_client_generates(server):
    async def run():
        async with client_of(server) as client:
            assert await client.health()
            options = {"temperature": 1.0, "max_new_tokens": 20, "seed": 4, "stop_ids": (EOS,)}
            jobs = [client.generate([5, 6, i], **options) for i in range(10, 30)]
            results = await asyncio.gather(*jobs)
            again = await client.generate([5, 6, 10], **options)
            return results, again

    results, again = asyncio.run(run())
    assert again.ids == results[0].ids
    for result in results:
        assert len(result.ids) == len(result.logprobs) <= 20
        assert result.versions == [(0, len(result.ids), "v0")]
        assert (result.finish_reason == "stop") == (result.ids[-1] == EOS)
        assert all(math.isfinite(p) and p <= 1e-3 for p in result.logprobs)


def test_client_updates_weights_and_reports_refusals(server, folders, tmp_path):
    async def run():
        async with client_of(server) as client:
            await client.update_weights(folders / "v1", 12)
            result = await client.generate([5], temperature=0.0, max_new_tokens=3)
            assert {version for *_, version in result.versions} == {"12"}
            with pytest.raises(SamplerError, match=r"answered 400: .*does not exist"):
                await client.update_weights(tmp_path / "none", 13)
            with pytest.raises(SamplerError, match=r"answered 400: .*temperature"):
                await client.generate([5], temperature=-1.0, max_new_tokens=3)
            assert (await client.model_info())["weight_version"] == "12"

    asyncio.run(run())


def test_client_deadline_aborts_the_request(server):
    async def run():
        async with client_of(server) as client:
            await client.pause("in_place")
            with pytest.raises(SamplerUnavailable, match=r"gave no answer within 0.5 s"):
                await client.generate([5], temperature=0.0, max_new_tokens=3, timeout_s=0.5)
            await client.resume()
            while (await client.server_info())["running"] + (await client.server_info())["queue_length"]:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_client_refuses_weights_that_are_not_numbers(server, folders, tmp_path, make_model):
    model = make_model(0)
    model.norm.scale_D[...] = model.norm.scale_D[...] * float("nan")
    hf.save(tmp_path / "nan", model, version="nan", step=0)

    async def run():
        async with client_of(server) as client:
            await client.update_weights(tmp_path / "nan", "nan")
            with pytest.raises(SamplerError, match="log-probability None of output token 0 is not one"):
                await client.generate([5], temperature=1.0, max_new_tokens=3)

    asyncio.run(run())


# --- the process ---


def test_a_killed_server_comes_back_with_the_latest_weights_and_requests_survive(server, process, folders):
    starts = process.starts
    process.checkpoint = folders / "v1"

    async def run():
        async with client_of(server) as client:
            await client.pause("in_place")
            request = asyncio.ensure_future(client.generate([5, 6], temperature=0.0, max_new_tokens=8))
            await asyncio.sleep(0.2)
            os.kill(process.pid, signal.SIGKILL)
            while process.alive:
                await asyncio.sleep(0.01)
            assert not await client.health()
            assert await asyncio.to_thread(process.ensure_alive) is True
            return await request

    result = asyncio.run(run())
    assert result.versions == [(0, 8, "v1")]
    assert process.starts == starts + 1
    assert process.ensure_alive() is False


def start_by_hand(*arguments):
    command = [sys.executable, "-m", "north_jax.sampler.server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_port_in_use_is_one_sentence(folders):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = start_by_hand(f"--checkpoint={folders / 'v0'}", f"--port={port}")
        assert done.returncode == 1
        assert done.stderr == (
            f"sampler: cannot listen on port {port} of 127.0.0.1 (Address already in use);"
            " choose another with --port, or stop what holds it\n"
        )


def test_a_missing_checkpoint_is_one_sentence_and_the_process_reports_it(tmp_path):
    process = SamplerProcess(tmp_path / "none", tmp_path, slots=2, context=32)
    with pytest.raises(RuntimeError, match=r"ended with status 1; .*sampler.log ends with: sampler: .*does not exist"):
        process.start()
    assert not process.alive


def test_the_server_ends_with_its_parent(folders, tmp_path):
    """The parent is killed, so nothing of it can clean up."""
    script = (
        "import sys, time; from north_jax.sampler.process import SamplerProcess\n"
        f"p = SamplerProcess({str(folders / 'v0')!r}, {str(tmp_path)!r}, slots=1, context=16)\n"
        "import threading; threading.Thread(target=p.start, daemon=True).start()\n"
        "while p.pid is None: time.sleep(0.01)\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(1.0)
        parent.kill()
    deadline = time.monotonic() + 30
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_serve_job_answers_a_chat_and_drains(untrained, tmp_path):
    """The README's command: real weights, real template; a signal lets the running request finish."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"checkpoint": untrained, "port": port, "slots": 2, "context": 99999, "drain_s": 60.0}
    command = [sys.executable, "-m", "north_jax.main", "--config=configs/serve.py"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as server:
        try:
            said = ""
            while "OPENAI_BASE_URL" not in said:
                line = server.stdout.readline()
                assert line, said
                said += line
            url = f"http://127.0.0.1:{port}"
            assert f"curl {url}/v1/chat/completions" in said and "slots of 512 tokens" in said
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "seed": 1}
            status, answer = ask(url, "/v1/chat/completions", body)
            assert status == 200
            box = []
            thread = threading.Thread(target=lambda: box.append(ask(url, "/v1/chat/completions", body)))
            thread.start()
            while not ask(url, "/server_info")[1]["open_requests"]:
                time.sleep(0.005)
            server.send_signal(signal.SIGTERM)
            thread.join(60)
            status, again = box[0]
            assert status == 200 and again["choices"] == answer["choices"]
            assert server.wait(30) == 0
        finally:
            server.kill()
