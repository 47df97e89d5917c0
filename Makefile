# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
CPU_VLLM := .venv-vllm/installed
VLLM_COMMAND := $(CURDIR)/.venv-vllm/bin/vllm serve
DEMO_MODEL := .cache/smollm2
# One gibibyte of KV cache, no usage report, no hub: what a CPU server needs here.
CPU_ENV := VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

.PHONY: demo demo-vllm test test-long proof check bench docs clean

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

$(CPU_VLLM): tests/real_vllm/cpu_vllm.py
	$(PYTHON) tests/real_vllm/cpu_vllm.py
	touch $@

demo: .venv/installed ## the main job on the built-in engine: Qwen3-32B on 8 H200s, simulated
	$(BIN)/autotune search studies/demo-sim.toml
	$(BIN)/autotune report demo-sim --write studies/demo-sim/report.md

demo-vllm: .venv/installed $(CPU_VLLM) ## the main job on real vLLM on the CPU
	$(CPU_ENV) $(BIN)/autotune search studies/cpu-smoke.toml --model $(DEMO_MODEL) --vllm-command '$(VLLM_COMMAND)'
	$(BIN)/autotune report cpu-smoke --write studies/cpu-smoke/report.md
	$(BIN)/autotune apply best --study cpu-smoke --to command

test: .venv/installed $(CPU_VLLM) check ## everything quick, with one short real-vLLM pass of each kind
	$(BIN)/python -m pytest -m 'not long and not proof and not bench and not real_gpu' --cov --cov-report=term:skip-covered

test-long: .venv/installed $(CPU_VLLM) ## kill points, soak, clusters, browser
	$(BIN)/python -m pytest -m 'long and not proof and not real_gpu' --timeout 1200

proof: .venv/installed $(CPU_VLLM) ## statistical tables and real-vLLM truths; figures go to docs/LOG.md
	$(BIN)/python -m pytest -m proof --timeout 7200 -s

check: .venv/installed ## lint, format, types, architecture, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py -p no:cacheprovider
	$(BIN)/python docs/generate.py --check

bench: .venv/installed $(CPU_VLLM) ## the load generator beside others, measured in one run
	-$(BIN)/python -m tests.bench.rivals
	$(BIN)/python -m pytest -m bench --timeout 3600 -s

docs: .venv/installed ## docs/cli.md and docs/schemas/ from the source
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .venv-vllm .venv-bench-* .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
