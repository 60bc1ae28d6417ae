# Every target sets up .venv by itself when pyproject.toml changed since the last set-up.
PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= a red circle moving left quickly on a white background
SEED ?= 1

.PHONY: demo serve test check format clean

.venv/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/.ready
	$(BIN)/reelwright generate "$(PROMPT)" --seed $(SEED) --output demo.mp4

serve: .venv/.ready
	$(BIN)/reelwright serve

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Processes side by side have one thread each: more of them wait for each other on the same cores.
# A test that fails is tried once more, and the summary says so: many stop and kill live processes on a busy machine.
test: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not gpu and not alone' --reruns 1 --numprocesses auto --maxprocesses 4 --dist loadfile
	$(BIN)/pytest -m 'alone and not gpu' --reruns 1

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
