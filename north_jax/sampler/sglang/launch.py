"""`sglang.launch_server` with North's model, for the environment that `make sglang` makes:

    .venv-sglang/bin/python north_jax/sampler/sglang/launch.py --model-path DIR --port 30000 [any argument of SGLang]

With an accelerator the arguments go to SGLang as they are. Without one, those in CPU_ARGUMENTS are added where they are
not given, and what SGLang imports but never runs on a CPU is stood in for. `--stop-with-stdin` ends the server when
its standard input closes. Nothing of north_jax is imported: that environment has no jax.

SGLang starts its workers with multiprocessing's "spawn", which runs the top level of this file in each of them again.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import types

# Torch compiles the stock LayerNorm otherwise: up to 12 s of the start for nothing.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch

VERSION, PACKAGE = "0.5.23", "north_sglang"
ON_CPU = not torch.accelerator.is_available()
CPU_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",  # the default wants Intel's AMX
    "--sampling-backend": "pytorch",
    "--disable-cuda-graph": None,
    "--max-total-tokens": "65536",  # otherwise the cache takes what the machine has
    "--mem-fraction-static": "0.1",
    "--sleep-on-idle": None,  # an idle scheduler keeps a core busy otherwise
}
# Imported by SGLang on a CPU, called only in speculative decoding.
KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def stand_in_for_kernels() -> torch.library.Library:
    """Make `sgl_kernel` and `torchvision` importable without their CUDA builds; the result must be kept alive."""

    def absent(name: str):
        def kernel(*_, **__):
            raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU; use an accelerator for this option")

        return kernel

    module = types.ModuleType("sgl_kernel")
    for name in KERNELS:
        setattr(module, name, absent(name))
    sys.modules["sgl_kernel"] = module
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def patch_for_cpu() -> None:
    """Two places where SGLang takes for granted what only its GPU code has."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    # The buffer of the routed experts wants pinned memory.
    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, **_: torch.empty(dims, dtype=dtype, device=device)

    def translated(attend):
        # Sliding layers keep their keys in a smaller pool of their own. This backend writes to it by the pool's own
        # indices but reads by the other pool's.
        def run(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs):
            if self.use_sliding_window_kv_pool and kwargs.get("sliding_window_size") is not None:
                rows = req_to_token[req_pool_indices, : int(seq_lens.max())]
                req_to_token = self.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
                req_pool_indices = torch.arange(len(req_pool_indices), device=req_pool_indices.device)
            return attend(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs
            )

        return run

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, translated(getattr(TorchNativeAttnBackend, name)))


def cpu_arguments(argv: list[str]) -> list[str]:
    """`argv` and what a CPU needs besides: a float32 checkpoint is served in float32 instead of SGLang's float16, and
    a server of bounded requests keeps twice what these can hold."""
    given = {}
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        given[name] = value or following
    wanted = dict(CPU_ARGUMENTS)
    file = pathlib.Path(given.get("--model-path", given.get("--model", "")), "config.json")
    if file.is_file():
        config = json.loads(file.read_text())
        if (config.get("dtype") or config.get("torch_dtype") or "float32") == "float32":
            wanted["--dtype"] = "float32"
    if {"--max-running-requests", "--context-length"} <= given.keys():
        wanted["--max-total-tokens"] = str(2 * int(given["--max-running-requests"]) * int(given["--context-length"]))
    added = [(name, value) for name, value in wanted.items() if name not in given]
    return argv + [word for pair in added for word in pair if word is not None]


def _end_with_stdin() -> None:
    # The parent holds the other end and never writes. However it ends, this read then returns.
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # the workers are of this group


os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE
if ON_CPU:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # Read by the workers. Models that one serves on a CPU are made of small steps, and at the end of each the threads
    # wait for the one that others keep from running: the demo's rollouts are twice as fast with one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _library = stand_in_for_kernels()
    patch_for_cpu()
import north_sglang  # noqa: E402, F401  the config must be known before the model is looked up


def main(argv: list[str]) -> int:
    """Serve until told to end."""
    import sglang
    from sglang.launch_server import run_server
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if sglang.__version__ != VERSION:
        print(f"sglang {sglang.__version__} is installed, the model is for {VERSION}; run make sglang", file=sys.stderr)
        return 1
    # A package that fails to import is only a warning to SGLang, which then serves its own model: another one.
    served, _ = ModelRegistry.resolve_model_cls("Cohere2MoeForCausalLM")
    if not served.__module__.startswith(f"{PACKAGE}."):
        print(f"SGLang would serve {served.__module__}, not {PACKAGE}; see the warnings above", file=sys.stderr)
        return 1
    if "--stop-with-stdin" in argv:
        argv.remove("--stop-with-stdin")
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    load_plugins()
    try:
        run_server(prepare_server_args(cpu_arguments(argv) if ON_CPU else argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
