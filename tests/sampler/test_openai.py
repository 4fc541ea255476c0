"""The OpenAI endpoints. The tokens are scripted; see scripted_engine.py."""

import json
import os
import pathlib

import pytest
from scripted_engine import ScriptedEngine, ask, events, serving, turn

from north_jax.chat import PromptFormat
from north_jax.weights import hf

CONTEXT = 4096
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "Hello"}]
RECORDED = os.environ.get("NORTH_HARNESS_REQUESTS", "")  # recorded requests of real harnesses; not ours to hand on


def talk(url, **fields):
    status, answer, _ = ask(url, "/v1/chat/completions", {"messages": HELLO, **fields})
    assert status == 200, answer
    return answer


def put_together(chunks):
    """The message of a stream's deltas, and its finish reason."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    return message, reasons[0]


# --- chat ---


def test_text_with_reasoning(url, script, chat, engine):
    script.reply = turn(chat, thinking="hm", content="Good day.\n")
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        *HELLO,
    ]
    answer = talk(url, messages=messages, model="any", temperature=0.5, top_p=0.9, seed=7, max_tokens=50)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good day.\n", "reasoning_content": "hm"}
    assert (choice["finish_reason"], choice["logprobs"], answer["model"]) == ("stop", None, "any")
    prompt, sampling = engine.requests[-1]
    expected = [{"role": "system", "content": "a\nb"}, *HELLO]
    assert prompt == chat.render(expected, generation_prompt=True).ids
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_new_tokens) == (0.5, 0.9, 7, 50)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(script.reply))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    thought = script.reply.index(chat.tokenizer.end_thinking) + 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert answer["metadata"] == {"weight_versions": [{"version": "scripted", "start": 0, "end": len(script.reply)}]}


CALLS = [{"name": "bash", "arguments": {"command": 'echo "é日"\n'}}, {"name": "bash", "arguments": {}}]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_back(url, script, chat, engine, stream):
    script.reply = turn(chat, thinking="two", tool_calls=CALLS)
    body = {"messages": HELLO, "tools": [BASH], "tool_choice": "auto", "parallel_tool_calls": True}
    if stream:
        body |= {"stream_options": {"include_usage": True}}
        chunks = events(url, "/v1/chat/completions", body)
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(script.reply)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[0]["usage"] is None
        message, reason = put_together(chunks)
        calls = message["tool_calls"]
        pieces = [c for x in chunks for y in x["choices"] for c in y["delta"].get("tool_calls", ())]
        assert len(pieces) > 5  # names, and arguments in pieces
        history = [{"id": c["id"], "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls]
    else:
        (choice,) = talk(url, **body)["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        history = message["tool_calls"]
        calls = [{"id": call["id"], **call["function"]} for call in history]
    assert reason == "tool_calls" and message["reasoning_content"] == "two" and not message["content"]
    assert [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in calls] == CALLS
    assert len({call["id"] for call in calls}) == 2
    # What was answered comes back in the next request, and is the prefix that the engine has cached already.
    first = engine.requests[-1][0] + script.reply
    results = [{"role": "tool", "tool_call_id": calls[1]["id"], "content": "b", "cache_control": {"type": "ephemeral"}}]
    results = [{"role": "tool", "tool_call_id": calls[0]["id"], "content": [{"type": "text", "text": "a"}]}, *results]
    said = {"role": "assistant", "content": None, "reasoning_content": "two", "tool_calls": history}
    talk(url, messages=[*HELLO, said, *results], tools=[BASH])
    assert engine.requests[-1][0][: len(first)] == first


def test_one_call_only(url, script, chat):
    script.reply = turn(chat, tool_calls=CALLS)
    body = {"messages": HELLO, "tools": [BASH], "parallel_tool_calls": False}
    assert len(talk(url, **body)["choices"][0]["message"]["tool_calls"]) == 1
    assert len(put_together(events(url, "/v1/chat/completions", body))[0]["tool_calls"]) == 1


def test_calls_that_were_not_offered_are_shown_as_text(url, script, chat):
    script.reply = turn(chat, thinking="x", tool_calls=CALLS)
    for body in ({"messages": HELLO}, {"messages": HELLO, "tools": [BASH], "tool_choice": "none"}):
        (choice,) = talk(url, **body)["choices"]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        message, reason = put_together(events(url, "/v1/chat/completions", body))
        assert (message["content"], reason) == (choice["message"]["content"], "stop")
        assert message["content"].startswith('[\n    {"tool_call_id"') and choice["message"]["reasoning_content"] == "x"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bash"}}])
def test_forced_calls(url, script, chat, engine, untrained, choice):
    t, named = chat.tokenizer, choice != "required"
    rest = '"command": "ls"}}\n]' if named else 'bash", "parameters": {"command": "ls"}}\n]'
    script.reply = [*t.encode(rest), t.end_action, t.end_of_turn]
    body = {"messages": HELLO, "tools": [BASH], "tool_choice": choice}
    (whole,) = talk(url, **body)["choices"]
    assert engine.requests[-1][0][-3:] == PromptFormat(t).forced_call([], "bash" if named else None)[-3:]
    streamed, reason = put_together(events(url, "/v1/chat/completions", body))
    for call in (whole["message"]["tool_calls"][0]["function"], streamed["tool_calls"][0]):
        assert (call["name"], json.loads(call["arguments"])) == ("bash", {"command": "ls"})
    assert whole["finish_reason"] == reason == "tool_calls"


@pytest.mark.parametrize("cut", [3, 9, 30])
def test_truncated_and_broken_turns_lose_nothing(url, script, chat, cut):
    """Broken JSON, and every kind of unfinished block: the text of it is the content, streamed or whole."""
    t = chat.tokenizer
    for reply in (
        turn(chat, thinking="long thought", tool_calls=CALLS),
        turn(chat, thinking="", content="some words that go on and on"),
        [t.end_thinking, t.start_action, *t.encode("[{]"), t.end_action, t.end_of_turn],
    ):
        script.reply = reply
        body = {"messages": HELLO, "tools": [BASH], "max_tokens": cut}
        (choice,) = talk(url, **body)["choices"]
        streamed, reason = put_together(events(url, "/v1/chat/completions", body))
        assert reason == choice["finish_reason"] == ("stop" if len(reply) <= cut else "length")
        assert streamed["reasoning_content"] == (choice["message"]["reasoning_content"] or "")
        if not streamed["tool_calls"]:
            assert streamed["content"] == choice["message"]["content"]
        plain = t.decode([i for i in reply[:cut] if i not in t.marker_names])
        assert (choice["message"]["reasoning_content"] or "") + choice["message"]["content"] == plain


def test_stop_strings(url, script, chat, engine):
    script.reply = turn(chat, thinking="", content="one two STOP three four five six seven eight")
    for stop in ("STOP", ["nope", " STOP"]):
        body = {"messages": HELLO, "stop": stop, "return_token_ids": True}
        (choice,) = talk(url, **body)["choices"]
        kept = "one two " if stop == "STOP" else "one two"
        assert (choice["message"]["content"], choice["finish_reason"]) == (kept, "stop")
        assert chat.tokenizer.decode(choice["token_ids"]).endswith("STOP")  # the tokens of the stop string stay
        assert len(choice["token_ids"]) < len(script.reply)
        chunks = events(url, "/v1/chat/completions", body)
        assert put_together(chunks)[0]["content"] == kept
        assert [i for c in chunks for x in c["choices"] for i in x.get("token_ids", ())] == choice["token_ids"]


def test_exact_to_the_token(url, script, chat, engine):
    script.reply = turn(chat, thinking="é", content="日")
    body = {"messages": HELLO, "logprobs": True, "return_token_ids": True, "return_meta_info": True}
    answer = talk(url, **body)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == engine.requests[-1][0]
    assert choice["token_ids"] == choice["response_token_ids"] == script.reply
    assert [c["logprob"] for c in choice["logprobs"]["content"]] == [-0.25 * (i + 1) for i in range(len(script.reply))]
    spelt = b"".join(bytes(c["bytes"]) for c in choice["logprobs"]["content"])
    assert spelt == chat.tokenizer.decode_bytes(script.reply)
    meta = choice["meta_info"]
    assert [triple[1] for triple in meta["output_token_logprobs"]] == script.reply
    assert meta["finish_reason"] == {"type": "stop", "matched": chat.tokenizer.end_of_turn}
    chunks = events(url, "/v1/chat/completions", body)
    told = [c for x in chunks for y in x["choices"] for c in (y["logprobs"] or {"content": ()})["content"]]
    assert told == choice["logprobs"]["content"]
    assert chunks[0]["prompt_token_ids"] == engine.requests[-1][0]


def test_several_completions(url, script, chat):
    script.reply = turn(chat, thinking="", content="same")
    answer = talk(url, n=3)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 3 * len(script.reply)
    assert len(answer["metadata"]["weight_versions"]) == 3
    chunks = events(url, "/v1/chat/completions", {"messages": HELLO, "n": 3})
    for index in range(3):
        mine = [{"choices": [x for x in c["choices"] if x["index"] == index]} for c in chunks]
        assert put_together(mine)[0]["content"] == "same"


def test_reasoning_off(url, script, chat, engine):
    t = chat.tokenizer
    script.reply = [t.start_text, *t.encode("Yes."), t.end_text, t.end_of_turn]
    for more in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"reasoning": False}}):
        message = talk(url, **more)["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", None)
        assert engine.requests[-1][0][-1] == t.end_thinking


def test_text_beside_calls_becomes_reasoning(url, script, chat, engine):
    script.reply = turn(chat, content="ok")
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}
    talk(url, messages=[*HELLO, said, {"role": "tool", "tool_call_id": "1", "content": "x"}], tools=[BASH])
    assert "hm\nI look.<|END_THINKING|><|START_ACTION|>" in chat.tokenizer.decode(engine.requests[-1][0])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": "user"}]}, "message 0 (user) has the content None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "unknown key 'colour'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "answers no tool call"),
        ({"messages": [{"role": "user", "content": "word " * CONTEXT}]}, "leaves no room in the context of 4096"),
        ({"temperature": -1}, "request.temperature must be a number"),
        ({"max_tokens": 0}, "request.max_new_tokens must be a whole number from 1"),
        ({"n": 0}, "request.n must be"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"tools": [{"type": "web"}]}, "tools[0] must be"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "strict=True is not implemented",
        ),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [BASH], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "name one of the tools"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not implemented"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not implemented"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not implemented"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs must be 0"),
        ({"reasoning_effort": "some"}, "reasoning_effort must be one of"),
        ({"stop": [""]}, "stop takes up to"),
        ({"stop": 5}, "stop must be a string"),
        ({"colour": 1}, "colour is not a field"),
    ],
)
def test_refusals_are_openai_errors(url, script, fields, sentence):
    status, answer, _ = ask(url, "/v1/chat/completions", {"messages": HELLO, **fields})
    assert status == 400
    error = answer["error"]
    assert sentence in error["message"] and error["type"] == "invalid_request_error"
    assert error["code"] == ("context_length_exceeded" if "leaves no room" in sentence else None)


def test_harmless_fields_are_taken(url, script, chat):
    script.reply = turn(chat, content="ok")
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "presence_penalty": 0}
    harmless |= {"response_format": {"type": "text"}, "logit_bias": None, "prompt_cache_key": "k", "top_logprobs": None}
    assert talk(url, **harmless)["choices"][0]["message"]["content"] == "ok"


@pytest.mark.skipif(not RECORDED, reason="NORTH_HARNESS_REQUESTS names no folder of recorded harness requests")
@pytest.mark.parametrize(
    "name",
    (
        "mini-swe-agent_mini",
        "mini-swe-agent_textbased",
        "opencode_main",
        "opencode_max_steps",
        "opencode_permission_rejected",
        "sweagent_default",
        "terminus2_json",
        "terminus2_summarize",
    ),
)
def test_recorded_requests_of_real_harnesses(untrained, chat, name):
    """Each is answered, and its prompt holds all that was said."""
    reply, closed = turn(chat, thinking="so", content="done"), chat.tokenizer.end_thinking

    def script(prompt):
        return reply[reply.index(closed) + 1 :] if prompt[-1] == closed else reply

    engine = ScriptedEngine(hf.load(untrained).config, script, context=200_000, chunk=50)
    requests = [e["request"] for e in json.loads(pathlib.Path(RECORDED, f"{name}.json").read_text())["exchanges"]]
    with serving(engine, untrained, tokenizer=chat.tokenizer) as (url, _, _):
        for request in requests[:: max(1, len(requests) // 6)] + requests[-1:]:
            body = request.get("body", request)
            if body.get("stream"):
                message, reason = put_together(events(url, "/v1/chat/completions", body))
            else:
                status, answer, _ = ask(url, "/v1/chat/completions", body)
                assert status == 200, answer
                message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
            assert (message["content"], reason) == ("done", "stop")
            prompt = chat.tokenizer.decode(engine.requests[-1][0])
            for said in body["messages"]:
                content = said.get("content") or ""
                content = content if isinstance(content, str) else content[0]["text"]
                assert content in prompt or json.dumps(content, ensure_ascii=False)[1:-1] in prompt
            for tool in body.get("tools", ()):
                assert f'"name": "{tool["function"]["name"]}"' in prompt
            if body.get("return_token_ids"):
                assert answer["choices"][0]["token_ids"] == reply


# --- completions, models ---


def test_completions(url, script, chat, engine):
    t = chat.tokenizer
    script.reply = [*t.encode("a tail é"), t.end_of_turn]
    status, answer, _ = ask(url, "/v1/completions", {"prompt": "say <|END_TEXT|>", "max_tokens": 99, "logprobs": 0})
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a tail é", "stop")
    assert engine.requests[-1][0] == [*t.encode("say "), t.end_text]
    assert "".join(choice["logprobs"]["tokens"]).startswith("a tail")
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["text_offset"]) == len(script.reply)
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 99}
    _, several, _ = ask(url, "/v1/completions", body)
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 2
    chunks = events(url, "/v1/completions", {"prompt": [5, 6], "max_tokens": 99, "return_token_ids": True})
    assert "".join(c["choices"][0]["text"] for c in chunks) == "a tail é"
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == script.reply
    _, stopped, _ = ask(url, "/v1/completions", {"prompt": "x", "stop": ["tail"], "max_tokens": 99})
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("a ", "stop")
    ask(url, "/v1/completions", {"prompt": "x"})
    assert engine.requests[-1][1].max_new_tokens == 16
    for body, sentence in (
        ({"prompt": None}, "prompt must be text"),
        ({"prompt": [9999]}, "token id 9999"),
        ({"prompt": "x", "echo": True}, "echo=True is not implemented"),
        ({"prompt": "x", "logprobs": 5}, "logprobs must be 0 or 1"),
    ):
        status, answer, _ = ask(url, "/v1/completions", body)
        assert status == 400 and sentence in answer["error"]["message"]


def test_models_and_unknown_paths(url, untrained):
    _, models, _ = ask(url, "/v1/models")
    (model,) = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("model", "model", CONTEXT)
    assert ask(url, "/v1/models/model")[1]["id"] == "model"
    for path in ("/v1/models/gpt", "/v1/nothing"):
        status, answer, _ = ask(url, path)
        assert status == 404 and answer["error"]["type"] == "not_found_error"
    assert ask(url, "/nothing")[:2] == (
        404,
        {"error": {"message": "GET /nothing is not served here: Not Found", "code": 404}},
    )
    assert ask(url, "/generate")[0] == 405
