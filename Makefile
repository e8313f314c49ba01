# Two commands on a fresh machine: `make demo` and `make test`. Both build .venv from constraints.txt first.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

TORCH  ?=
OTHER  := .venv-torch-$(TORCH)

.PHONY: demo test test-all test-torch style types lint docs format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# What is long is left out, and properties try fewer examples.
test: $(READY) style
	$(call checked,-m "not long" --hypothesis-profile quick)

# What CI runs.
test-all: $(READY) style
	$(call checked,)

# All tests with another release of torch, in an environment of its own: make test-torch TORCH=2.12.1. Not part of CI's
# usual run. torch goes in last, whatever the package admits: to see what a release that it does not admit yet changes.
test-torch:
	$(if $(TORCH),,$(error which release of torch? make test-torch TORCH=2.12.1))
	$(MAKE) $(OTHER)/.ready VENV=$(OTHER)
	$(OTHER)/bin/python -m pip install --quiet "torch==$(TORCH)"
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n 2 --dist worksteal

# mypy runs beside the tests, and what it finds is printed after them. Two processes of one thread each: on two cores
# that takes half the time of one process of two. The one that has nothing left takes over from the other, and takes
# neighbours: fixtures are made once or twice, no file is waited for.
define checked
@mkdir -p out; $(BIN)/mypy > out/mypy.txt 2>&1 & types=$$!; \
OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(1); tests=$$?; \
wait $$types || { cat out/mypy.txt; exit 1; }; exit $$tests
endef

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir out/doctrees docs out/site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes in first and alone: asked for by exact version it is the small CPU build, and everything
# after it finds the requirement already met. hatchling is in the constraints too, so the package is
# built without a second, isolated environment.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet hatchling editables -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache
