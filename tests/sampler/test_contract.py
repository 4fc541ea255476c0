"""What the embedded server and SGLang's have in common on the wire; `docs/sampler.md` lists where they differ."""

import base64
import itertools
import json
import threading
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

EOS, VOCAB, WINDOW = 3, 97, 24
META = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "e2e_latency",
    "num_retractions",
}


@pytest.fixture
def ask(servers):
    """(status, answer) of a request to the first server; the answer is JSON where it is sent as such."""

    def ask(path, body=None, raw=None):
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(servers[0].url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    return ask


@pytest.fixture
def generate(ask):
    def generate(ids, **params):
        body = {"input_ids": ids, "sampling_params": {"temperature": 0.0, **params}, "return_logprob": True}
        status, answer = ask("/generate", body)
        assert status == 200, answer
        return answer

    return generate


@pytest.fixture(scope="module")
def forward():
    run = nnx.jit(lambda model, ids_BS: model(ids_BS))

    def logits(model, tokens):
        ids_BS = np.zeros((1, 120), np.int32)
        ids_BS[0, : len(tokens)] = tokens
        return run(model, jnp.asarray(ids_BS))[0, : len(tokens)]

    return logits


def prompt(length):
    return [4 + (7 * i + length) % (VOCAB - 4) for i in range(length)]


def drawn(answer):
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("length", [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 60, 90])
def test_greedy_tokens_logprobs_and_experts_are_those_of_the_decoder(ask, model, forward, length):
    ids = prompt(length)
    params = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "return_routed_experts": True}
    status, answer = ask("/generate", body)
    assert status == 200 and drawn(answer) == answer["output_ids"]
    tokens = ids + answer["output_ids"]
    logp = np.asarray(jax.nn.log_softmax(forward(model, tokens)))[length - 1 : -1]
    assert answer["output_ids"] == logp.argmax(axis=1).tolist()
    found = [p for p, *_ in answer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(found, logp.max(axis=1), atol=1e-5)
    trace = {}
    model.hidden(jnp.asarray([tokens[:-1]]), trace=trace)
    experts = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    experts = experts.reshape(len(tokens) - 1, model.config.num_hidden_layers, model.config.num_experts_per_tok)
    for layer in range(model.config.num_hidden_layers):
        chosen = trace.get(f"layer{layer}/router_topk_indices", [np.zeros_like(experts[:, layer])])
        np.testing.assert_array_equal(experts[:, layer], chosen[0])


def test_logprobs_are_of_the_tempered_distribution_before_truncation(generate, model, forward):
    ids = prompt(12)
    answer = generate(ids, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01, max_new_tokens=12, ignore_eos=True)
    logp = np.asarray(jax.nn.log_softmax(forward(model, ids + answer["output_ids"]) / 0.5))
    for at, (logprob, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        row = logp[len(ids) - 1 + at]
        assert abs(logprob - row[token]) < 1e-5
        assert (row > row[token]).sum() < 3  # one of the three likeliest


def test_the_fields_of_an_answer(ask):
    status, answer = ask("/generate", {"input_ids": prompt(5), "rid": "mine", "sampling_params": {"max_new_tokens": 4}})
    meta = answer["meta_info"]
    assert status == 200 and set(answer) >= {"output_ids", "meta_info"} and set(meta) >= META
    assert "output_token_logprobs" not in meta
    assert (meta["id"], meta["prompt_tokens"], meta["num_retractions"]) == ("mine", 5, 0)
    assert meta["completion_tokens"] == len(answer["output_ids"]) <= 4
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": len(answer["output_ids"])}]
    assert meta["weight_version"] == "v0"


def test_stop_ids_are_part_of_the_completion_and_of_its_reason(generate):
    free = generate(prompt(9), max_new_tokens=10, ignore_eos=True)
    assert free["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    stop = free["output_ids"][4]
    at = free["output_ids"].index(stop)
    cut = generate(prompt(9), max_new_tokens=10, stop_token_ids=[stop])
    assert cut["output_ids"] == free["output_ids"][: at + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    both = generate(prompt(9), max_new_tokens=10, stop_token_ids=[stop], ignore_eos=True)
    assert both["output_ids"] == free["output_ids"]


def test_batches_and_several_completions_are_lists(ask):
    params = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    status, answers = ask("/generate", {"input_ids": [prompt(4), prompt(9)], "sampling_params": params})
    assert status == 200 and [a["meta_info"]["prompt_tokens"] for a in answers] == [4, 9]
    status, answers = ask("/generate", {"input_ids": prompt(4), "sampling_params": params | {"n": 2}})
    assert status == 200 and len(answers) == 2 and answers[0]["output_ids"] == answers[1]["output_ids"]


def test_a_stream_is_cumulative_and_ends_with_done(servers):
    params = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
    body = {"input_ids": prompt(6), "sampling_params": params, "return_logprob": True, "stream": True}
    request = urllib.request.Request(
        f"{servers[0].url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    for before, after in itertools.pairwise(parts):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert len(parts[-1]["output_ids"]) == 30 and drawn(parts[-1]) == parts[-1]["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_prefix_is_found_again(generate):
    ids = prompt(80)
    generate(ids, max_new_tokens=2)
    assert generate(ids, max_new_tokens=2)["meta_info"]["cached_tokens"] >= 64


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {}},
        {"input_ids": [5], "sampling_params": {"temprature": 1.0}},
        {"input_ids": [5], "sampling_params": {"temperature": -1.0}},
        {"input_ids": [5], "sampling_params": {"top_p": 1.5}},
        {"input_ids": [5] * 500},
    ],
)
def test_bad_requests_are_400_and_harm_nobody(ask, generate, body):
    assert ask("/generate", body)[0] == 400
    assert len(generate(prompt(5), max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3


def test_broken_json_is_400(ask):
    assert ask("/generate", raw=b'{"input_ids": [1, 2')[0] == 400


def test_health_and_what_is_served(ask, servers):
    assert ask("/ready")[0] == ask("/health")[0] == 200
    status, info = ask("/model_info")
    assert status == 200 and info["weight_version"] == "v0" and info["is_generation"] is True
    assert info["architectures"] == ["Cohere2MoeForCausalLM"]
    assert ask("/server_info")[0] == 200
    assert ask("/flush_cache", {})[0] == 200
    assert ask("/nowhere")[0] == 404


def running(generate, attempt):
    """A request that is being drawn, as (thread, result): in some attempt, as nobody knows how fast the server is."""
    result = []
    job = {"max_new_tokens": 100, "ignore_eos": True}
    thread = threading.Thread(target=lambda: result.append(generate(prompt(8), **job)))
    thread.start()
    time.sleep(0.001 * (attempt % 40))
    return thread, result


def test_a_pause_that_retracts_lets_a_request_go_on_under_new_weights(
    ask, generate, versions, model, make_model, forward
):
    for attempt in range(120):  # until the pause meets it in the middle
        thread, result = running(generate, attempt)
        assert ask("/pause_generation", {"mode": "retract"})[0] == 200
        body = {"model_path": str(versions / "v1"), "weight_version": "v1"}
        status, answer = ask("/update_weights_from_disk", body)
        assert status == 200 and answer["success"] is True
        assert ask("/continue_generation", {})[0] == 200
        thread.join()
        (answer,) = result
        spans = answer["meta_info"]["weight_versions"]
        if len(spans) == 2:
            break
        ask("/pause_generation", {"mode": "retract"})
        ask("/update_weights_from_disk", {"model_path": str(versions / "v0"), "weight_version": "v0"})
        ask("/continue_generation", {})
    assert [span["version"] for span in spans] == ["v0", "v1"]
    cut = spans[1]["start"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, cut, 100)
    assert answer["meta_info"]["num_retractions"] >= 1
    tokens = prompt(8) + answer["output_ids"]
    for weights, own in ((model, slice(0, cut)), (make_model(1), slice(cut, 100))):
        logp = np.asarray(jax.nn.log_softmax(forward(weights, tokens)))[7:-1]
        found = np.array([p for p, *_ in answer["meta_info"]["output_token_logprobs"]])
        np.testing.assert_allclose(found[own], logp[np.arange(100), answer["output_ids"]][own], atol=2e-5)


@pytest.mark.parametrize("how", ["pause", "abort_all"])
def test_an_aborted_request_answers_with_what_it_has(ask, generate, how):
    for attempt in range(120):
        thread, result = running(generate, attempt)
        if how == "pause":
            assert ask("/pause_generation", {"mode": "abort"})[0] == 200
            assert ask("/continue_generation", {})[0] == 200
        else:
            assert ask("/abort_request", {"abort_all": True})[0] == 200
        thread.join()
        (answer,) = result
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            break
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(drawn(answer)) < 100


def test_weights_that_cannot_be_loaded_leave_the_old_ones(ask, generate, tmp_path):
    before = generate(prompt(9), max_new_tokens=8)
    status, answer = ask("/update_weights_from_disk", {"model_path": str(tmp_path / "none"), "weight_version": "v9"})
    assert status == 400 and answer["success"] is False and answer["message"]
    assert ask("/model_info")[1]["weight_version"] == "v0"
    assert generate(prompt(9), max_new_tokens=8)["output_ids"] == before["output_ids"]


def test_checksums_follow_the_weights(ask, versions):
    first = ask("/weights_checker", {"action": "checksum"})
    assert first[0] == 200 and first[1]["success"] is True
    ask("/update_weights_from_disk", {"model_path": str(versions / "v1"), "weight_version": "v1"})
    assert ask("/weights_checker", {"action": "checksum"}) != first
    ask("/update_weights_from_disk", {"model_path": str(versions / "v0"), "weight_version": "v0"})
    assert ask("/weights_checker", {"action": "checksum"}) == first
