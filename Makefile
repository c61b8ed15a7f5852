# make smoke        run the whole path on this machine, without a GPU
# make test         the whole test suite that runs without a GPU
# Both take SGLANG=<release> (each release has its own environment in .venv/<release>/) and ARGS="...".
SGLANG ?= 0.5.23
ARGS ?=
BIN := .venv/$(SGLANG)/bin

.PHONY: setup smoke test lint docs wheel constraints clean

setup:
	@scripts/setup.sh $(SGLANG)

smoke: setup
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  echo "There is a GPU here: 'make smoke ARGS=\"--device cuda\"' runs real SGLang servers on it." >&2; fi
	@$(BIN)/sglang-dspark-cp smoke $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy python/sglang_dspark_cp/core python/sglang_dspark_cp/hooks

docs: setup
	$(BIN)/sglang-dspark-cp hooks markdown > docs/hooks.md

wheel: setup
	$(BIN)/uv build --quiet --wheel --out-dir dist

constraints:
	@{ echo "# Versions of the environment that the tests ran in: SGLang $(SGLANG), Linux x86-64."; \
	   echo "# Renew with: make constraints SGLANG=$(SGLANG)"; \
	   $(BIN)/uv pip freeze --quiet --python $(BIN)/python --exclude-editable | grep -Evi '^(pip|uv|setuptools)==' | sort; \
	} > constraints/$(SGLANG).txt

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
