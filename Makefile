# Two commands do everything on a machine that has Python 3.10 or newer and make:
#
#   make demo               run SSTA inside a small video transformer; pictures and a report go to demo/
#   make demo SIZE=720p     the same on the full canvas (NVIDIA GPU)
#   make test               the tests that need no GPU; make quick: the faster half of them
#   make bench              speed, memory and exactness on this machine, within a minute without a GPU, and what tuning would say
#
# Others: make compile, make mutants, make compat (every supported Triton), make gpu-test, make gate, make bits, make against, make soak, make sanitize, make lint, make wheel, make check-wheel, make hub, make clean.
# The first command makes .venv and installs into it, which takes minutes; later ones reuse it. The demo needs less than the tests.

PYTHON ?= python3
SIZE ?= small
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
# They hold for an environment installed from these very files: with what the demo needs, and with what everything else needs.
DEMO_STAMP := $(VENV)/installed-demo
STAMP := $(VENV)/installed
WHEEL_VENV := build/wheel-venv

HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
CPU_ONLY := --constraint constraints-cpu.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# torch by itself, so that the CPU index is asked for nothing else.
define install_cpu_torch
	$(1)/bin/python -m pip install --quiet --no-deps --retries 2 --extra-index-url $(TORCH_CPU_INDEX) $(CPU_ONLY) torch
endef

.PHONY: help demo test quick compile mutants gpu-test gate bits against soak sanitize bench lint wheel check-wheel hub clean compat
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#  *make/make/p' Makefile

demo: $(DEMO_STAMP)
	$(BIN)/python examples/demo.py --size $(SIZE)

# Not python -m pytest, which puts the current folder on sys.path, where kernels/ would hide the package that diffusers asks for.
# One thread a worker: the tests are many and small. A worker that is done takes over what another has left, so that neither idles.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

# Without what takes seconds a test: whole models compiled, whole layers through Triton's interpreter, kernels through the compiler.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not gpu and not slow"

gpu-test: $(STAMP)
	$(BIN)/pytest -m gpu

# What the compiler makes of the kernels, for kinds of GPUs that are not there.
compile: $(STAMP)
	$(BIN)/python tests/tools/compile_kernels.py

# Deliberate faults in the sources, each of which the tests must catch.
mutants: $(STAMP)
	$(BIN)/python tests/tools/mutants.py

# Decibels to dense videos, beside the last release's; trains a small model when first called. ESTIMATES=MODULE:FUNCTION holds others beside it.
gate: $(STAMP)
	$(BIN)/python benchmark/gate.py$(if $(ESTIMATES), --estimate $(ESTIMATES))

# Two checkouts, OLD=DIR and NEW=DIR (this one): ten thousand random calls bit by bit; speed, memory and decibels in turns. To make one:
# mkdir -p build/old && git archive COMMIT ssta kernels pipelines src | tar x -C build/old
NEW ?= .
old_named = $(if $(OLD),,$(error OLD must name the other checkout: make bits OLD=build/old))@:
bits: $(STAMP)
	$(old_named)
	$(BIN)/python tests/tools/bits.py $(OLD) $(NEW)

against: $(STAMP)
	$(old_named)
	$(BIN)/python benchmark/against.py $(OLD) $(NEW)

# Random calls by four processes on one GPU, again and again: each must have the bits of its first time.
soak: $(STAMP)
	$(BIN)/python tests/tools/soak.py

# Every family of kernels once, under compute-sanitizer.
sanitize: $(STAMP)
	$(BIN)/python tests/tools/sanitize.py

bench: $(STAMP)
	$(BIN)/python benchmark/bench_kernels.py
	$(BIN)/python benchmark/bench_layer.py
	$(BIN)/python benchmark/bench_vsa.py
	$(BIN)/python benchmark/bench_host.py
	$(BIN)/python benchmark/bench_pipeline.py
	$(BIN)/python benchmark/bench_recipe.py$(if $(HAS_GPU),, --model wan)
	$(BIN)/torchrun --standalone --nproc-per-node=$(if $(HAS_GPU),gpu,2) benchmark/bench_parallel.py
	$(BIN)/python benchmark/bench_errors.py
	$(BIN)/python benchmark/bench_streaming.py
	$(BIN)/python benchmark/bench_tokens.py
	$(BIN)/python benchmark/bench_interfaces.py
	$(BIN)/python benchmark/bench_quality.py --limit 8
	$(BIN)/python benchmark/bench_grid.py$(if $(HAS_GPU),, --only "tile 1x4x4")
	$(BIN)/python benchmark/tune.py
	$(BIN)/python benchmark/table.py --check

# The kernels under every Triton they support: the Hopper ones compiled, the portable ones interpreted.
compat: $(STAMP)
	for version in 3.6 3.7 3.8 3.9; do \
		$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-$$version "triton==$$version.*" && \
		PYTHONPATH=$(CURDIR)/build/triton-$$version OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto tests/kernels \
			tests/interfaces/test_compressed_blocks.py tests/interfaces/test_native_sparse_attention.py tests/interfaces/test_short_blocks.py \
			tests/interfaces/test_seer_attention.py tests/interfaces/test_seer_decode.py && \
		PYTHONPATH=$(CURDIR)/build/triton-$$version $(BIN)/python tests/tools/compile_kernels.py || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# build/ is emptied first: setuptools would pack files left there by an earlier build.
wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The wheel in an environment of its own, with torch for CPU and without the extras.
check-wheel: wheel
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(call install_cpu_torch,$(WHEEL_VENV))
	$(WHEEL_VENV)/bin/python -m pip install --quiet $(CPU_ONLY) dist/ssta-*.whl
	cd $(WHEEL_VENV) && bin/python $(CURDIR)/tests/tools/check_wheel.py

# What the Hugging Face Hub holds of a kernel, in build/hub (docs/plugs.md); REPO=organisation/name is where it is to go.
hub:
	$(PYTHON) hub/layout.py $(if $(REPO),--repo $(REPO))

$(DEMO_STAMP): setup.py pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "ssta needs Python 3.10 or newer, got %d.%d" % v[:2])'
	@echo "First, and once: an environment in $(VENV)/ with torch, triton, diffusers, transformers and matplotlib. That is about 2 GB and"
	@echo "takes some minutes, most of them to download. rm -r $(VENV) takes it away again."
ifeq ($(HAS_GPU),yes)
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		echo "NVIDIA GPU: using the torch that $(PYTHON) already has"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		echo "NVIDIA GPU: installing the newest torch, some GB more"; $(PYTHON) -m venv $(VENV); \
	fi
else
	@echo "No NVIDIA GPU: torch for CPU."
	@$(PYTHON) -m venv $(VENV)
	@$(call install_cpu_torch,$(VENV))
endif
	@$(BIN)/python -m pip install --quiet $(if $(HAS_GPU),,$(CPU_ONLY)) --editable '.[triton,pipelines,plot]'
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "Once more: what tests and checks need beside it; a minute or more."
	@$(BIN)/python -m pip install --quiet $(if $(HAS_GPU),,$(CPU_ONLY)) --editable '.[triton,pipelines,plot,dev]'
	@touch $@

clean:
	rm -rf build dist demo src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
