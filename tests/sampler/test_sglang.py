"""The real SGLang server with North's model, against our own decoder on the recorded reference model."""

import asyncio
import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from oracle import SEEDS, recording

from north_jax.sampler import process as process_module
from north_jax.sampler.client import SamplerClient
from north_jax.sampler.engine import Engine
from north_jax.sampler.process import SamplerProcess
from north_jax.sampler.sampling import Sampling
from north_jax.weights import hf, read_tensors

SEED = SEEDS[0]
CONTEXT, NEW = 128, 24
# Sequences here stay below 100 tokens: beyond, float32 sums in another order alone make single ones differ by 1.5e-5.
TOLERANCE = 1e-5
PYTHON = process_module.ROOT / ".venv-sglang" / "bin" / "python"
needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="SGLang's environment is not there; run make sglang")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model():
    return hf.load(SEED, moe="dense")


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with SamplerProcess(SEED, tmp_path_factory.mktemp("sglang"), kind="sglang", slots=8, context=CONTEXT) as process:
        yield process


@pytest.fixture
def url(process):
    """The server's URL; the test must leave it alive, with the weights it found."""
    yield process.url
    assert process.alive and process.starts == 1


def ask(url, path, body):
    """(status, parsed answer)."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def prompt(length, seed=0, vocab=512):
    return np.random.default_rng(seed).integers(4, vocab, length).tolist()


def generate(url, ids, new=NEW, **fields):
    params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
    status, answer = ask(
        url, "/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True} | fields
    )
    assert status == 200, answer
    return answer


@nnx.jit
def _forward(model, ids_BS):
    trace = {}
    x_BSD = model.hidden(ids_BS, trace=trace)
    return jax.nn.log_softmax(model.logits(x_BSD)), trace


def forward(model, ids):
    """Log-probabilities [S, V] of the next token after each of `ids`, and what the experts' routers chose."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(ids)] = ids
    logps, trace = _forward(model, jnp.asarray(padded))
    return np.asarray(logps)[0, : len(ids)], trace


def agrees(model, ids, answer):
    """The answer's log-probabilities (of the prompt too where it has them) and greedy tokens are the decoder's."""
    out, meta = answer["output_ids"], answer["meta_info"]
    logps_SV, _ = forward(model, ids + out)
    expected = logps_SV[np.arange(len(ids + out) - 1), (ids + out)[1:]]
    got = [logprob for logprob, *_ in meta.get("input_token_logprobs", ())[1:]]
    got += [logprob for logprob, *_ in meta["output_token_logprobs"]]
    assert len(got) >= len(out)
    np.testing.assert_allclose(got, expected[-len(got) :], atol=TOLERANCE, rtol=0)
    assert out == logps_SV[len(ids) - 1 : -1].argmax(-1).tolist()


def checksums(url):
    status, answer = ask(url, "/weights_checker", {"action": "checksum"})
    assert status == 200, answer
    return answer


def served(url):
    """All that an update which was refused must leave as it was."""
    with urllib.request.urlopen(url + "/model_info", timeout=60) as answer:
        info = json.loads(answer.read())
    greedy = generate(url, prompt(12))
    return checksums(url), info["weight_version"], greedy["output_ids"]


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@needs_sglang
@pytest.mark.parametrize("n", [2, 7, 8, 9, 24, 33, 64])
def test_log_probabilities_are_our_decoders(url, model, n):
    """Below, at and beyond the window of 8, which the output goes on to cross."""
    ids = prompt(n)
    answer = generate(url, ids, logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) == n
    agrees(model, ids, answer)


@needs_sglang
@pytest.mark.parametrize("n", [7, 8, 9, 24, 33])
def test_log_probabilities_are_the_references(url, n):
    arrays = recording(SEED)
    answer = generate(url, arrays[f"len{n}/input_ids"].tolist(), 1, logprob_start_len=0)
    got = [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]
    np.testing.assert_allclose(got, arrays[f"len{n}/token_logprobs"], atol=TOLERANCE, rtol=0)


@needs_sglang
def test_greedy_tokens_are_the_embedded_engines(url, model):
    engine = Engine(model, slots=2, context=CONTEXT, version="v0", eos_ids=())
    engine.start()
    try:
        for n in (5, 40):
            sampling = Sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True)
            assert generate(url, prompt(n), 40)["output_ids"] == engine.submit(f"{n}", prompt(n), sampling).result().ids
    finally:
        engine.stop()


