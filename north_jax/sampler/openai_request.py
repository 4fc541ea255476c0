"""OpenAI's request bodies, read: which fields are taken, which change nothing, which are refused."""

import dataclasses
import uuid
from typing import Any

from north_jax.chat.prompt import PromptFormat
from north_jax.sampler.http import Refusal, flag
from north_jax.sampler.intake import Job, stop_strings
from north_jax.sampler.sampling import Sampling, refuse_unless_neutral

# Fields that clients send and that change nothing here, whatever their value.
HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "cache_control",
        "provider",
    )
)
# Fields that are accepted only with a value that changes nothing; none of them needs to be there.
NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
# Keys of messages and tool calls that clients add or send back, and that are not shown to the model.
_HARMLESS_MESSAGE = frozenset(
    ("cache_control", "provider_specific_fields", "name", "refusal", "annotations", "audio", "function_call")
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: the jobs to draw, `n` for each prompt, and what the answer shall hold.

    `forced` are ids at the end of the prompt that belong to the answer; `calls` says whether it may hold tool calls,
    `one_call` that it ends with the first.
    """

    jobs: list[Job]
    model: str
    n: int
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool
    prompt_ids: bool
    meta_info: bool
    reasoning: bool = True
    forced: tuple[int, ...] = ()
    calls: bool = False
    one_call: bool = False


def read_chat(body: dict[str, Any], prompts: PromptFormat, context: int) -> Asked:
    """The body of /v1/chat/completions. Errors: ValueError, Refusal; one sentence names the field.

    tool_choice "none" leaves the tools out of the prompt; "required" and a named tool force the opening of a call, so
    that there is no reasoning before it. parallel_tool_calls false keeps the first call of a turn only.
    `max_tokens` is what the context leaves unless given. reasoning_effort "none" closes the reasoning; others change
    nothing, the template knows none.
    """
    body = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    messages, tools = _messages(body.pop("messages", None)), _tools(body.pop("tools", []))
    choice, one_call = body.pop("tool_choice", "auto"), not flag(body, "parallel_tool_calls", True)
    reasoning = _reasoning(body)
    name = _tool_choice(choice, tools)
    if choice == "none":
        tools = []
    ids = prompts.prompt(messages, tools, reasoning=reasoning)
    forced: list[int] = []
    if choice not in ("auto", "none"):
        forced = prompts.forced_call(messages, name, reasoning=reasoning)
    logprobs = flag(body, "logprobs")
    if body.pop("top_logprobs", 0) != 0:
        raise ValueError("top_logprobs must be 0: this sampler has the log-probability of the chosen token only")
    limits = [body.pop(key) for key in ("max_completion_tokens", "max_tokens") if key in body]
    most = limits[0] if limits else max(1, context - len(ids) - len(forced))
    return _asked(
        body, [ids + forced], most, context, logprobs, reasoning=reasoning, forced=tuple(forced), calls=bool(tools),
        one_call=one_call,
    )  # fmt: skip


def read_completion(body: dict[str, Any], encode, context: int) -> Asked:
    """The body of /v1/completions: `prompt` is text, a list of texts, ids or a list of lists of ids.

    In a text, what spells a marker is that marker. `logprobs` 0 or 1 gives those of the chosen tokens only.
    """
    body = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    prompt = body.pop("prompt", None)
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if several else [prompt]
    logprobs = body.pop("logprobs", None)
    if not (logprobs is None or type(logprobs) is bool or (type(logprobs) is int and logprobs in (0, 1))):
        raise ValueError(f"logprobs must be 0 or 1, not {logprobs!r}: only the chosen token's is available")
    for each in prompts:
        if not isinstance(each, str | list):
            raise ValueError("prompt must be text, a list of texts, a list of token ids, or a list of such lists")
    ids = [encode(each) if isinstance(each, str) else each for each in prompts]
    most = body.pop("max_tokens", 16)
    wants = logprobs is not None and logprobs is not False
    return _asked(body, ids, most, context, wants)


def _asked(body: dict, prompts: list[list[int]], most: Any, context: int, logprobs: bool, **chat) -> Asked:
    for ids in prompts:
        if len(ids) >= context:
            raise Refusal(
                f"the prompt of {len(ids)} tokens leaves no room in the context of {context} tokens; shorten it",
                code="context_length_exceeded",
            )
    model = body.pop("model", "")
    if not isinstance(model, str):
        raise ValueError(f"model must be text, not {model!r}")
    options = body.pop("stream_options", {})
    if not isinstance(options, dict):
        raise ValueError(f"stream_options must be an object, not {options!r}")
    options = dict(options)
    stream, usage = flag(body, "stream"), flag(options, "include_usage")
    refuse_unless_neutral(options, {"include_obfuscation": (False, True), "continuous_usage_stats": (False,)})
    wants = {
        "token_ids": flag(body, "return_token_ids"),
        "prompt_ids": flag(body, "return_prompt_token_ids"),
        "meta_info": flag(body, "return_meta_info"),
    }
    rid, stop = body.pop("rid", None) or uuid.uuid4().hex, stop_strings(body.pop("stop", None), "stop")
    if not isinstance(rid, str):
        raise ValueError(f"rid must be text, not {rid!r}")
    fields = {"max_new_tokens": most, "sampling_seed": body.pop("seed", None)}
    for name in ("n", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"):
        if name in body:
            fields[name] = body.pop(name)
    refuse_unless_neutral(body, NEUTRAL)
    sampling, n = Sampling.from_json(fields, "request")
    jobs = []
    for p, ids in enumerate(prompts):
        for i in range(n):
            each = dataclasses.replace(sampling, seed=sampling.seed + i)
            name = rid if len(prompts) * n == 1 else f"{rid}_{p * n + i}"
            jobs.append(Job(name, ids, each, stop, stream, (ids, fields, stop, stream)))
    return Asked(jobs=jobs, model=model, n=n, stream=stream, usage=usage, logprobs=logprobs, **wants, **chat)


def _reasoning(body: dict) -> bool:
    effort, kwargs = body.pop("reasoning_effort", "medium"), body.pop("chat_template_kwargs", {})
    if effort not in _EFFORTS:
        raise ValueError(f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {effort!r}")
    if not isinstance(kwargs, dict) or not set(kwargs) <= {"reasoning"}:
        raise ValueError(f"chat_template_kwargs takes reasoning (true or false) only, not {kwargs!r}")
    return flag(dict(kwargs), "reasoning", True) and effort != "none"


def _tools(tools: Any) -> list[dict]:
    if not isinstance(tools, list):
        raise ValueError(f"tools must be a list, not {tools!r}")
    plain = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise ValueError(f'tools[{index}] must be {{"type": "function", "function": {{...}}}}')
        name, about = function.get("name"), function.get("description") or ""
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(name, str) or not name or not isinstance(about, str) or not isinstance(parameters, dict):
            raise ValueError(f"tools[{index}] needs a name, and text as description and an object as parameters")
        if function.get("strict"):
            raise ValueError(f"tools[{index}].function.strict=True is not implemented by this sampler; leave it out")
        plain.append({"name": name, "description": about, "parameters": parameters})
    return plain


def _tool_choice(choice: Any, tools: list[dict]) -> str | None:
    """The named tool, if one is."""
    if choice in ("auto", "none"):
        return None
    if not tools:
        raise ValueError(f"tool_choice {choice!r} needs tools")
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [tool["name"] for tool in tools]:
        raise ValueError(f"tool_choice must be auto, none, required or name one of the tools, not {choice!r}")
    return name


def _messages(messages: Any) -> list[dict]:
    """The messages as `ChatFormat.render` takes them."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ValueError("messages must be a non-empty list of objects")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict, where: str) -> dict:
    message = {key: value for key, value in message.items() if key not in _HARMLESS_MESSAGE and value is not None}
    if message.get("role") == "developer":
        message["role"] = "system"
    if "content" in message:
        message["content"] = _content(message["content"], where)
    if message.get("role") == "assistant":
        calls = message.pop("tool_calls", [])
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls must be a list, not {calls!r}")
        if calls:
            message["tool_calls"] = [_call(call, where) for call in calls]
            # A turn of this model has text or calls. Others' have both: what was said is then part of the reasoning.
            if said := message.pop("content", ""):
                thoughts = [message.pop(key, "") for key in ("thinking", "reasoning_content", "reasoning")]
                message["thinking"] = "\n".join(dict.fromkeys(filter(None, [*thoughts, said])))
        else:
            message.setdefault("content", "")
    return message


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}.content must be a string or a list of text parts, not {content!r}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ValueError(f"{where}.content has a part of type {kind!r}; this model reads text only")
        texts.append(part[kind])
    return "\n".join(texts)


def _call(call: Any, where: str) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{where} has a tool call without a function; give its name and arguments")
    arguments = function.get("arguments") or "{}"
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}
