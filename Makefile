# `make help` lists the targets. All that is needed beforehand is Python 3.11 or newer, with its venv module.

PYTHON ?= python3
# Processes that run tests side by side.
JOBS ?= 2
# `pinned`: the versions of constraints.txt. `latest`: the same, but the newest torch and torchvision, in an environment of its own.
TORCH ?= pinned

# Where an image keeps Python from writing bytecode, each process would compile torch anew.
export PYTHONDONTWRITEBYTECODE :=

PINNED_TORCH := 2.11.0
# Random programs that `make fuzz` makes.
SEEDS ?= 0:5000
# Random graphs that `make optima` makes.
GRAPHS ?= 0:200
# Seconds that `make fuzz-parsers` gives each parser.
SECONDS ?= 60

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
.PHONY: help venv demo test lint lines check schemas schemas-check docs pictures examples scripts zoo zoo-compiled bench growth plans optima advice sizes drawings fuzz fuzz-parsers leaks validate-gpu accuracy compiled compiled-gpu cuda-graphs generations operators programs published published-batches constraints clean mutants releases sample step-time ranks serving

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 makes the environment with that Python; TORCH=latest takes the newest torch instead of $(PINNED_TORCH)"

venv: $(READY) ## make the environment, .venv (made anew when pyproject.toml or constraints.txt change)

demo: $(READY) ## analyse ResNet-50, and a Llama on an H100, neither of which needs a GPU
	$(BIN)/fxmem analyze torchvision:resnet50 --input 32x3x224x224
	$(BIN)/fxmem analyze hf:LlamaForCausalLM --set num_hidden_layers=2 --input input_ids:1x2048:int64 --input labels:1x2048:int64 --target h100

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

SAMPLE := tests/hardware tests/simulation/kernels tests/simulation/program tests/memory/test_allocator.py tests/docs

sample: $(READY) ## run the tests of what differs between releases of torch, and with TORCH=latest all that README and docs show
	$(BIN)/python -m pytest -n $(JOBS) $(SAMPLE)

lint: $(READY) ## linter, formatter, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict fxmem
	$(BIN)/lint-imports --no-logo --no-cache

lines: $(READY) ## lines of the package by room
	$(BIN)/python .ci/lines.py

check: lint test schemas-check docs examples ## all that must pass before a change is taken

schemas: $(READY) ## write schemas/ from the records
	$(BIN)/python -c 'import pathlib, fxmem.records.schemas; fxmem.records.schemas.write(pathlib.Path("schemas"))'

schemas-check: $(READY) ## fail when schemas/ is not what the records say
	rm -rf $(VENV)/schemas
	$(BIN)/python -c 'import pathlib, fxmem.records.schemas; fxmem.records.schemas.write(pathlib.Path("$(VENV)/schemas"))'
	diff -r schemas $(VENV)/schemas

docs: $(READY) ## build the documentation into .venv/docs; broken links and missing docstrings fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir $(abspath $(VENV))/docs

pictures: $(READY) ## draw the pictures of README and docs/ anew (TORCH=latest: they show the newest)
	$(BIN)/python docs/pictures.py docs/images

examples: $(READY) ## run every script in examples/; what they write goes to a folder of the environment
	@rm -rf $(VENV)/examples && mkdir -p $(VENV)/examples
	@cd $(VENV)/examples && printf '%s\0' $(CURDIR)/examples/*.py | xargs -0 -n 1 -P $(JOBS) sh -c \
		'said=$$($(abspath $(BIN))/python "$$0" 2>&1); code=$$?; printf "examples/%s\n%s\n" "$${0##*/}" "$$said"; exit $$code'

scripts: $(READY) ## run public training scripts untouched, fetched from GitHub (SCRIPTS_ARGS=--python ... with what they import)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m benchmarks.programs.scripts.run $(SCRIPTS_ARGS)

zoo: $(READY) ## analyse every architecture of the model collections
	$(BIN)/python -m benchmarks.zoo.zoo

zoo-compiled: $(READY) ## analyse the zoo's sample as compiled (about half an hour)
	$(BIN)/python -m benchmarks.zoo.zoo --quick --compile --limit 600

bench: $(READY) ## time the analysis
	$(BIN)/python -m benchmarks.speed.speed

growth: $(READY) ## how the analysis, and all that is done with a profile, grow with the step (about an hour)
	$(BIN)/python -m benchmarks.speed.growth

