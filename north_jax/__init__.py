"""north_jax: post-train North Mini Code on JAX."""
