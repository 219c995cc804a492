# Each verb sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
#
#   make test ARGS="tests/test_layers.py -k cycle"    ARGS goes on to the command behind the verb
#   make test PYTHON=python3.12                       the interpreter that .venv is made from
#   make gpu PY=python3                               use this interpreter as it is: no .venv, no install

PYTHON ?= python3
ARGS ?=
# Tests start a hundred processes: each would compile every file of ours again.
unexport PYTHONDONTWRITEBYTECODE

ifdef PY
RUN := $(PY)
SETUP :=
else
RUN := .venv/bin/python
SETUP := .venv/.installed
endif

PIP := .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt
TORCH = $(shell sed -n 's/^\(torch==[^[:space:];]*\).*/\1/p' constraints.txt)

.PHONY: help smoke test test-all clients check gpu bench train docs site visit dist clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST))

# Files that are quick, of every layer from casts to the trainer; what compiles is left to `make test`.
SMOKE := $(addprefix tests/, test_layers.py kernels/test_elements.py kernels/test_vectors.py kernels/test_delayed.py \
    kernels/test_norm.py comm tensor/test_contract.py optimizers/test_states.py test_recipe.py test_regions.py \
    functional/test_linear.py test_quantization.py test_delayed_scaling.py module/test_signatures.py \
    module/test_options.py module/test_boundary.py ops/test_basic.py attention/test_rope.py attention/test_multihead.py \
    moe/test_permutation.py moe/test_router.py test_cross_entropy.py convert/test_choice.py compat/test_shims.py \
    trainer/test_data.py)

# Two workers with a thread for each core each would wait for each other, and spin. Of all tests many wait for processes
# and packages, so that a third worker finds time on two cores.
smoke test test-all: export OMP_NUM_THREADS := 1

smoke: $(SETUP) ## the heart of every layer, in less than a minute
	$(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not slow and not compile" $(SMOKE) $(ARGS)

test: $(SETUP) ## the tests that need no GPU, without what is slow: what to run before a commit
	$(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not slow" $(ARGS)

test-all: $(SETUP) ## those, and all that is exhaustive and slow: what CI runs
	$(RUN) -m pytest -n 3 --dist worksteal -m "not gpu" $(ARGS)

# Programs of others on the installed wheels, the shim's too, in an environment of their own. What is built anew each time
# is Mezzotint; an older build beside it would go into the wheel. One thread, as in `train`.
clients: .venv-clients/.installed ## Megatron-Core, Accelerate, Lightning, transformers, compressed-tensors and peft, unchanged
	rm -rf build packages/transformer-engine-shim/build
	.venv-clients/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
	    --force-reinstall . packages/transformer-engine-shim
	cd tests/clients && OMP_NUM_THREADS=1 ../../.venv-clients/bin/python -m pytest -p no:cacheprovider $(ARGS)

check: $(SETUP) ## lint, format, types; ARGS goes to the linter
	$(RUN) -m ruff check $(ARGS)
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

gpu: $(SETUP) ## the tests that need a CUDA GPU
	$(RUN) -m pytest -m gpu $(ARGS)

bench: $(SETUP) ## measurements
	$(RUN) -m bench $(ARGS)

# One thread: operators this small gain nothing from a second, and wait long for a busy one.
train: $(SETUP) ## BF16 and four recipes side by side: a table and a figure, in minutes on two CPU cores
	$(RUN) -m mezzotint compare --threads 1 $(ARGS)

docs: $(SETUP) .venv-docs/.installed ## write the generated pages and figures of docs/, build the site into site/, and visit it
	mkdir -p docs
	$(RUN) -m bench conformance --write docs/conformance.md $(ARGS)
	$(RUN) -m dev.compatibility --write docs/compatibility.md
	$(RUN) -m docs.figures
	$(MAKE) visit

# A broken link, a page outside of the navigation or a name that cannot be found is an error (`strict` in mkdocs.yml).
site: .venv-docs/.installed ## build the site into site/ from the pages as they are
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

visit: $(SETUP) site ## build the site, and visit every page in Chromium at two widths
	$(RUN) -m dev.reference
	$(RUN) -m dev.visit

# The back end that is pinned there builds, too. Of two wheels, one from a clone and one from the source distribution,
# tests/test_packaging.py says that they are equal.
dist: .venv-dist/.installed ## the source distribution and the wheel of a release, in dist/, and checks of both
	rm -rf build dist
	.venv-dist/bin/python -m build --no-isolation
	.venv-dist/bin/python -m twine check --strict dist/*

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name .venv -prune -o -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# torch goes first and by its pinned version, so that nothing later picks another build of it.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	    sys.exit(None if v >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is %d.%d" % v[:2])'
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) -e '.[dev]'
	touch $@

.venv-clients/.installed: tests/clients/requirements.txt
	test -x .venv-clients/bin/pip || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q --disable-pip-version-check -r $<
	touch $@

.venv-docs/.installed: docs/requirements.txt
	test -x .venv-docs/bin/pip || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check -r $<
	touch $@

.venv-dist/.installed: dev/dist-requirements.txt
	test -x .venv-dist/bin/pip || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install -q --disable-pip-version-check -r $<
	touch $@