@needs_sglang
def test_a_second_turn_on_cached_keys(url, model):
    """The sliding layers' own pool keeps only the window; what they read back must be that."""
    first = prompt(40, seed=5)
    ids = first + generate(url, first)["output_ids"] + prompt(9, seed=6)
    answer = generate(url, ids)
    assert answer["meta_info"]["cached_tokens"] >= len(first)
    agrees(model, ids, answer)


@needs_sglang
def test_keys_of_a_pool_that_was_used_up(url, model):
    """The two pools then hand out different places for one token; before, they happen to agree."""
    for round_ in range(5):
        many = [prompt(80, seed=100 + 8 * round_ + i) for i in range(8)]
        status, _ = ask(url, "/generate", {"input_ids": many, "sampling_params": {"max_new_tokens": 4}})
        assert status == 200
    for n in (7, 40):
        agrees(model, prompt(n, seed=7), generate(url, prompt(n, seed=7), logprob_start_len=0))


@needs_sglang
def test_requests_of_one_batch_do_not_meet(url, model):
    many = [prompt(n, seed=n) for n in (3, 8, 50, 17, 9, 60)]
    params = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    body = {"input_ids": many, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    status, answers = ask(url, "/generate", body)
    assert status == 200
    for ids, answer in zip(many, answers, strict=True):
        agrees(model, ids, answer)


@needs_sglang
def test_routed_experts_are_our_routers(url, model):
    ids = prompt(30, seed=1)
    answer = generate(url, ids, return_routed_experts=True)
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    seen = ids + answer["output_ids"][:-1]
    config = model.config
    chosen_SLK = flat.reshape(len(seen), config.num_hidden_layers, config.num_experts_per_tok)
    _, trace = forward(model, seen)
    for layer in range(config.num_hidden_layers):
        if config.is_dense(layer):
            assert not chosen_SLK[:, layer].any()
            continue
        expected_SK = np.asarray(trace[f"layer{layer}/router_topk_indices"])[0, : len(seen)]
        np.testing.assert_array_equal(np.sort(chosen_SLK[:, layer]), np.sort(expected_SK))


@needs_sglang
def test_the_whole_context_can_be_used(url):
    async def lengths():
        async with SamplerClient(url, vocab_size=512, context=CONTEXT) as client:
            for n in (1, CONTEXT - NEW, CONTEXT - 1):
                got = await client.generate(prompt(n), temperature=0.0, max_new_tokens=CONTEXT, stop_ids=())
                yield n + len(got.ids), got.finish_reason

    async def collect():
        return [pair async for pair in lengths()]

    ends = asyncio.run(collect())
    assert all(end == (CONTEXT, "length") or end[1] == "stop" for end in ends), ends
    assert ends[-1] == (CONTEXT, "length")


# -- weights -----------------------------------------------------------------------------------------------------------


def folder_of(path, change=None, config=None):
    """A folder with the recorded model's tensors, changed."""
    path.mkdir()
    tensors = dict(read_tensors(SEED))
    if change:
        change(tensors)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    raw = json.loads((SEED / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | (config or {})))
    return path


EXPERT = "model.layers.3.mlp.experts.5.up_proj.weight"


def missing(tensors):
    del tensors[EXPERT]


def misnamed(tensors):
    tensors[EXPERT.replace("experts.5", "experts.8")] = tensors.pop(EXPERT)


def misshaped(tensors):
    tensors[EXPERT] = tensors[EXPERT].T.copy()


def too_small(tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"][:-1]


def half(tensors):
    for name in list(tensors):
        if ".layers.4." in name:
            del tensors[name]


@needs_sglang
@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (missing, None, f"tensor {EXPERT} is missing"),
        (misnamed, None, EXPERT.replace("experts.5", "experts.8") + " is unknown"),
        (misnamed, None, f"tensor {EXPERT} is missing"),
        (misshaped, None, f"tensor {EXPERT} has shape [64, 16] instead of [16, 64]"),
        (too_small, None, "layers.0.self_attn.k_proj.weight has shape [31, 64] instead of [32, 64]"),
        (half, None, "and 27 more; nothing was loaded"),
        (None, {"rms_norm_eps": None}, "config.json says rms_norm_eps = None but the server was started with 1e-06"),
    ],
)
def test_a_folder_that_is_not_this_model_changes_nothing(url, tmp_path, change, config, says):
    wrong = folder_of(tmp_path / "wrong", lambda t: (scale(t), change and change(t)), config)
    before = served(url)
    body = {"model_path": str(wrong), "weight_version": "wrong"}
    status, answer = ask(url, "/update_weights_from_disk", body)
    assert status == 400 and answer["success"] is False
    assert says in answer["message"] and str(wrong) in answer["message"]
    assert served(url) == before


