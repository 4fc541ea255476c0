"""SGLang's external model package for North: `SGLANG_EXTERNAL_MODEL_PACKAGE=north_sglang`."""

import north_sglang.config  # noqa: F401
