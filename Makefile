# make serve   a server on 127.0.0.1:30000     make serve MODEL=DIR HYBRID=S1 ARGS="--hybrid-grid 64"
# make gpu     what only a GPU can show, in four minutes: kernels, S1 against stock, times
# make proof   what proves the path that a GPU takes, without one; ends with a line a proof
# make test    ruff, mypy and every short test make test TESTS=tests/engine PYTEST="-x -k chat"
# make test-all   the same and the tests that are marked long
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
HYBRID ?= S1
HOST   ?= 127.0.0.1
PORT   ?= 30000
DEMO   := .demo-model
MODEL  ?= $(DEMO)
ARGS   ?=
TESTS  ?= tests
PYTEST ?=
WORKERS ?= 2

# An environment is good for one pyproject.toml in one checkout: an editable install points at its folder.
STAMP := $(VENV)/.sglang-hybrid-$(shell { cat pyproject.toml; pwd; } | sha256sum | cut -c1-16)
BIN   := $(VENV)/bin

.PHONY: help venv serve test test-all lint types tests proof gpu clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,5s/^# //p' Makefile

venv: $(STAMP)

# uv unpacks these ten gigabytes several times faster than pip, which may know an index that uv does not.

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off uv
	$(BIN)/uv pip install --quiet --no-cache --compile-bytecode --python $(BIN)/python --editable '.[test]' || \
	  $(BIN)/python -m pip install --quiet --progress-bar off --editable '.[test]'
	@rm -f $(VENV)/.sglang-hybrid-*
	@touch $@

$(DEMO)/config.json: | $(STAMP)
	$(BIN)/sglang-hybrid demo-model $(DEMO)

serve: $(STAMP) $(if $(filter $(DEMO),$(MODEL)),$(DEMO)/config.json)
	@printf '%s\n' '' \
	  'Starting $(MODEL) $(if $(HYBRID),under --hybrid-mem $(HYBRID),without the plugin) on http://$(HOST):$(PORT).' \
	  'When the log says "ready to roll", try twice in another terminal:' '' \
	  "  curl -s http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d '{" \
	  '    "model": "default", "max_tokens": 16, "temperature": 0,' \
	  "    \"messages\": [{\"role\": \"user\", \"content\": \"'\"\$$(seq -s ' ' 400)\"'\"}]}'" '' \
	  'The second answer is the same and reports usage.prompt_tokens_details.cached_tokens > 0.' \
	  '  curl -s http://$(HOST):$(PORT)/server_info    settings and state of the memory' \
	  '  curl -s http://$(HOST):$(PORT)/flush_cache    forget everything that is cached' ''
	exec $(BIN)/python -m sglang.launch_server --model-path $(MODEL) --host $(HOST) --port $(PORT) \
	  --enable-cache-report $(if $(HYBRID),--hybrid-mem $(HYBRID)) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST) $(TESTS)

# One after another even under make -j: the engines want all cores.
test: $(STAMP)
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory types
	$(MAKE) --no-print-directory tests

test-all: $(STAMP)
	$(MAKE) --no-print-directory test PYTEST="--long $(PYTEST)"

proof: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m proof $(PYTEST) tests

gpu: $(STAMP)
	$(BIN)/python -m bench.gpu

clean:
	rm -rf $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
