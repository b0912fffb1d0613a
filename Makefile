# `make help` lists the targets. All that is needed beforehand is Python 3.11 or newer, with its venv module.

PYTHON ?= python3
# Processes that run tests side by side.
JOBS ?= 2
# `pinned`: the versions of constraints.txt. `latest`: the same, but the newest torch and torchvision, in an environment of its own.
TORCH ?= pinned

# Where an image keeps Python from writing bytecode, each process would compile torch anew.
export PYTHONDONTWRITEBYTECODE :=

PINNED_TORCH := 2.11.0

ifeq ($(TORCH),pinned)
VENV := .venv
else ifeq ($(TORCH),latest)
VENV := .venv-latest
else
$(error TORCH is `pinned` or `latest`, not `$(TORCH)`)
endif

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DELETE_ON_ERROR:
.PHONY: help venv demo test truth sample lint lines refusals check schemas schemas-check docs pictures examples published accuracy validate-gpu constraints clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make -C benchmarks help lists what measures and compares; CONTRIBUTING.md names the targets that are not here"
	@echo "  PYTHON=python3.12 makes the environment with that Python; TORCH=latest takes the newest torch instead of $(PINNED_TORCH)"

venv: $(READY) ## make the environment, .venv (made anew when pyproject.toml or constraints.txt change)

demo: $(READY) ## analyse ResNet-50, and a Llama on an H100, neither of which needs a GPU
	$(BIN)/fxmem analyze torchvision:resnet50 --input 32x3x224x224
	$(BIN)/fxmem analyze hf:LlamaForCausalLM --set num_hidden_layers=2 --input input_ids:1x2048:int64 --input labels:1x2048:int64 --target h100

# A module's tests run in one process, so that what they share is made once.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadscope

test: $(READY) ## run the tests that every change runs: a few minutes on two cores
	$(PYTEST) -m "not truth" $(PYTEST_ARGS)

# Their processes wait for processes of their own a third of the time, so three share two cores.
truth: $(READY) ## run the long tests: real ranks, torch's own compiler, the model collections, published figures
	$(PYTEST) -n $(shell expr $(JOBS) \* 3 / 2) --no-loadscope-reorder -m truth $(PYTEST_ARGS)

# What a release of torch can change. Each page is a test, and any of them may go to any process.
SAMPLE := tests/hardware tests/simulation/kernels $(addprefix tests/simulation/program/test_,kinds.py made_up.py obstacles.py owners.py program.py read_backs.py) tests/memory/test_allocator.py

sample: $(READY) ## run the tests of what differs between releases of torch, and with TORCH=latest all that README and docs show
	$(PYTEST) -m "not truth" $(SAMPLE)
	$(PYTEST) --dist worksteal tests/docs

lint: $(READY) ## linter, formatter, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict fxmem
	$(BIN)/lint-imports --no-logo --no-cache

# Lines of the package by room.
lines: $(READY)
	$(BIN)/python .ci/lines.py

# The combinations that the command line refuses.
refusals: $(READY)
	$(BIN)/python .ci/refusals.py

check: lint test truth schemas-check docs ## all that must pass before a change is taken

schemas: $(READY) ## write schemas/ from the records
	$(BIN)/python -c 'import pathlib, fxmem.records.schemas; fxmem.records.schemas.write(pathlib.Path("schemas"))'

# Fails when schemas/ is not what the records say.
schemas-check: $(READY)
	rm -rf $(VENV)/schemas
	$(BIN)/python -c 'import pathlib, fxmem.records.schemas; fxmem.records.schemas.write(pathlib.Path("$(VENV)/schemas"))'
	diff -r schemas $(VENV)/schemas

docs: $(READY) ## build the documentation into .venv/docs; broken links and missing docstrings fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir $(abspath $(VENV))/docs

# Draws the pictures of README and docs/ anew (TORCH=latest: they show the newest).
pictures: $(READY)
	$(BIN)/python docs/pictures.py docs/images

examples: $(READY) ## run every script in examples/; what they write goes to a folder of the environment
	@rm -rf $(VENV)/examples && mkdir -p $(VENV)/examples
	@cd $(VENV)/examples && printf '%s\0' $(CURDIR)/examples/*.py | xargs -0 -n 1 -P $(JOBS) sh -c \
		'said=$$($(abspath $(BIN))/python "$$0" 2>&1); code=$$?; printf "examples/%s\n%s\n" "$${0##*/}" "$$said"; exit $$code'

validate-gpu: $(READY) ## measure steps on this machine's NVIDIA card, under nine minutes
	$(BIN)/python -m benchmarks.accuracy.gpu $(GPU_ARGS)

accuracy: $(READY) ## hold predictions against every measurement that is kept; needs no card
	$(BIN)/python -m benchmarks.accuracy.accuracy $(ACCURACY_ARGS)

published: $(READY) ## hold predictions against published measurements of real cards; goes on where it stopped today
	$(BIN)/python -m benchmarks.published $(PUBLISHED_ARGS)

# Resolves constraints.txt anew, to the newest versions around the pinned torch.
constraints: $(READY)
	echo 'torch==$(PINNED_TORCH)' | $(BIN)/uv pip compile pyproject.toml --extra dev --constraints - --output-file constraints.txt \
		--universal --python-version 3.11 --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links \
		--custom-compile-command 'make constraints' --quiet

clean: ## remove the environments and what the tools left behind
	rm -rf .venv .venv-latest build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

define new-environment
@$(PYTHON) -c 'import sys; sys.exit("fxmem needs Python 3.11 or newer, not %d.%d: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
@echo 'making $(@D); torch brings its CUDA libraries, so the first time takes a while'
$(PYTHON) -m venv --clear $(@D)
sed -n '/^uv==/,/# via/p' constraints.txt > $(@D)/uv.txt
$(@D)/bin/python -m pip install --quiet --require-hashes --requirement $(@D)/uv.txt
endef

# uv is several times faster, but does not read pip's configuration: behind a mirror that only pip knows, pip does it.
install = $(@D)/bin/uv pip install --quiet --python $(@D)/bin/python $(1) || $(@D)/bin/python -m pip install --quiet $(1)

.venv/.ready: pyproject.toml constraints.txt
	$(new-environment)
	$(call install,--require-hashes --requirement constraints.txt)
	$(call install,--no-deps --no-build-isolation --editable .)
	touch $@

# The packages that torch pins to its own release are left free; hashes go, because what is free has none.
.venv-latest/.ready: pyproject.toml constraints.txt
	$(new-environment)
	sed -n 's/^\([a-z0-9][^\\]*[^\\ ]\).*/\1/p' constraints.txt | grep -vE '^(torch|torchvision|triton|setuptools|cuda-[a-z]+|nvidia-[a-z0-9-]+)==' > $(@D)/constraints.txt
	$(call install,--constraint $(@D)/constraints.txt --editable '.[dev]')
	touch $@