@needs_sglang
def test_a_torn_file_changes_nothing(url, tmp_path):
    torn = folder_of(tmp_path / "torn", scale) / "model.safetensors"
    os.truncate(torn, torn.stat().st_size - 100)
    before = served(url)
    status, answer = ask(url, "/update_weights_from_disk", {"model_path": str(torn.parent), "weight_version": "torn"})
    assert status == 400 and f"{torn} is damaged" in answer["message"]
    assert served(url) == before


def scale(tensors):
    """Other weights, of the same shapes."""
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = (tensor * 1.25).astype(tensor.dtype)


@needs_sglang
def test_new_weights_are_served_under_their_version(url, model, tmp_path):
    folder = folder_of(tmp_path / "new", scale)
    ids = prompt(20)
    before = served(url)
    try:
        status, _ = ask(url, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "new"})
        assert status == 200
        answer = generate(url, ids, logprob_start_len=0)
        assert answer["meta_info"]["weight_versions"] == [{"version": "new", "start": 0, "end": NEW}]
        agrees(hf.load(folder, moe="dense"), ids, answer)
        with pytest.raises(AssertionError):
            agrees(model, ids, answer)
    finally:
        ask(url, "/update_weights_from_disk", {"model_path": str(SEED), "weight_version": before[1]})
    assert served(url) == before


FROM_TENSORS = """
import base64, json, sys, urllib.error, urllib.request
import torch
from safetensors.torch import load_file
torch.multiprocessing.set_sharing_strategy("file_system")
sys.path.insert(0, sys.argv[3])
import launch  # what makes sglang importable here
from sglang.srt.utils import MultiprocessingSerializer

def ask(path, body):
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, data, kind), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

def send(tensors, version):
    serialized = MultiprocessingSerializer.serialize(list(tensors.items()), output_str=True)
    return ask("/update_weights_from_tensor", {"serialized_named_tensors": [serialized], "weight_version": version})

tensors = load_file(sys.argv[2])
norm, expert = "model.norm.weight", "model.layers.3.mlp.experts.5.up_proj.weight"
answers = [ask("/begin_weight_update", {})]
answers.append(send({norm: tensors[norm] / 2, "model.layers.9.input_layernorm.weight": tensors[norm]}, "a"))
answers.append(send({norm: tensors[norm] / 2, expert: tensors[expert].T.contiguous()}, "b"))
answers.append(ask("/weights_checker", {"action": "checksum"}))
answers.append(send({norm: tensors[norm] / 2}, "c"))
answers.append(ask("/end_weight_update", {}))
print(json.dumps(answers))
"""


@needs_sglang
def test_tensors_that_are_not_this_models_change_nothing(url, tmp_path):
    """Of one update from tensors, everything is checked before anything is copied; of the next one, all is taken."""
    before = served(url)
    launcher = pathlib.Path(process_module.__file__).with_name("sglang")
    command = [PYTHON, "-c", FROM_TENSORS, url, SEED / "model.safetensors", launcher]
    with (tmp_path / "log").open("wb") as log:  # torch leaves a helper behind for a while, which would hold a pipe open
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=200).returncode
    lines = (tmp_path / "log").read_text().splitlines()
    assert status == 0, lines[-5:]
    begun, unknown, wrong_shape, untouched, taken, ended = json.loads(lines[-1])
    try:
        assert begun[0] == taken[0] == ended[0] == 200
        assert unknown[0] == wrong_shape[0] == 400
        assert "tensor model.layers.9.input_layernorm.weight is unknown" in unknown[1]["message"]
        assert f"tensor {EXPERT} has shape [64, 16] instead of [16, 64]" in wrong_shape[1]["message"]
        assert untouched[1] == before[0]
        after = served(url)
        assert after[1] == "c" and after[0] != before[0]

        def halved(tensors):  # not doubled, which would double the rounding of the logits too
            tensors["model.norm.weight"] = tensors["model.norm.weight"] / 2

        answer = generate(url, prompt(20), logprob_start_len=0)
        agrees(hf.load(folder_of(tmp_path / "halved", halved), moe="dense"), prompt(20), answer)
    finally:
        ask(url, "/update_weights_from_disk", {"model_path": str(SEED), "weight_version": before[1]})
    assert served(url) == before


