# `make serve` and `make test` do all the set-up: they make an environment, install and go on.
# `make serve ARGS="--port 8001"` passes flags; `make test ARGS="-k pool"` passes pytest's.

# The newest Python that runs and can make an environment. Passed over: a shim of pyenv without a
# version behind it, and a Debian Python without python3-venv. PYTHON=... overrides.
CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
CHECK := import sys, ensurepip, venv; sys.version_info >= (3, 11) or sys.exit("older than 3.11: " \
	+ sys.version.split()[0]); print("%d.%d" % sys.version_info[:2], sys.executable)
FOUND := $(shell for p in $(CANDIDATES); do "$$p" -I -c '$(CHECK)' 2>/dev/null && break; done)
VENV := .venv-$(firstword $(FOUND))
IN_VENV := $(VENV)/bin/python
TORCH := torch==2.13.0

# Test files are dealt out to processes, of which each compiles its own programs.
WORKERS := -n auto --maxprocesses 4 --dist worksteal

# To compile for GPUs without having one: JAX's CUDA plugin, of JAX's own version and without the
# gigabytes of libraries that running needs; ptxas and nvdisasm of CUDA 13.
AOT_VENV := .venv-aot-$(firstword $(FOUND))
IN_AOT := $(AOT_VENV)/bin/python
JAX_VERSION := from importlib.metadata import version; print(version("jax"))
AOT_TOOLS := "nvidia-cuda-nvcc>=13,<14" "nvidia-cuda-nvdisasm>=13,<14"

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-aot oracle bench lint ruff ruff-format basedpyright
.PHONY: python-version clean

help:
	@echo "make serve         set up, fetch the default model, serve it; ARGS=\"--port 8001\""
	@echo "make test          set up, run the tests; ARGS=\"-k pool\""
	@echo "make test-slow     the tests that take minutes"
	@echo "make test-aot      compile kernels and steps for H200 and A100, no GPU needed (1.4 GB)"
	@echo "make oracle        the recorded answers against transformers (installs torch)"
	@echo "make bench         speed and memory of the engine on this machine"
	@echo "make lint          ruff, ruff format, basedpyright"
	@echo "make clean         remove the environments and caches of this folder"
	@echo "PYTHON=python3.12  takes that Python instead of the newest"

serve: $(VENV)/.serve
	$(IN_VENV) serve.py $(ARGS)

test: $(VENV)/.dev
	$(IN_VENV) -m pytest $(WORKERS) $(ARGS)

test-slow: $(VENV)/.dev
	$(IN_VENV) -m pytest -m slow $(ARGS)

test-aot: $(AOT_VENV)/.aot
	$(IN_AOT) -m pytest tests/aot -m aot $(ARGS)

# The pin: an index with a CPU build of exactly this version is then preferred over a larger one.
oracle: $(VENV)/.oracle
	$(IN_VENV) -m pytest -m oracle $(ARGS)

bench: $(VENV)/.bench
	$(IN_VENV) -m bench.offline $(ARGS)

lint: ruff ruff-format basedpyright

ruff: $(VENV)/.dev
	$(IN_VENV) -m ruff check .

ruff-format: $(VENV)/.dev
	$(IN_VENV) -m ruff format --check .

basedpyright: $(VENV)/.dev
	$(IN_VENV) -m basedpyright --pythonpath $(IN_VENV)

python-version:
	@echo $(firstword $(FOUND))

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written when everything is in; with it, nothing is installed and no network is needed.
$(VENV)/.serve: EXTRAS :=
$(VENV)/.dev: EXTRAS := [dev]
$(VENV)/.oracle: EXTRAS := [dev,oracle]
$(VENV)/.oracle: ALSO := $(TORCH)
$(VENV)/.bench: EXTRAS := [bench]
$(AOT_VENV)/.aot: EXTRAS := [aot]
$(AOT_VENV)/.aot: THEN = v=$$($(IN_AOT) -c '$(JAX_VERSION)') && $(IN_AOT) -m pip install --no-deps \
	--disable-pip-version-check jax-cuda12-plugin==$$v jax-cuda12-pjrt==$$v $(AOT_TOOLS)

$(addprefix $(VENV)/.,serve dev oracle bench) $(AOT_VENV)/.aot: pyproject.toml
ifeq ($(FOUND),)
	@echo "No Python 3.11 or newer that can make a virtual environment was found:"
	@for p in $(CANDIDATES); do echo "  $$p:"; \
		"$$p" -I -c '$(CHECK)' 2>&1 | sed -n '/[^ ]/s/^/    /p'; done
	@echo "Install one (on Debian or Ubuntu python3-venv belongs to it), or name it: PYTHON=..."
	@exit 1
else
	@echo "Installing into $(@D) with $(wordlist 2,99,$(FOUND)): once, about a minute"
	"$(wordlist 2,99,$(FOUND))" -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check $(ALSO) -e '.$(EXTRAS)'
	$(THEN)
	@touch $@ $(@D)/.serve
endif
