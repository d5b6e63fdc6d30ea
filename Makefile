# make sweep    a real search with the defaults: SmolLM2-135M, a built-in task, this machine
# make test     lint, types and tests
# ARGS="..."    further arguments, as in: make sweep ARGS="search.trials=16 'adapter.rank=choice(8,32)'"

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: sweep test install lint clean

sweep: $(VENV)/.plait
	$(BIN)/plait sweep $(ARGS)

install: $(VENV)/.plait

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

$(VENV)/.plait: pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/install.sh
	touch $@

$(VENV)/.test: pyproject.toml scripts/install.sh scripts/install_test_tools.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" EXTRAS="[test]" sh scripts/install.sh
	sh scripts/install_test_tools.sh
	touch $(VENV)/.plait $@

clean:
	rm -rf $(VENV) build dist
