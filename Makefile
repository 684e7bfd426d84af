# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out

.PHONY: demo test check clean

demo: $(VENV)/.lab
	$(BIN)/slime-instrument demo --out $(OUT)

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# Real processes, Ray clusters and a browser share the machine with whatever else runs on it: what fails is tried
	# once more, alone. A fault that needs other tests before it passes then: read what failed the first time.
	$(BIN)/python -m pytest || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

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
