"""North's decoder for SGLang: SGLang's own Cohere2Moe with the norm and the window that the config asks for.

The stock class (0.5.23) builds LayerNorm whatever `rms_norm_eps` says, lets sliding layers see one key too many, and
loads what it finds: a missing, misnamed or additional tensor passes in silence, and one of a wrong shape ends the
server in the middle of an update.
"""

import functools
from collections.abc import Iterable

import torch
from north_sglang.checkpoint import CheckpointError, check, check_folder
from north_sglang.config import NorthConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models import cohere2_moe as stock


class Cohere2MoeForCausalLM(stock.Cohere2MoeForCausalLM):
    """Takes the place of SGLang's class of this name."""

    def __init__(self, config: NorthConfig, quant_config=None, prefix: str = ""):
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        if config.rms_norm_eps is not None:
            self.model.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for layer in self.model.layers:
            if config.rms_norm_eps is not None:
                layer.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            if layer.self_attn.is_sliding:
                layer.self_attn.attn.sliding_window_size = config.keys_before

    def get_attention_sliding_window_size(self) -> int | None:
        """What SGLang's memory keeps for sliding layers, in its convention: keys before the query's own."""
        return self.config.keys_before if self.config.is_hybrid_swa else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy the tensors in. A list (an update from tensors, in buckets or of what changed) may be a part of the
        model and is checked before any is copied; of a folder, which was checked by its headers, all must come.
        """
        partial = isinstance(weights, list | tuple)
        if partial:
            check({name: tuple(t.shape) for name, t in weights}, self.config, "update from tensors", complete=False)
        loaded = super().load_weights(weights)
        left = {name for name, _ in self.named_parameters()} - loaded
        if left and not partial:
            raise CheckpointError(f"no tensor was loaded into {', '.join(sorted(left))}")
        return loaded


# SGLang's answer to an exception while it copies a folder is to copy the same folder again "to roll back", which raises
# again and ends the server. An exception here, before, is an answer 400 with nothing touched.
_stock_iterator = DefaultModelLoader._get_weights_iterator


@functools.wraps(_stock_iterator)
def _checked_iterator(self, source, *args, **kwargs):
    config = getattr(source.model_config, "hf_config", None)
    if isinstance(config, NorthConfig):
        folder, files, safetensors = self._prepare_weights(
            source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        if not safetensors:
            raise CheckpointError(f"{folder} holds no safetensors file; nothing was loaded, export it again")
        check_folder(folder, files, config)
    return _stock_iterator(self, source, *args, **kwargs)


_stock_from_tensor = WeightUpdater.update_weights_from_tensor


@functools.wraps(_stock_from_tensor)
def _refusing_from_tensor(self, *args, **kwargs):
    try:
        return _stock_from_tensor(self, *args, **kwargs)
    except CheckpointError as error:
        return False, str(error)


DefaultModelLoader._get_weights_iterator = _checked_iterator
WeightUpdater.update_weights_from_tensor = _refusing_from_tensor
EntryClass = Cohere2MoeForCausalLM
