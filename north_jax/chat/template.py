"""The chat template that travels with every exported tokenizer folder, and its rendering by Jinja."""

import functools
import importlib.resources
import json

import jinja2
import jinja2.sandbox


def chat_template() -> str:
    """The text of `chat_template.jinja`: the turn format for engines that render with Jinja."""
    return importlib.resources.files("north_jax.chat").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def _raise(message: str):
    raise ValueError(message)


def render_template(
    messages, tools=(), *, generation_prompt: bool = False, template: str | None = None, **switches
) -> str:
    """The conversation as one string, rendered by Jinja with the settings Hugging Face uses.

    `template`: another text than ours. `switches`: reasoning, reasoning_effort, skip_thinking,
    platform_instruction_override.
    `ChatFormat.render` gives the same tokens without the detour over a string (and with loss weights).

    Raises:
      ValueError: for what the template refuses (unknown role, content that is not a string, text beside tool calls).
    """
    return _compiled(template or chat_template()).render(
        messages=messages,
        tools=list(tools),
        bos_token="<BOS_TOKEN>",
        add_generation_prompt=generation_prompt,
        **switches,
    )


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own tojson escapes <, >, & and ' for HTML, which no model has seen.
    env.filters["tojson"] = lambda value, **layout: json.dumps(value, **{"ensure_ascii": False} | layout)
    env.globals["raise_exception"] = _raise
    return env.from_string(template)
