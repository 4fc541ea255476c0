"""The decoder: Flax NNX modules hold the parameters, the functions of this room do the arithmetic.

Every block reads one norm and adds both branches to one residual: x + attention(norm(x)) + feed_forward(norm(x)).
Each parameter carries the logical name of each of its axes (`axes`); `north_jax/parallel` maps them to a mesh.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from north_jax.model import attention, blocks, moe, norm
from north_jax.model.cache import Cache, Tables
from north_jax.model.config import ModelConfig
from north_jax.model.moe import EXCHANGES
from north_jax.model.row_cache import RowCache
from north_jax.parallel import gathered_along, to_zigzag
from pallas_kernels import rotary
from pallas_kernels.attention import BACKENDS as ATTENTION_KINDS
from pallas_kernels.grouped_matmul import BACKENDS as GROUPED_KINDS

MOE_KINDS = ("dense", "grouped", *GROUPED_KINDS)
Trace = dict[str, jax.Array] | None


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], scale: float, dtype) -> nnx.Param:
    # Drawn in float32 and rounded, so that one seed gives one model whatever the type.
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * scale
    return nnx.Param(value.astype(dtype), axes=axes)


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm without bias when the config has no `rms_norm_eps`."""

    def __init__(self, config: ModelConfig, dtype):
        self.scale_D = nnx.Param(jnp.ones((config.hidden_size,), dtype), axes=("embed",))
        self.rms = config.rms_norm_eps is not None
        self.eps = config.rms_norm_eps if self.rms else config.layer_norm_eps

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The normalised input, same shape and type."""
        normalise = norm.rms_norm if self.rms else norm.layer_norm
        return normalise(x_BSD, self.scale_D[...], self.eps)


class Attention(nnx.Module):
    """Projections of one attention layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype):
        D, H, G, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        new = functools.partial(_param, rngs, scale=config.initializer_range, dtype=dtype)
        self.q_DHK = new((D, H, K), ("embed", "heads", "head_dim"))
        self.k_DGK = new((D, G, K), ("embed", "kv_heads", "head_dim"))
        self.v_DGK = new((D, G, K), ("embed", "kv_heads", "head_dim"))
        self.o_HKD = new((H, K, D), ("heads", "head_dim", "embed"))

    def project(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, not yet turned to positions."""

        def heads(w_DHK: jax.Array) -> jax.Array:
            # Flat: as an einsum over H and K, its gradient misses XLA's fast path on the CPU.
            D, H, K = w_DHK.shape
            return (x_BSD @ w_DHK.reshape(D, H * K)).reshape(*x_BSD.shape[:2], H, K)

        return heads(self.q_DHK[...]), heads(self.k_DGK[...]), heads(self.v_DGK[...])

    def output(self, heads_BSHK: jax.Array) -> jax.Array:
        """The heads mixed back into the model width."""
        H, K, D = self.o_HKD.shape
        return heads_BSHK.reshape(*heads_BSHK.shape[:2], H * K) @ self.o_HKD[...].reshape(H * K, D)


class DenseMLP(nnx.Module):
    """The gated MLP of a dense prefix layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype):
        D, F = config.hidden_size, config.prefix_dense_intermediate_size
        new = functools.partial(_param, rngs, scale=config.initializer_range, dtype=dtype)
        self.gate_DF = new((D, F), ("embed", "mlp"))
        self.up_DF = new((D, F), ("embed", "mlp"))
        self.down_FD = new((F, D), ("mlp", "embed"))

    def __call__(self, x_BSD: jax.Array, trace: Trace, prefix: str) -> tuple[jax.Array, None]:
        """The MLP's contribution to the residual; it chooses no experts."""
        return moe.mlp(x_BSD, self.gate_DF[...], self.up_DF[...], self.down_FD[...]), None


class MoE(nnx.Module):
    """The router and its experts, stacked over E."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype, kind: str, exchange: str):
        D, E, F = config.hidden_size, config.num_experts, config.intermediate_size
        new = functools.partial(_param, rngs, scale=config.initializer_range, dtype=dtype)
        self.router_DE = new((D, E), ("embed", "router"))
        self.gate_EDF = new((E, D, F), ("expert", "embed", "expert_mlp"))
        self.up_EDF = new((E, D, F), ("expert", "embed", "expert_mlp"))
        self.down_EFD = new((E, F, D), ("expert", "expert_mlp", "embed"))
        self.config, self.kind, self.exchange = config, kind, exchange

    def __call__(self, x_BSD: jax.Array, trace: Trace, prefix: str) -> tuple[jax.Array, jax.Array]:
        """The experts' contribution to the residual, and the experts that each token chose, [B, S, C]."""
        config = self.config
        choose = functools.partial(
            moe.route,
            chosen=config.num_experts_per_tok,
            selection=config.expert_selection_fn,
            normalise=config.norm_topk_prob,
        )
        router_DE, experts = self.router_DE[...], (self.gate_EDF[...], self.up_EDF[...], self.down_EFD[...])
        B, S, D = x_BSD.shape
        kind = self.kind
        if kind == "auto":
            size = D * config.intermediate_size
            kind = moe.kind(config.num_experts, config.num_experts_per_tok, B * S, size)
        if kind == "dense":
            x_ND = x_BSD.reshape(-1, D)
            logits_NE = moe.router_logits(x_ND, router_DE)
            weights_NE, indices_NC = choose(logits_NE)
            out_BSD = moe.experts_dense(x_ND, weights_NE, *experts).reshape(B, S, D)
            weights_NC = jnp.take_along_axis(weights_NE, indices_NC, axis=1)
            routing = [value.reshape(B, S, -1) for value in (logits_NE, weights_NC, indices_NC)]
        else:
            backend = "auto" if kind == "grouped" else kind
            out_BSD, *routing = moe.mixture(x_BSD, router_DE, *experts, choose, backend=backend, method=self.exchange)
        logits_BSE, weights_BSC, indices_BSC = routing
        if trace is not None:
            trace[f"{prefix}/router_logits"] = logits_BSE
            trace[f"{prefix}/router_probs"] = jax.nn.sigmoid(logits_BSE)
            trace[f"{prefix}/router_topk_weights"] = weights_BSC
            trace[f"{prefix}/router_topk_indices"] = indices_BSC
        return out_BSD, indices_BSC