# -- starting and ending -----------------------------------------------------------------------------------------------


@needs_sglang
def test_a_folder_that_is_not_this_model_is_not_served(tmp_path):
    wrong = folder_of(tmp_path / "wrong", lambda tensors: (missing(tensors), too_small(tensors)))
    process = SamplerProcess(wrong, tmp_path, kind="sglang", slots=2, context=CONTEXT)
    with pytest.raises(RuntimeError, match=r"the sampler ended with status .*k_proj.* is missing; nothing was loaded"):
        process.start()
    assert not process.alive


@needs_sglang
def test_the_other_spelling_and_equations_and_a_parent_that_is_killed(tmp_path):
    """A server of the released spelling with LayerNorm and renormalised softmax routing; then it ends with its parent.

    The parent is killed, so nothing of it can clean up.
    """
    folder = folder_of(tmp_path / "other")
    raw = json.loads((SEED / "config.released_style.json").read_text())
    assert "first_k_dense_replace" in raw and "mlp_layer_types" not in raw and "rope_parameters" not in raw
    raw |= {"rms_norm_eps": None, "expert_selection_fn": "softmax", "norm_topk_prob": True}
    (folder / "config.json").write_text(json.dumps(raw))
    script = (
        "import sys, time; from north_jax.sampler.process import SamplerProcess\n"
        f"p = SamplerProcess({str(folder)!r}, {str(tmp_path)!r}, kind='sglang', slots=2, context={CONTEXT})\n"
        "p.start(); print(p.url, p.pid, flush=True); time.sleep(600)"
    )
    root = {**os.environ, "PYTHONPATH": str(process_module.ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=root) as parent:
        url, group = parent.stdout.readline().split()
        try:
            other = hf.load(folder, moe="dense")
            assert other.config.rms_norm_eps is None and other.config.norm_topk_prob
            for n in (6, 40):
                agrees(other, prompt(n), generate(url, prompt(n), logprob_start_len=0))
            assert len(running(group)) >= 3
        finally:
            parent.kill()
    deadline = time.monotonic() + 30
    while running(group):
        assert time.monotonic() < deadline, running(group)
        time.sleep(0.1)


def running(group):
    """The processes of the group that have not ended."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if its_group == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@needs_sglang
def test_it_is_started_again_with_the_present_checkpoint(process, model, tmp_path):
    """Last, because it is a new server that the tests before would find."""
    folder = folder_of(tmp_path / "next", scale)
    group = str(process.pid)
    process.checkpoint = folder
    os.kill(process.pid, 9)
    deadline = time.monotonic() + 30
    while process.alive or running(group):
        assert time.monotonic() < deadline, running(group)
        time.sleep(0.1)
    assert process.ensure_alive() and process.starts == 2
    answer = generate(process.url, prompt(20), logprob_start_len=0)
    agrees(hf.load(folder, moe="dense"), prompt(20), answer)


def test_a_missing_environment_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"\.venv-sglang/bin/python does not exist; run `make sglang`"):
        SamplerProcess(SEED, tmp_path, kind="sglang")


def test_a_context_beyond_the_models_positions_is_refused(tmp_path, monkeypatch):
    python = tmp_path / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(sys.executable, python)
    monkeypatch.setattr(process_module, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match=r"a context of 513 is longer than .*seed0's 512 positions"):
        SamplerProcess(SEED, tmp_path, kind="sglang", context=513).start()


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sampler kind 'vllm' is not known; use one of embedded, sglang"):
        SamplerProcess(SEED, tmp_path, kind="vllm")
