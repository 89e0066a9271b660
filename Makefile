# Two commands: `make demo` runs the main job on embedded data, `make test` does all checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint docs wheel findings gpu-test clean

demo: $(INSTALLED)
	$(BIN)/feddure compare --preset demo

test: lint docs $(VENV)/.installed-trackers
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The site, in site/; a warning is an error.
docs: $(INSTALLED) $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# sdist and wheel, in dist/.
wheel: $(INSTALLED)
	$(BIN)/python -m build --no-isolation

# The tables of README.md and docs/ that are made from results/, and FedTutor's figure.
findings: $(INSTALLED)
	$(BIN)/python tools/findings.py

# Only files with such tests: others import what a machine with a GPU need not have.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu --continue-on-collection-errors $$(grep -rl --include='test_*.py' 'mark.gpu' tests)

# Made anew only when the declared dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "feddure needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo 'installing into $(VENV): some minutes'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower,ray,onnx]'
	@touch $@

# Beside the others and only when asked for, so that the demo does not wait for them.
$(VENV)/.installed-docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.installed-trackers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mlflow,wandb]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
