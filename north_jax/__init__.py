"""north_jax: post-train North Mini Code on JAX. `load` and `save` exchange models as Hugging Face folders."""

import os


def load(path: str | os.PathLike):
    """(model, tokenizer) of a Hugging Face folder: a `Decoder` and a `Tokenizer`.

    Raises ValueError naming the file, tensor, config key or marker that is missing or wrong.
    """
    from north_jax.chat.tokenizer import Tokenizer
    from north_jax.weights import hf

    return hf.load(path), Tokenizer.load(path)


def save(path: str | os.PathLike, model, tokenizer, *, version: str = "0", step: int = 0) -> None:
    """Writes model and tokenizer as a Hugging Face folder that `load`, transformers and the servers read.

    version, step: the weight version and training step that go into its manifest.
    """
    from north_jax.weights import hf

    hf.save(path, model, version=version, step=step, tokenizer_dir=tokenizer.path)
