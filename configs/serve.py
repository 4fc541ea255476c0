"""A checkpoint folder behind an OpenAI-compatible server, which speaks SGLang's native contract too.

    python -m north_jax.main --config=configs/serve.py --config.checkpoint=DIR

Wants the memory of the weights and `slots` times `context` tokens of keys and values; ready when it says how to use it.
An API key, which an address beyond this machine needs, is read from NORTH_JAX_API_KEY. Ctrl-C ends it: open requests
have `drain_s` seconds to finish.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.job = "serve"
    c.checkpoint = config_dict.placeholder(str)  # a Hugging Face folder, with its tokenizer for chats
    c.host = "127.0.0.1"
    c.port = 30000
    c.allow_anyone = False  # without an API key on an address that others can reach

    c.slots = 8  # sequences in flight at once
    c.context = 16384  # tokens of a sequence, prompt and completion together; at most what the model is made for
    c.engine = ConfigDict()
    c.engine.moe = "auto"  # "grouped", the chosen experts only, or "dense", all, which is faster for a few small ones
    c.engine.tensor = 1  # devices that heads and widths are split over
    c.engine.expert = 1  # devices that experts are split over
    c.engine.cache_tokens = config_dict.placeholder(int)  # keys and values in all; slots * context if not given
    c.engine.kv_dtype = config_dict.placeholder(str)  # "float8_e4m3fn" halves bfloat16's memory
    c.engine.routed_experts = False  # keep which experts every token took, for requests that ask for them
    c.queue = 256  # requests that may wait; more are answered 429
    c.drain_s = 30.0
    return c
