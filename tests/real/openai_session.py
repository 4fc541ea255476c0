"""What a user of the `openai` package does, against the server at argv[1]; run by test_openai_clients.py."""

import asyncio
import json
import sys

import openai

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="s3cret", max_retries=0)
(model,) = client.models.list().data
messages = [{"role": "user", "content": "How many files?"}]

# A tool call, its result, the answer; then the same streamed.
first = client.chat.completions.create(model=model.id, messages=messages, tools=[BASH], seed=1, max_tokens=200)
(choice,) = first.choices
(call,) = choice.message.tool_calls
assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"command": "ls | wc -l"}
assert choice.message.reasoning_content == "I count them."
messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3\n"}]
final = client.chat.completions.create(model=model.id, messages=messages, tools=[BASH], logprobs=True)
assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Three files.", "stop")
assert len(final.choices[0].logprobs.content) == final.usage.completion_tokens
assert final.usage.prompt_tokens_details.cached_tokens == 1

with client.chat.completions.stream(model=model.id, messages=messages[:1], tools=[BASH]) as stream:
    kinds = {event.type for event in stream}
    whole = stream.get_final_completion()
assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
usage = {"include_usage": True}
*chunks, last = client.chat.completions.create(model=model.id, messages=messages, stream=True, stream_options=usage)
assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Three files." and last.usage.total_tokens > 0

# Text completion, many at once, and errors as the package's own exceptions.
assert client.completions.create(model=model.id, prompt="x", max_tokens=400).choices[0].text


async def many():
    async with openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="s3cret") as many:
        chats = [many.chat.completions.create(model=model.id, messages=messages) for _ in range(20)]
        assert {chat.choices[0].message.content for chat in await asyncio.gather(*chats)} == {"Three files."}


asyncio.run(many())
for wrong, kind, sentence in (
    ({"temperature": -3}, openai.BadRequestError, "request.temperature"),
    ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
):
    try:
        client.chat.completions.create(model=model.id, messages=messages, **wrong)
    except kind as error:
        assert sentence in error.message and error.type == "invalid_request_error", error
    else:
        raise AssertionError(wrong)
try:
    client.with_options(api_key="other").models.list()
except openai.AuthenticationError as error:
    assert error.code == "invalid_api_key"
else:
    raise AssertionError("served without the key")
print("done with", openai.__version__)