plans: $(READY) ## how good and how fast the planners of checkpoints are, beside other tools' (about two hours; goes on where it stopped)
	$(BIN)/python -m benchmarks.planning.planning_speed
	$(BIN)/python -m benchmarks.planning.plans $(PLANS_ARGS)

optima: $(READY) ## how often plans of small random graphs are the cheapest there are, by exhaustive search; GRAPHS=0:200 says which
	$(BIN)/python -m benchmarks.planning.optima $(GRAPHS)

advice: $(READY) ## what each change is worth for well-known models
	$(BIN)/python -m benchmarks.planning.advice

sizes: $(READY) ## the largest batch of well-known models, and that the next does not fit
	$(BIN)/python -m benchmarks.planning.max_batch

drawings: $(READY) ## the graphs of large models: time, and whether anything overlaps
	$(BIN)/python -m benchmarks.speed.drawings

fuzz: $(READY) ## predict and run thousands of random programs; SEEDS=0:5000 says which
	FXMEM_FUZZ=$(SEEDS) $(BIN)/python -m pytest -n $(JOBS) tests/validation/test_fuzz.py

fuzz-parsers: $(READY) ## give the parsers texts that atheris makes (pip install atheris), SECONDS=60 each
	$(BIN)/python -m tests.fuzzing.parsers --seconds $(SECONDS) --found $(VENV)/fuzz-found

step-time: $(READY) ## fit estimated step times to published ones, and judge them on models that were not fitted
	$(BIN)/python -m benchmarks.published.step_time

leaks: $(READY) ## 500 analyses in one process, whose memory must stay flat
	$(BIN)/python -m benchmarks.speed.leaks

mutants: $(READY) ## put small bugs into the package, one at a time, and see which the tests miss (hours; goes on where it stopped today)
	$(BIN)/python -m benchmarks.accuracy.mutants $(MUTANTS_ARGS)

releases: $(READY) ## ask torch's own C++, on a stand-in for a card, what it allocates; with TORCH=latest the newest (needs gcc)
	$(BIN)/python -m benchmarks.releases

validate-gpu: $(READY) ## measure steps on this machine's NVIDIA card, under nine minutes
	$(BIN)/python -m benchmarks.accuracy.gpu $(GPU_ARGS)

accuracy: $(READY) ## hold predictions against every measurement that is kept; needs no card
	$(BIN)/python -m benchmarks.accuracy.accuracy $(ACCURACY_ARGS)

compiled: $(READY) ## hold predicted compiled steps of a dozen models against real ones on the CPU (about eight minutes)
	$(BIN)/python -m benchmarks.programs.compiled_cpu

cuda-graphs: $(READY) ## hold predicted CUDA graphs against torch's own on a stand-in for a card (about a minute; needs gcc)
	$(BIN)/python -m benchmarks.releases.cuda_graphs

compiled-gpu: $(READY) ## predict the compiled steps that an H100 ran (about five minutes); needs no card
	$(BIN)/python -m benchmarks.accuracy.compiled $(COMPILED_ARGS)

programs: $(READY) ## predict and measure two hundred programs of many kinds on the CPU (about six minutes)
	$(BIN)/python -m benchmarks.programs.programs

generations: $(READY) ## hold generations of transformers against real ones on the CPU (about five minutes); goes on where it stopped today
	$(BIN)/python -m benchmarks.programs.generations

operators: $(READY) ## predict and measure every operator of torch's own list on the CPU; goes on where it stopped today
	$(BIN)/python -m benchmarks.programs.operators

published: $(READY) ## hold predictions against published measurements of real cards; goes on where it stopped today
	$(BIN)/python -m benchmarks.published $(PUBLISHED_ARGS)

published-batches: $(READY) ## hold timm's largest batches on an RTX 3090 against predictions (hours; goes on where it stopped today)
	$(BIN)/python -m benchmarks.published.batches $(PUBLISHED_ARGS)

constraints: $(READY) ## resolve constraints.txt anew, to the newest versions around the pinned torch
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

serving: $(READY) ## what a serving engine has left, beside what vLLM logged; needs no card
	$(BIN)/python -m benchmarks.published.serving

ranks: $(READY) ## one rank with real tensors against its prediction, in twelve configurations
	$(BIN)/python -m benchmarks.programs.ranks
