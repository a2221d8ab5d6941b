# make demo   train a private model on real digits (sets up .venv first)
# make quick  the unit tests, without those that take long or start Flower
# make test   checks and all tests
# make docs   the docs site, in build/site; a broken link is an error
# make mutants  plant known bugs one by one: no test may miss one (before a release; some twenty minutes)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# A process a core, and one for the tests that start Flower, which wait much; see tests/conftest.py.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# The tests start hundreds of processes, which read compiled modules where these may be written.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) --dist worksteal

.PHONY: demo quick test check format docs mutants clean

demo: $(STAMP)
	$(BIN)/flower-dp run .

quick: $(STAMP)
	$(PYTEST) -m "not slow and not flwr_run"

test: check
	$(PYTEST)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The variable turns off a notice of mkdocs-material.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

mutants: $(STAMP)
	$(BIN)/python tests/mutants/plant.py

# torch comes first, by its pinned version alone: other packages ask for it loosely. torchvision comes with it: builds must be alike.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch torchvision
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# What the site needs, without torch, Ray and data sets.
$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
