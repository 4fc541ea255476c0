# The README's two commands. Each sets up all that it needs first; see tools/setup.sh.
export JAX_PLATFORMS ?= cpu
# Large pages for large arrays: page faults cost a CPU train step up to a sixth of its time.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# Tests that compile much, start no server and measure no time: two at once.
SIDE_BY_SIDE = tests/chat tests/data tests/model tests/pallas_kernels tests/parallel tests/train
# The rest compiles the same few engines again and again, in many processes.
CACHED = JAX_COMPILATION_CACHE_DIR=$(CURDIR)/build/jax_cache

.PHONY: demo test sglang lint

demo:
	tools/setup.sh demo
	.venv/bin/python -m north_jax.main --config=configs/demo.py --workdir=runs/demo

test:
	tools/setup.sh test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
ifdef TESTS
	.venv/bin/python -m pytest $(TESTS)
else
	.venv/bin/python -m pytest -n 2 $(SIDE_BY_SIDE)
	$(CACHED) .venv/bin/python -m pytest $(addprefix --ignore=,$(SIDE_BY_SIDE))
endif

# SGLang's server, in an environment of its own; DEVICE=gpu where there is one.
DEVICE ?= cpu
sglang:
	tools/setup_sglang.sh $(DEVICE)

lint:
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
