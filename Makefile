# Each target sets up what it needs in .venv, from nothing; later runs reuse it.
#   make demo PYTHON=python3.12     another interpreter (3.11 or newer)
#   make demo EXTRAS=cuda13         on an NVIDIA GPU
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?=
JOBS   ?= 2

BIN    := $(VENV)/bin
MODEL  := jax_q4k/assets/tiny-austen.Q4_K_M.gguf
PROMPT := It is a truth universally acknowledged, that
SAMPLING := -n 80 --temperature 0.6 --min-p 0.05 --seed 1
comma  := ,

# Without CUDA libraries JAX must not look for a GPU: it would warn at length.
ifeq ($(findstring cuda,$(EXTRAS)),)
export JAX_PLATFORMS ?= cpu
endif

.PHONY: demo test test-all test-others sanitize lint types docs wheel clean

demo: $(VENV)/.installed-base$(if $(EXTRAS),$(comma)$(EXTRAS))
	@echo
	@echo '1. The model that comes with the package: its weights are in 4.5 and 6.5 bits each, and stay so in memory.'
	@echo '   $$ jax-q4k inspect $(MODEL) | tail -n 9'
	@$(BIN)/jax-q4k inspect $(MODEL) | tail -n 9
	@echo
	@echo '2. Decoding with it: prompt, paged KV cache and sampling in one jitted program.'
	@echo '   $$ jax-q4k generate --demo -p "$(PROMPT)" $(SAMPLING)'
	@$(BIN)/jax-q4k generate --demo -p "$(PROMPT)" $(SAMPLING)
	@echo
	@echo '3. The same decode step lowered for CUDA: each launch below is PTX that this package generated.'
	@echo '   $$ python examples/kernels.py $(MODEL)'
	@$(BIN)/python examples/kernels.py $(MODEL)
	@echo
	@echo 'Another beginning: $(BIN)/jax-q4k generate --demo -p "My dear" -n 100 --temperature 0.8 --seed 7'
	@echo 'A model of your own: $(BIN)/jax-q4k generate MODEL.gguf -p "..." -n 64'

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q --disable-warnings

# The quick tier: minutes. It says at its end what it left out.
test: $(VENV)/.installed-test$(if $(EXTRAS),$(comma)$(EXTRAS))
	$(PYTEST)

# Everything; tests/passed.txt then names the tree, and CI runs of this tier what later changes reach.
test-all: $(VENV)/.installed-test$(if $(EXTRAS),$(comma)$(EXTRAS))
	$(PYTEST) --tier all
	$(BIN)/python -m tools.reach --record tests

# With the CPU's other kernels, an older ptxas and the newest JAX; recorded likewise.
test-others: $(VENV)/.installed-test
	.ci/others $(abspath $(BIN)/python) --record

sanitize: $(VENV)/.installed-test
	.ci/sanitize $(abspath $(BIN)/python)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/python -m tools.prose

types: $(VENV)/.installed-lint
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'site/index.html'

# dist/*.whl, with the CPU kernels, for Linux with glibc 2.34 or newer; `twine upload dist/*` publishes it.
wheel: $(VENV)/.installed-wheel
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	@echo 'Creating $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras; "base" stands for none.
$(VENV)/.installed-%: pyproject.toml setup.py jax_q4k/native/build.py $(wildcard jax_q4k/native/src/*) | $(BIN)/python
	@echo 'Installing packages into $(VENV): JAX and what "$*" needs (a minute or two the first time) ...'
	@JAX_Q4K_BUILD=0 $(BIN)/python -m pip --disable-pip-version-check --quiet install --editable '.$(if $(filter-out base,$*),[$*])'
	@$(BIN)/python -m jax_q4k.native --if-stale
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
