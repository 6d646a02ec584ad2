# Every target does its own set-up: a virtual environment with the exact pins of constraints.txt.
# `make demo ONCE=1` prints and exits. `make test PYTEST_ARGS="-k engine"` runs a part.
# `make test TIER=avx2` runs the tests as on a machine with less.

VENV ?= .venv
WORKERS ?= 2
TIER ?= native
PYTEST_ARGS ?=
BUDGET ?= 10
CAMPAIGN_ARGS ?=
MUTANTS_ARGS ?=
REPLAY_ARGS ?=
DEMO_ARGS ?=

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# A CUDA build of torch names the Triton that it was built with; beside a CPU build the kernels are tested with this one.
TRITON := triton==3.6.0
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
FUZZ := $(VENV)/.installed-fuzz
MUTANTS := $(VENV)/.installed-mutants

# What stands in for another machine, by the name of the tier: the instruction sets of the C sources,
# of torch's kernels and of oneDNN; no C sources; no C compiler.
TIERS := native avx2 torch no-compiler
ENVIRONMENT_native :=
ENVIRONMENT_avx2 = $(shell $(PYTHON) recserve/kernels/native/processor.py x86-64-v3)
ENVIRONMENT_torch := RECSERVE_KERNELS=torch
ENVIRONMENT_no-compiler := CC=no-such-compiler
ifeq ($(filter $(TIER),$(TIERS)),)
$(error TIER is '$(TIER)'; choose one of $(TIERS))
endif
# The tests start hundreds of processes; without stored bytecode each compiles the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(ENVIRONMENT_$(TIER)) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-all test-slow replay campaign mutants sanitize check format install docs reference package redis promtool chromium clang newest-triton cuda-versions python-versions clean

demo: $(RUNTIME)
	@$(BIN)/recserve demo $(if $(filter-out 0,$(ONCE)),--once) $(DEMO_ARGS)

test: $(DEV) redis promtool chromium
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(DEV) redis promtool chromium clang
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: $(DEV) redis promtool chromium clang
	$(PYTEST) $(PYTEST_ARGS)

# All recorded requests again, over HTTP and in process; REPLAY_ARGS='--record "REASON"' stores wanted changes.
replay: $(DEV)
	OMP_NUM_THREADS=1 $(ENVIRONMENT_$(TIER)) $(BIN)/python -m tests.recorded $(REPLAY_ARGS)

# Overload, faults and attacks against real servers, for BUDGET minutes; the figures go to build/campaign.*
campaign: $(FUZZ) redis
	@mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.campaign --minutes $(BUDGET) --json build/campaign.json --markdown build/campaign.md $(CAMPAIGN_ARGS)

# Small faults in the code, which the tests of the changed line must notice.
mutants: $(MUTANTS) redis
	$(BIN)/python -m tests.mutants --workers $(WORKERS) $(MUTANTS_ARGS)

# The tests of the C sources, compiled for AddressSanitizer and UBSan by gcc.
sanitize: $(DEV)
	$(BIN)/python -m tests.support.sanitizers $(PYTEST_ARGS)

check: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(DEV)

# The tables of the reference pages, from the package: after a new flag, setting, metric or public name.
reference: $(DEV)
	$(BIN)/python docs/_build/reference.py

# The site, in build/site; any warning is an error.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# An sdist, and a wheel that is built from the sdist, in dist/.
package: $(DEV)
	$(BIN)/python -m build

# The Redis store is tested against a real server; without one its tests skip loudly, and fail where CI is set.
redis:
	@command -v redis-server >/dev/null 2>&1 || sh deploy/install-redis.sh

# The alert rules are tested by Prometheus' own tool; without it their tests skip loudly, and fail where CI is set.
promtool:
	@command -v promtool >/dev/null 2>&1 || sh deploy/install-promtool.sh

# The playground is tested in a real browser; without one its tests skip loudly, and fail where CI is set.
chromium:
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || sh deploy/install-chromium.sh

# The C sources are compared between gcc and clang; without it these tests skip loudly, and fail where CI is set.
clang:
	@command -v clang >/dev/null 2>&1 || sh deploy/install-clang.sh

# Every kernel to machine code with the newest Triton, in a folder of its own: what the next upgrade will meet.
newest-triton: $(DEV)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --upgrade --no-deps --target build/newest-triton triton
	@PYTHONPATH=build/newest-triton $(BIN)/python -c 'import triton; print("triton", triton.__version__)'
	@for capability in 80 90; do \
		PYTHONPATH=build/newest-triton:. $(BIN)/python tests/support/compile_kernels.py $$capability || exit 1; \
	done

# The tests with torch and Triton as in the CUDA environment, in a virtual environment of its own; several GB are fetched.
CUDA := build/cuda-versions
cuda-versions: redis | $(BIN)/python
	@mkdir -p build && $(BIN)/python -m venv $(CUDA) && grep -v '^torch==' constraints.txt > $(CUDA)/constraints.txt
	@$(CUDA)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CUDA)/constraints.txt torch==2.11.0 --editable '.[train,dev]'
	@$(CUDA)/bin/python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
	OMP_NUM_THREADS=1 $(CUDA)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# The tests with each newer Python that pyproject.toml names, in a virtual environment of its own.
# pip fetches several GB for each where it finds no CPU build of torch.
PYTHONS := 3.12 3.13
python-versions:
	@status=0; found=; summary=; for version in $(PYTHONS); do \
		if ! python=$$(sh deploy/find-python.sh $$version); then result="is not on PATH or in pyenv, so nothing ran"; \
		elif $(MAKE) test VENV=build/python-$$version PYTHON="$$python"; then result="passed"; found=yes; \
		else result="failed"; found=yes; status=1; fi; \
		summary="$${summary}Python $$version $$result\n"; \
	done; \
	printf "$$summary"; test -n "$$found" && exit $$status

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "recserve needs Python 3.11 or newer; none was found on PATH (set PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) -m venv failed; on Debian and Ubuntu install the package python3-venv" >&2; exit 1; }

# torch goes first and alone: with its exact version named, pip takes a CPU build where one is at hand.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing recserve and its pinned dependencies (minutes the first time)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --editable '.[train,grammar]'
	@touch $@

$(DEV): $(RUNTIME)
	@echo "installing the development tools"
	@$(PIP) --editable '.[train,grammar,dev]' $$($(BIN)/python -m pip show torch | grep '^Requires:.*triton' >/dev/null || echo $(TRITON))
	@touch $@

$(DOCS): $(RUNTIME)
	@echo "installing the documentation tools"
	@$(PIP) --editable '.[docs]'
	@touch $@

$(FUZZ): $(DEV)
	@echo "installing the fuzzers"
	@$(PIP) --editable '.[fuzz]'
	@touch $@

$(MUTANTS): $(DEV)
	@echo "installing what draws mutants"
	@$(PIP) --editable '.[mutants]'
	@touch $@
