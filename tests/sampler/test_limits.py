"""Text and streams on /generate; limits, API keys, draining, metrics. The tokens are scripted: scripted_engine.py."""

import base64
import http.client
import itertools
import json
import threading
import time

import numpy as np
from scripted_engine import ScriptedEngine, ask, events, serving, turn

from north_jax.weights import hf

CONTEXT = 4096
HELLO = [{"role": "user", "content": "Hello"}]


def native(url, **body):
    status, answer, _ = ask(url, "/generate", body)
    assert status == 200, answer
    return answer


def test_text_in_and_out(url, script, chat, engine):
    t = chat.tokenizer
    script.reply = [*t.encode("word é stop rest"), t.end_text, t.end_of_turn]
    answer = native(url, text="<|START_TEXT|>hey", return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == engine.requests[-1][0] == [t.start_text, *t.encode("hey")]
    # As SGLang: the matched stop token is trimmed from the text, plain added tokens are not special.
    assert answer["text"] == "word é stop rest<|END_TEXT|>"
    assert answer["output_ids"] == script.reply
    raw = {"no_stop_trim": True, "skip_special_tokens": False}
    assert native(url, text="x", sampling_params=raw)["text"].endswith("<|END_TEXT|><|END_OF_TURN_TOKEN|>")
    assert native(url, text="x", sampling_params={"no_stop_trim": True})["text"].endswith("rest<|END_TEXT|>")
    stopped = native(url, text="x", sampling_params={"stop": "stop"}, return_logprob=True)
    assert stopped["text"] == "word é " and t.decode(stopped["output_ids"]) == "word é stop"
    meta = stopped["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": "stop"}
    assert len(meta["output_token_logprobs"]) == len(stopped["output_ids"]) == meta["weight_versions"][-1]["end"]
    kept = native(url, text="x", sampling_params={"stop": ["stop"], "no_stop_trim": True})
    assert kept["text"] == "word é stop"
    batch = native(url, text=["a", "b"])
    assert [a["text"] for a in batch] == [answer["text"]] * 2


def test_native_streams_are_cumulative(url, script, chat):
    t = chat.tokenizer
    script.reply = [*t.encode("cut 日本 into pieces and stop here"), t.end_of_turn]
    whole = native(url, input_ids=[5], return_logprob=True)
    got = events(url, "/generate", {"input_ids": [5], "return_logprob": True})
    assert len(got) > 3
    for before, after in itertools.pairwise(got):
        assert after["text"].startswith(before["text"]) and "\ufffd" not in before["text"]
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert len(before["meta_info"]["output_token_logprobs"]) == len(before["output_ids"])
    for answer in (got[-1], whole):
        del answer["meta_info"]["e2e_latency"], answer["meta_info"]["id"]
    assert got[-1] == whole
    several = events(url, "/generate", {"input_ids": [[5], [6]], "sampling_params": {"stop": "stop"}})
    for index in (0, 1):
        texts = [e["text"] for e in several if e["index"] == index]
        assert texts[-1] == "cut 日本 into pieces and " and all(texts[-1].startswith(text) for text in texts)


def test_routed_experts_are_passed_through(url, script, chat, engine, monkeypatch):
    script.reply = [7, 8, chat.tokenizer.end_of_turn]
    for start in (0, 2):
        body = {"input_ids": [5, 6], "return_routed_experts": True, "routed_experts_start_len": start}
        meta = native(url, **body)["meta_info"]
        experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 2, 1)
        assert experts.tolist() == np.arange(8).reshape(4, 2, 1)[start:].tolist()
    assert "routed_experts" not in native(url, input_ids=[5])["meta_info"]
    monkeypatch.setattr(engine, "experts", False)  # one that does not keep them
    status, answer, _ = ask(url, "/generate", {"input_ids": [5], "return_routed_experts": True})
    assert status == 400 and "return_routed_experts=True is not implemented" in answer["error"]["message"]


# --- limits ---


def test_bodies(url, script, chat):
    script.reply = turn(chat, content="ok")
    for path in ("/generate", "/v1/chat/completions"):
        for raw, sentence in ((b"{", "not JSON"), (b"[]", "must be a JSON object"), (b"\xff", "not JSON")):
            status, answer, _ = ask(url, path, raw=raw)
            assert status == 400 and sentence in answer["error"]["message"]
        status, answer, _ = ask(url, path, raw=b'{"a": ' + b"[" * 100_000)
        assert status == 400 and "not JSON" in answer["error"]["message"]
        status, answer, _ = ask(url, path, raw=b" " * (33 << 20))
        assert status == 413 and "larger than 32 MiB" in answer["error"]["message"]


def test_a_full_queue_answers_429(url, engine, script, chat):
    script.reply = turn(chat, content="ok")
    ask(url, "/pause_generation", {"mode": "in_place"})
    box = []
    waiting = [
        threading.Thread(target=lambda i=i: box.append(ask(url, "/generate", {"input_ids": [5, i]}))) for i in range(16)
    ]
    try:
        for thread in waiting:
            thread.start()
        while ask(url, "/server_info")[1]["open_requests"] < 16:  # 4 slots and a queue of 12
            time.sleep(0.01)
        status, answer, headers = ask(url, "/v1/chat/completions", {"messages": HELLO})
        assert (status, headers["retry-after"], answer["error"]["type"]) == (429, "1", "rate_limit_error")
        assert ask(url, "/generate", {"input_ids": [5]})[0] == 429
        status, answer, _ = ask(url, "/generate", {"input_ids": [[5]] * 17})
        assert status == 400 and "at most 16" in answer["error"]["message"]
    finally:
        ask(url, "/continue_generation", {})
        for thread in waiting:
            thread.join()
    assert [status for status, *_ in box] == [200] * 16
    assert ask(url, "/generate", {"input_ids": [5]})[0] == 200


