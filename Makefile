# Two commands: `make demo` and `make test`. Both set up what they need.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   := build/demo
# pytest -n 2 suits two cores; override with TESTS="-n 8" or TESTS="-k ledger".
TESTS  ?= -n 2

.PHONY: demo test test-slow check format clean help

help:
	@echo "make demo       a private stand-in for 1437 handwritten digits, evaluated, with a report"
	@echo "make test       the test suite (under five minutes on two cores)"
	@echo "make test-slow  what takes longer"
	@echo "make check      ruff, mypy, import contracts"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	@rm -rf $(DEMO)
	$(BIN)/understudy synth digits --epsilon 1 --ledger $(DEMO)/ledger.jsonl -o $(DEMO)/release
	$(BIN)/understudy evaluate $(DEMO)/release --protocol quick
	$(BIN)/understudy verify $(DEMO)/release --ledger $(DEMO)/ledger.jsonl
	@$(BIN)/understudy report $(DEMO)/release
	@echo "The release is in $(DEMO)/release; its pictures in $(DEMO)/release/contact_sheet.png"

test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(TESTS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build
