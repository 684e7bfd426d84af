# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out
WORKERS ?= 2

.PHONY: demo test test-full lint clean

demo: $(VENV)/.lab
	$(BIN)/slime-instrument demo --out $(OUT)

# Two processes, files that take longest first (tests/conftest.py); then what measures time, with nothing beside it.
test: lint
	$(BIN)/python -m pytest -m "not full and not alone" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m "alone and not full"

# All of it: further Ray routes and Python versions, every extra in an environment of its own, five minutes of odd values,
# the whole fault matrix.
test-full: lint
	$(BIN)/python -m pytest -m "not alone" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m alone
	$(BIN)/python -m tests.fuzz.values --seconds 300
	$(BIN)/python -m tests.faults.matrix

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry slime_instrument tools

# torch first and pinned: on its own it resolves to a CPU build where one is offered, and nothing later replaces it.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	touch $@

$(VENV)/.lab: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[analysis,report,view,lab]'
	touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(BIN)/python -m pip install --quiet -e '.[analysis,report,view,lab,dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OUT) build dist