def test_a_closed_stream_ends_its_request_unless_another_waits(url, script, chat):
    script.reply = [7] * 200 + [chat.tokenizer.end_of_turn]
    body = json.dumps({"input_ids": [5], "rid": "shared", "stream": True, "sampling_params": {"max_new_tokens": 500}})
    ask(url, "/pause_generation", {"mode": "in_place"})
    host = url.removeprefix("http://")
    try:
        connections = [http.client.HTTPConnection(host) for _ in range(2)]
        for connection in connections:
            connection.request("POST", "/generate", body)
            response = connection.getresponse()  # the head is sent at once
            assert response.status == 200
            if connection is connections[0]:
                first = response
            else:
                second = response
        assert ask(url, "/server_info")[1]["open_requests"] == 1
        first.close()
        connections[0].close()
        time.sleep(0.3)
        assert ask(url, "/server_info")[1]["open_requests"] == 1
        ask(url, "/continue_generation", {})
        assert json.loads(second.read().decode().split("\n\n")[-3].removeprefix("data: "))["output_ids"] == script.reply
        connections[1].close()
        ask(url, "/pause_generation", {"mode": "in_place"})
        connection = http.client.HTTPConnection(host)
        connection.request("POST", "/generate", body)
        response = connection.getresponse()
        response.close()
        connection.close()
        end = time.monotonic() + 5
        while ask(url, "/server_info")[1]["running"]:  # the engine has been told as well
            assert time.monotonic() < end
            time.sleep(0.01)
        assert ask(url, "/server_info")[1]["open_requests"] == 0
    finally:
        ask(url, "/continue_generation", {})


def test_api_key(untrained, chat, script):
    script.reply = turn(chat, content="ok")
    engine = ScriptedEngine(hf.load(untrained).config, script, context=CONTEXT)
    with serving(engine, untrained, tokenizer=chat.tokenizer, api_key="s3cret") as (url, _, _):
        assert ask(url, "/ready")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in ("/v1/chat/completions", "/generate", "/update_weights_from_disk"):
                status, answer, got = ask(url, path, {}, headers=headers)
                assert (status, got["www-authenticate"]) == (401, "Bearer")
                assert "API key" in answer["error"]["message"]
            assert ask(url, "/metrics", headers=headers)[0] == 401
        good = {"Authorization": "Bearer s3cret"}
        assert ask(url, "/v1/chat/completions", {"messages": HELLO}, headers=good)[0] == 200


def test_draining(untrained, chat, script):
    """The running request ends, a new one is refused; what outlasts the deadline is answered with what it has."""
    script.reply = [7] * 60 + [chat.tokenizer.end_of_turn]
    config = hf.load(untrained).config
    for drain_s, reason in ((10.0, "stop"), (0.3, "abort")):
        engine = ScriptedEngine(config, script, context=CONTEXT, chunk=1, pause_s=0.01 if reason == "stop" else 0.1)
        with serving(engine, untrained, tokenizer=chat.tokenizer, drain_s=drain_s) as (url, server, http):
            box = []
            thread = threading.Thread(target=lambda u=url, b=box: b.append(native(u, input_ids=[5])))
            thread.start()
            while not server.intake.tickets:
                time.sleep(0.005)
            time.sleep(0.25)
            http.handle_exit(15, None)
            while not server.intake.draining:
                time.sleep(0.005)
            for path, body in (("/generate", {"input_ids": [5]}), ("/v1/chat/completions", {"messages": HELLO})):
                status, answer, headers = ask(url, path, body)
                assert (status, headers["retry-after"]) == (503, "1") and "shutting down" in answer["error"]["message"]
            assert ask(url, "/ready")[0] == 503
            thread.join(10)
            assert box[0]["meta_info"]["finish_reason"]["type"] == reason
            assert 0 < len(box[0]["output_ids"]) <= len(script.reply)


def test_metrics(url, script, chat):
    script.reply = turn(chat, content="some words here")

    def read():
        status, text, headers = ask(url, "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert all(line.count(" ") >= 1 for line in lines)
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    events(url, "/generate", {"input_ids": [5, 6]})
    ask(url, "/generate", {})
    after = read()

    def more(name):
        return after["north_jax_" + name] - before.get("north_jax_" + name, 0)

    assert more('finished_total{reason="stop"}') == 1 and more('refused_total{status="400"}') == 1
    assert more("prompt_tokens_total") == 2
    assert more("time_to_first_token_seconds_count") == more("request_seconds_count") == 1
    # All but the first and the last chunk of 3: the first is the other histogram's, the last comes with the end.
    assert 0 < more("time_per_output_token_seconds_count") <= len(script.reply) - 3
    assert after['north_jax_request_seconds_bucket{le="+Inf"}'] == after["north_jax_request_seconds_count"]
    assert any(name.startswith('north_jax_info{weight_version="scripted"') for name in after)
    assert (after["north_jax_open_requests"], after["north_jax_running"]) == (0, 0)
