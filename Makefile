# Each target works from nothing: it first brings .venv up to date, which a finished one makes a no-op.
VENV ?= .venv
BIN := $(VENV)/bin
RECIPE ?= grpo_tiny
# megatron or fsdp; empty for the recipe's own.
TRAINER ?=
# More key=value overrides of the recipe, or more arguments for pytest:
#   make demo ARGS="algorithm.steps=5"     make test ARGS="tests/config -x"
ARGS ?=
# Of a GPU host, with rlrefit, pytest and pytest-timeout, and the engines and trainers that are to be tested.
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-sglang test-sglang-0.5.17 test-sglang-0.5.23 test-engines test-trl test-gpu docs lint typecheck format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the locked requirements and rlrefit (3.3 GB to download the first time)
	@requirements/setup.sh $(VENV)

# Each time a run of its own: what an earlier one has learned stays where it is.
DEMO = $(basename $(notdir $(RECIPE)))$(if $(TRAINER),_$(TRAINER))_$(shell date +%Y%m%d_%H%M%S)

demo: setup ## train the tiny model with GRPO on the CPU (RECIPE=…, TRAINER=fsdp, ARGS="key=value …")
	$(BIN)/rlrefit train recipe=$(RECIPE) $(if $(TRAINER),trainer=$(TRAINER)) name=$(DEMO) $(ARGS)

test: setup ## run the tests (ARGS="…" goes to pytest)
	$(BIN)/python -m pytest $(ARGS)

test-all: setup ## run the tests, and those that make test leaves out (ARGS="…" goes to pytest)
	$(BIN)/python -m pytest -m "" $(ARGS)

# Of the newest release: all but GRPO and DAPO, and what needs no SGLang.
SGLANG_TESTS := -k "not vllm and not transformers and not trtllm" \
	$(addprefix tests/engines/test_,contract.py two_environments.py) \
	$(addprefix tests/sglang/test_,drafters.py eagle.py eagle_live.py families.py fp8.py fp8_buckets.py int4.py kv_scales.py real_engine.py) tests/bench/test_live_sglang.py
# Beside .venv, since vLLM and frameworks look for SGLang and behave differently where they find it.
test-sglang: test-sglang-0.5.17 test-sglang-0.5.23 ## run the tests that need SGLang's own code, on the CPU (1 GB to download the first time)

test-sglang-0.5.17: setup
	@requirements/setup.sh --sglang .venv-sglang
	.venv-sglang/bin/python -m pytest $(or $(ARGS),tests/engines tests/sglang tests/bench/test_live_sglang.py tests/verl_adapter/test_sglang_rollouts.py)

test-sglang-0.5.23: setup
	@requirements/setup.sh --sglang 0.5.23
	.venv-sglang-0.5.23/bin/python -m pytest $(or $(ARGS),$(SGLANG_TESTS))

# The newest release, and one between it and the one of .venv. The trainer of the test with two environments is in .venv.
ENGINES := 0.26 0.32
VLLM_TESTS := $(addprefix tests/vllm/,vllm_running $(addprefix test_vllm_,connectors.py flashinfer_experts.py int4_experts.py layouts.py names.py preemption.py releases.py start.py)) \
	tests/qat/test_vllm_kernels.py

test-engines: setup ## run the tests of engines with other releases of vLLM, on the CPU (1.1 GB to download the first time)
	@for series in $(ENGINES); do requirements/setup.sh --vllm $$series || exit; done
	@for series in $(ENGINES); do \
		echo "vLLM $$series:"; \
		.venv-vllm-$$series/bin/python -m pytest -m "" $(or $(ARGS),-k "not transformers and not sglang" tests/engines $(VLLM_TESTS)) || exit; \
	done

# Beside .venv, since verl imports from TRL, where it finds it, what TRL no longer has.
test-trl: setup ## run the tests that need TRL, on the CPU (1 MB to download the first time)
	@requirements/setup.sh --trl .venv-trl
	.venv-trl/bin/python -m pytest $(or $(ARGS),tests/trl_adapter)

# Not of .venv, whose vLLM is the CPU's: a GPU host has its own torch, Transformer Engine, vLLM and SGLang.
test-gpu: ## run the GPU tests that this host and the packages of PYTHON allow; it ends with what was left out
	@$(PYTHON) requirements/fit_for_gpu_tests.py
	$(PYTHON) -m pytest tests/gpu $(ARGS)

docs: ## build these pages as a site in site/ (20 MB to download the first time)
	@requirements/setup.sh --docs .venv-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

lint: setup typecheck ## ruff, the format, and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup ## mypy --strict on integration/
	$(BIN)/python -m mypy -p integration

format: setup ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