class Layer(nnx.Module):
    """One parallel block: norm, attention and feed-forward."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs, dtype, moe_kind: str, exchange: str):
        self.norm = Norm(config, dtype)
        self.attention = Attention(config, rngs, dtype)
        dense = config.is_dense(layer)
        self.mlp = DenseMLP(config, rngs, dtype) if dense else MoE(config, rngs, dtype, moe_kind, exchange)


class Decoder(nnx.Module):
    """The language model of `config`; see `hidden`, `logits` and `step`.

    `attention` names the backend of `pallas_kernels.attention` for rows. `moe` says how experts are computed: "dense",
    every expert with the result gated, is best for a few small ones; "grouped" sorts the tokens by expert and computes
    the chosen ones only, by `pallas_kernels.grouped_matmul`'s "auto"; the name of another of its backends is the same
    by that backend. "auto" is what `moe.kind` says. All give the same numbers. `exchange` is how tokens reach grouped
    experts on other devices, which is `moe.mixture`'s method. For training, `blocks.stack` changes how the layers are
    kept and run.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
        attention: str = "auto",
        moe: str = "auto",
        exchange: str = "auto",
    ):
        choices = ("attention", attention, ATTENTION_KINDS), ("moe", moe, MOE_KINDS), ("exchange", exchange, EXCHANGES)
        for what, name, kinds in choices:
            if name not in kinds:
                raise ValueError(f"Decoder: {what} {name!r} is not known; choose one of {', '.join(kinds)}")
        self.config, self.attention = config, attention
        self.remat, self.stacked = "none", False  # `blocks.stack` changes them
        shape = (config.vocab_size, config.hidden_size)
        self.embedding_VD = _param(rngs, shape, ("vocab", "embed"), config.initializer_range, param_dtype)
        self.layers = nnx.List(
            [Layer(config, i, rngs, param_dtype, moe, exchange) for i in range(config.num_hidden_layers)]
        )
        self.norm = Norm(config, param_dtype)

    def hidden(
        self,
        ids_BS: jax.Array,
        *,
        positions_BS: jax.Array | None = None,
        segment_ids_BS: jax.Array | None = None,
        trace: Trace = None,
        with_counts: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """The final hidden states x_BSD, after the last norm; `with_counts` a pair (x_BSD, counts_LE).

        A token sees the tokens before it in its row that have its segment id; segment 0 is padding, whose output means
        nothing. Without `positions_BS` every row counts from 0 (rotary positions are relative, so segments need not).
        A `trace` dict, if given, receives the intermediate values by name. Where devices share a row, what comes out is
        in zig-zag order (`north_jax.parallel.context`); what goes in is not. counts_LE, int32: how many tokens that are
        not padding chose each expert, by layer; 0 in dense layers.
        """
        S = ids_BS.shape[1]
        if positions_BS is None:
            positions_BS = jnp.arange(S)
        full, sliding = attention.row_spans(ids_BS, segment_ids_BS, self.config.window)
        counted_BS = None
        if with_counts:
            counted_BS = jnp.ones(ids_BS.shape, bool) if segment_ids_BS is None else segment_ids_BS > 0
            counted_BS = to_zigzag(counted_BS)
        angles = self._angles(to_zigzag(jnp.broadcast_to(positions_BS, ids_BS.shape)))
        ids_BS = to_zigzag(ids_BS)

        def attend(kind: tuple[bool, bool], q, k, v):
            slides, rotates = kind
            if rotates:
                q, k = attention.turn_rows(q, k, *angles, backend=self.attention)
            spans, window = (sliding, self.config.window) if slides else (full, None)
            return attention.attend_rows(q, k, v, spans, window=window, backend=self.attention)

        x_BSD, counts_LBE = self._blocks(ids_BS, attend, trace, trace is not None, counted_BS)
        # Over rows, and so over the devices that split them, once for all layers.
        return (x_BSD, counts_LBE.sum(axis=1)) if with_counts else x_BSD

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Next-token logits over the vocabulary: logit_scale * x · embeddingᵀ, float32; any leading axes."""
        # The embedding first: of a few tokens, the other way round, XLA:CPU would transpose it every time.
        logits = jnp.einsum("VD,...D->...V", self.embedding_VD[...], x_BSD, preferred_element_type=jnp.float32)
        return logits * self.config.logit_scale

    def __call__(self, ids_BS: jax.Array, **kwargs) -> jax.Array:
        """`logits` of `hidden`, [B, S, V]; takes the arguments of `hidden`."""
        return self.logits(self.hidden(ids_BS, **kwargs))

    def step(
        self,
        ids_BS: jax.Array,
        positions_BS: jax.Array,
        cache: Cache | RowCache,
        tables: Tables,
        trace: Trace = None,
        backend: str = "reference",
    ) -> tuple[jax.Array, Cache | RowCache]:
        """Feeds S more tokens to each of B rows: (final hidden states x_BSD, the cache with their keys and values).

        The token at position p is written where `tables` say and sees its row's tokens up to p (in sliding layers the
        last `window` of them): these must have been fed before, and the tables must hold them and p. A token at a
        negative position is padding: nothing is written and its output means nothing. A RowCache takes one token a
        row. `trace` as in `hidden`; `backend` as in `pallas_kernels.paged_attention` and `rotary`, of which only
        "reference" runs on more than one device.
        """
        full, sliding = cache.views(tables, positions_BS, self.config.window)
        angles, written = self._angles(positions_BS), []

        def attend(kind: tuple[bool, bool], q, k, v):
            slides, rotates = kind
            if rotates:
                q, k = (rotary.rotate(x_BSHK, *angles, backend=backend) for x_BSHK in (q, k))
            heads_BSHK, *both = cache.attend(len(written), q, k, v, sliding if slides else full, backend)
            written.append(both)
            return heads_BSHK

        x_BSD, _ = self._blocks(ids_BS, attend, trace, each=True)
        k, v = zip(*written, strict=True)
        return x_BSD, dataclasses.replace(cache, k=k, v=v)

    def _angles(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotary.angles(positions_BS, self.config.head_dim, self.config.rope_theta, self.embedding_VD.dtype)

    def _blocks(
        self, ids_BS: jax.Array, attend: Callable, trace: Trace, each: bool, counted_BS=None
    ) -> tuple[jax.Array, jax.Array | None]:
        # each: `attend` or `trace` keep what every layer gives them, so each is traced, once.
        if each and self.stacked:
            raise ValueError("Decoder: stacked layers have no caches and no traces; `unstack` the model first")

        def note(name: str, value: jax.Array):
            if trace is not None:
                trace[name] = value

        # Over "fsdp" as all weights are: split in width it would give activations so, which no cheap exchange mends.
        x_BSD = gathered_along(self.embedding_VD[...], ("vocab", "embed"), "embed")[ids_BS]
        note("embed", x_BSD)

        def counts(indices_BSC: jax.Array | None) -> jax.Array | None:
            if counted_BS is None:
                return None
            if indices_BSC is None:
                return jnp.zeros((len(counted_BS), self.config.num_experts), jnp.int32)
            return moe.expert_counts(indices_BSC, counted_BS, self.config.num_experts)

        def through(
            layer: Layer, x_BSD: jax.Array, attend: Callable, name: str = ""
        ) -> tuple[jax.Array, jax.Array | None]:
            normed_BSD = layer.norm(x_BSD)
            attn_BSD = layer.attention.output(attend(*layer.attention.project(normed_BSD)))
            mlp_BSD, indices_BSC = layer.mlp(normed_BSD, trace, name)
            x_BSD = x_BSD + attn_BSD + mlp_BSD
            note(f"{name}/normed", normed_BSD)
            note(f"{name}/attn_out", attn_BSD)
            note(f"{name}/mlp_out", mlp_BSD)
            note(f"{name}/out", x_BSD)
            return x_BSD, counts(indices_BSC)

        if each:
            kept = []
            for i, layer in enumerate(self.layers):
                own = functools.partial(attend, self.config.kind(i))
                x_BSD, counts_BE = through(layer, x_BSD, own, f"layer{i}")
                kept.append(counts_BE)
            counts_LBE = blocks.stacked(kept)
        else:
            x_BSD, counts_LBE = blocks.run(through, attend, x_BSD, self)
        x_BSD = self.norm(x_BSD)
        note("final_norm", x_BSD)
        return x_BSD, counts_LBE


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """(all parameters, those that act on one token: without the embedding, and of the experts only the chosen ones).

    Works on an abstract model (`nnx.eval_shape`) as well.
    """
    total = active = 0
    for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axes = param.get_metadata("axes")
        total += param.size
        if "expert" in axes:
            active += param.size * model.config.num_experts_per_tok // model.config.num_experts
        elif "vocab" not in axes:
            active += param.size
    return total, active
