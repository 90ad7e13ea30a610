# Two commands on a fresh machine: make demo, make test. Neither needs root.

VENV := .venv
export PYTHON
# a module is compiled once, not anew by every process that a test starts
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# tests run side by side: one worker a core, and not more than memory for a torch each allows
WORKERS := -n auto --maxprocesses 8 --dist worksteal

# what needs DeepSpeed has an environment of its own: beside accelerate, transformers would load it in every test
DEEPSPEED := .venv-deepspeed

.PHONY: help demo install test test-sample test-full test-deepspeed soak mutants lint format clean

help:
	@echo "make demo       install, then train a small classifier offline on the CPU"
	@echo "make test       the test suite (about 6 minutes on 2 cores)"
	@echo "make test-sample  slow tests of one file in four, of others at another commit"
	@echo "make test-full  the test suite and all slow tests (about 40 minutes on 2 cores)"
	@echo "make test-deepspeed  what needs the package deepspeed, in an environment of its own"
	@echo "make soak       fifty kills of a run on four ranks, any process at any time (10 minutes at most)"
	@echo "make mutants    plant faults in a copy of the source, and see whether tests find them"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff format the code and mend what it can"
	@echo "make clean      remove the environment and the tools' caches"

demo: install
	@$(BIN)/paceline demo

install: $(INSTALLED)

# made anew when what is installed changes
$(INSTALLED): pyproject.toml constraints.txt scripts/install
	@scripts/install $(VENV)
	@touch $@

test: install
	$(BIN)/python -m pytest -m "not slow" $(WORKERS)

# slow tests start processes of their own: one thread each
test-sample: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --one-file-in 4 $(WORKERS)

test-full: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(WORKERS)

test-deepspeed: $(DEEPSPEED)/installed
	$(DEEPSPEED)/bin/python -m pytest -m deepspeed tests/parity tests/distributed tests/unit/test_recipes.py

$(DEEPSPEED)/installed: pyproject.toml constraints.txt scripts/install
	@scripts/install $(DEEPSPEED)
	@DS_BUILD_OPS=0 $(DEEPSPEED)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
		--constraint constraints.txt --editable '.[deepspeed]'
	@touch $@

soak: install
	$(BIN)/python -m tests.soak --kills 50 --seconds 600

mutants: install
	$(BIN)/python -m tests.mutants --jobs $(shell getconf _NPROCESSORS_ONLN)
	$(BIN)/python -m tests.mutants.check

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(DEEPSPEED) .mypy_cache .ruff_cache build dist
