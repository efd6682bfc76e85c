# Everything a contributor or a first user types. `make help` lists it.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2

# One thread a process: two test workers or two stages on two cores are faster that way, and results repeat.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
export DO_NOT_TRACK = 1
export MLFLOW_DISABLE_TELEMETRY = true
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow check lint types imports lock clean stack stack-down

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(BIN)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11; run make PYTHON=python3.11"; exit 1; }
	@echo "installing the packages of requirements.lock into $(VENV): 1 to 2 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

install: $(BIN)/.installed ## make .venv from requirements.lock and install the project into it

demo: install ## one night on data and a model made here; again for a second night
	@# 3: judged and kept, which is a good night's end as well.
	OMP_NUM_THREADS= $(BIN)/nightjar run configs/quickstart.yaml || [ $$? -eq 3 ]
	@echo "'. $(BIN)/activate' puts the command nightjar on your PATH"

stack: install ## PostgreSQL, Prefect, MLflow and two workers as native processes on loopback
	@OMP_NUM_THREADS= $(BIN)/python -m flows.stack up

stack-down: ## end them; the data stay
	@[ ! -x $(BIN)/python ] || $(BIN)/python -m flows.stack down

test: install ## all quick tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not integration" --durations 15

test-slow: install ## real models and long loops
	$(BIN)/python -m pytest -m slow

check: install lint types imports test ## what CI runs

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

lock: ## write requirements.lock from a clean install of the newest versions that fit pyproject.toml
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet "setuptools>=77" ".[dev]"
	.venv-lock/bin/python -m pip freeze --all --exclude pip --exclude nightjar-rlhf \
		| sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > requirements.lock
	rm -rf .venv-lock

clean: ## remove caches and build products; never .nightjar
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
