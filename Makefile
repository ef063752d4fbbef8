# Everything runs from .venv, which make sets up from this machine's own Python; `make` lists the targets.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Take the Pythons that are here; download none.
export UV_PYTHON_DOWNLOADS := never

PYTHON_VERSIONS := 3.11 3.12 3.13
SOURCES := $(wildcard fluster bus services tests examples benchmarks)
FAST_TESTS := $(wildcard tests/pure tests/component)
BIN := .venv/bin
SETUP := .venv/.setup-done
UV := .venv/.uv-done
ZEPHYR := .venv/.zephyr-done
TYPES := .venv/.types-done
# Before Python 3.12 there is an older Zephyr. It has the same tests, but for those on workers in containers, which are much the same.
OLD_ZEPHYR_PYTHON := 3.11
ZEPHYR_TESTS := $(wildcard tests/system/test_fray*.py tests/system/test_zephyr.py)
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' $(LOCK_FLAGS)

# Debian's, for the tests of containers: an engine, its image, compose, a network of its own, and what is in the image of nats.
DOCKER_PACKAGES := docker.io debootstrap docker-compose slirp4netns iproute2 busybox-static

# Options for every pytest run: make test PYTEST_FLAGS='-k lease'
PYTEST_FLAGS ?=
# Processes over which tests are distributed; most of them wait. To run them one after the other: make test TEST_PROCESSES=0
CORES := $(shell getconf _NPROCESSORS_ONLN)
TEST_PROCESSES ?= $(shell expr 2 '*' $(CORES))
# A process that was lost is not replaced: pytest-xdist would wait for ever for the tests that it had.
DISTRIBUTED = --numprocesses $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
# Options for faults in the pure cores: make mutants MUTANTS_FLAGS='--count 200 --module fluster_services.gangs'
MUTANTS_FLAGS ?=
# How often each fault of make chaos is made, and in which order; any, unless a seed is given
ROUNDS ?= 10
SEED ?=
# Options for the demo: make demo DEMO_FLAGS='--find open'
DEMO_FLAGS ?=
# Options for the benchmarks: make bench BENCH_FLAGS='--markdown --peers DIR'
BENCH_FLAGS ?=
# Options for the simulator: make bench-simulator SIMULATOR_FLAGS=--full
SIMULATOR_FLAGS ?=
# Which walks: make walk WALK_FLAGS='call map'
WALK_FLAGS ?=
# To move to newer versions: make lock LOCK_FLAGS=--upgrade
LOCK_FLAGS ?=

# Path of an interpreter of the version $(1), or nothing. pyenv's shims obey .python-version unless told a version.
find_python = $(shell for try in python$(1) 'env PYENV_VERSION=$(1) python$(1)'; do \
	$$try -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

# The first Python here that is new enough: python3 unless it is too old, or a pyenv shim for a version that is missing.
PYTHON ?= $(shell for try in python3 /usr/bin/python3 $(foreach version,$(PYTHON_VERSIONS),$(call find_python,$(version))); do \
	"$$try" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$try" && break; done)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(SETUP) ## Set up .venv: locked dependencies, and this checkout as an editable install

$(UV): requirements/build.txt
	@if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		python='$(PYTHON)'; \
		if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo 'make: Python 3.11 or newer is needed; install it (Debian: packages python3 and python3-venv) or name it: make PYTHON=/path/to/python3' >&2; exit 1; \
		elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "make: $$python lacks the venv module; install it (Debian: package python3-venv)" >&2; exit 1; \
		fi; \
		"$$python" -m venv --clear .venv; \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	@touch $@

# Compiled now: where Python may not write bytecode itself, every process would compile all that it imports.
# uv is given the environment, as one that is activated in the user's shell would go before .venv.
$(SETUP): $(UV) pyproject.toml requirements/dev.txt requirements/integrations.txt
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements/dev.txt \
		-r requirements/integrations.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q fluster bus services
	@touch $@

# The same, for tests on another version of Python.
.PRECIOUS: .venv-%/.setup-done
.venv-%/.setup-done: $(UV) pyproject.toml requirements/dev.txt
	@test -x .venv-$*/bin/python || $(BIN)/uv venv --quiet --clear --python '$(call find_python,$*)' .venv-$*
	@$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-$*/bin/python --require-hashes -r requirements/dev.txt
	@$(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-deps --no-build-isolation --editable .
	@.venv-$*/bin/python -m compileall -q fluster bus services
	@touch $@

# What the tests of Zephyr need beside that, some 800 MB. What they import is compiled by importing it, which is a small part
# of it all.
%/.zephyr-done: %/.setup-done requirements/zephyr.txt
	@$(BIN)/uv pip install --quiet --python $*/bin/python --require-hashes -r requirements/zephyr.txt
	@env -u PYTHONDONTWRITEBYTECODE $*/bin/python -c 'import fluster.integrations.zephyr, zephyr.shard_subprocess'
	@touch $@

.PHONY: setup-zephyr
setup-zephyr: $(ZEPHYR) ## Add to .venv what the tests and benchmarks of Zephyr need

$(TYPES): $(SETUP) requirements/types.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/types.txt
	@touch $@

.PHONY: demo
demo: $(SETUP) ## Index Python's standard library on a cluster of this machine, and check the result
	@$(BIN)/fluster demo $(DEMO_FLAGS)

.PHONY: test
test: $(SETUP) $(ZEPHYR) ## Run every test but those of `make slow`, and the fast ones on each version of Python that is here
	$(BIN)/python -m pytest -m 'not minutes' $(DISTRIBUTED) $(PYTEST_FLAGS)
	@$(MAKE) --no-print-directory test-fast-elsewhere
	@$(MAKE) --no-print-directory test-old-zephyr

.PHONY: slow
slow: $(SETUP) ## Run the tests that take minutes, which `make test` leaves out
	@$(MAKE) --no-print-directory docker
	FLUSTER_REQUIRE=docker $(BIN)/python -m pytest -m minutes $(PYTEST_FLAGS)

.PHONY: test-fast
test-fast: $(SETUP) ## Run the fast tests, on each version of Python that is here
	$(BIN)/python -m pytest -m 'not slow' $(DISTRIBUTED) $(PYTEST_FLAGS) $(FAST_TESTS)
	@$(MAKE) --no-print-directory test-fast-elsewhere

# Side by side, as they mostly wait; each prints its results when it is done.
.PHONY: test-fast-elsewhere
test-fast-elsewhere: $(SETUP)
	@own=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	others=; \
	for version in $(PYTHON_VERSIONS); do \
		test "$$version" = "$$own" || others="$$others test-fast-$$version"; \
	done; \
	$(MAKE) --no-print-directory --jobs=2 --output-sync=recurse TEST_PROCESSES=$(CORES) $$others

test-fast-%: $(UV)
	@if test -z '$(call find_python,$*)'; then \
		echo '*** NOT TESTED on Python $*: this machine has no python$* ***'; \
	else \
		echo "Fast tests on Python $*"; \
		$(MAKE) .venv-$*/.setup-done && .venv-$*/bin/python -m pytest -m 'not slow' $(DISTRIBUTED) $(PYTEST_FLAGS) $(FAST_TESTS); \
	fi

.PHONY: test-old-zephyr
test-old-zephyr: $(SETUP) ## Run the tests of Zephyr with the one for Python 3.11
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
		echo 'Zephyr of Python $(OLD_ZEPHYR_PYTHON): tested with all else'; \
	elif test -z '$(call find_python,$(OLD_ZEPHYR_PYTHON))'; then \
		echo '*** Zephyr NOT TESTED on Python $(OLD_ZEPHYR_PYTHON): this machine has no python$(OLD_ZEPHYR_PYTHON) ***'; \
	else \
		echo 'Tests of Zephyr on Python $(OLD_ZEPHYR_PYTHON)'; \
		$(MAKE) .venv-$(OLD_ZEPHYR_PYTHON)/.zephyr-done && \
		.venv-$(OLD_ZEPHYR_PYTHON)/bin/python -m pytest $(DISTRIBUTED) -k 'not containers' $(PYTEST_FLAGS) $(ZEPHYR_TESTS); \
	fi

.PHONY: docker
docker: ## Install what the tests of containers need (Debian's packages), unless it is there
	@missing=; for program in dockerd debootstrap docker-compose slirp4netns ip busybox; do \
		command -v $$program >/dev/null || missing="$$missing $$program"; \
	done; \
	if test -n "$$missing"; then \
		if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
			export DEBIAN_FRONTEND=noninteractive; \
			apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends $(DOCKER_PACKAGES) >/dev/null; \
		else \
			echo "make:$$missing: missing, and installed by root with apt-get; or name an engine: FLUSTER_TEST_DOCKER_HOST" >&2; exit 1; \
		fi; \
	fi

.PHONY: chaos
chaos: $(SETUP) ## Break a cluster in each way at random, for longer than the tests do: make chaos ROUNDS=20 SEED=7
	FLUSTER_CHAOS_ROUNDS=$(ROUNDS) FLUSTER_CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -s $(PYTEST_FLAGS) tests/system/test_chaos.py tests/system/test_lost_servers.py

.PHONY: mutants
mutants: $(SETUP) ## Tell how many small faults in the pure cores their tests notice
	@$(BIN)/python -m tests.mutants $(MUTANTS_FLAGS)

.PHONY: test-docker
test-docker: $(SETUP) ## Run the tests of containers, which `make test` skips where there is no Docker engine
	@test -n "$$FLUSTER_TEST_DOCKER_HOST" || $(MAKE) docker
	FLUSTER_REQUIRE=docker $(BIN)/python -m pytest $(DISTRIBUTED) -k 'docker or containers or images or compose or vm' $(PYTEST_FLAGS) tests/system

.PHONY: check
check: $(SETUP) ## Check format, lint, types, imports and the fragments of the changelog
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --jobs=2 --output-sync=target mypy types
	$(BIN)/lint-imports
	$(BIN)/towncrier build --draft --version Unreleased >/dev/null

.PHONY: mypy
mypy: $(SETUP) ## Check the types of all that is here
	$(BIN)/mypy $(SOURCES)

.PHONY: types
types: $(TYPES) ## Check what users see of types, as pyright in strict mode does
	$(BIN)/basedpyright

.PHONY: changelog
changelog: $(SETUP) ## Show what the fragments in changelog.d say of the next release
	@$(BIN)/towncrier build --draft --version Unreleased

.PHONY: format
format: $(SETUP) ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(SETUP) $(ZEPHYR) ## Run the benchmarks
	@$(BIN)/python -m benchmarks $(BENCH_FLAGS)

.PHONY: bench-simulator
bench-simulator: $(SETUP) ## Simulate clusters of thousands of workers
	@$(BIN)/python -m benchmarks.simulator $(SIMULATOR_FLAGS)

.PHONY: walk
walk: $(SETUP) ## Count the functions, files and threads of the five walks of docs/architecture.md
	@$(BIN)/python -m benchmarks.walks $(WALK_FLAGS)

.PHONY: wheel
wheel: $(SETUP) ## Build the wheel into dist/
	@rm -rf dist
	$(BIN)/python -m hatchling build -t wheel

# Run where the checkout is not importable, so that only what the wheel brought can work.
.PHONY: test-wheel
test-wheel: wheel ## Install the wheel into an empty environment and run the quickstart from there
	@set -eu; \
	folder=$$(mktemp -d); \
	trap 'rm -rf "$$folder"' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	$(BIN)/uv venv --quiet --python $(BIN)/python "$$folder/venv"; \
	$(BIN)/uv pip install --quiet --python "$$folder/venv/bin/python" --constraint requirements/local.txt "$$(echo dist/*.whl)[local]"; \
	cp examples/quickstart.py "$$folder"; \
	cd "$$folder"; \
	env -u PYTHONPATH -u VIRTUAL_ENV ./venv/bin/python quickstart.py; \
	echo 'The quickstart works from the wheel.'

.PHONY: docs
docs: $(SETUP) ## Write the reference of the API, from its docstrings, into build/docs/
	$(BIN)/python -m pdoc --output-directory build/docs fluster fluster_bus.messages fluster.errors fluster_bus.core.errors

.PHONY: lock
lock: $(UV) ## Write requirements/*.txt anew from pyproject.toml
	$(COMPILE) pyproject.toml --extra local --group dev --output-file requirements/dev.txt
	$(COMPILE) pyproject.toml --extra local --constraint requirements/dev.txt --output-file requirements/local.txt
	$(COMPILE) --group integrations --constraint requirements/dev.txt --output-file requirements/integrations.txt
	$(COMPILE) pyproject.toml --extra zephyr --constraint requirements/dev.txt --output-file requirements/zephyr.txt
	$(COMPILE) --group types --constraint requirements/dev.txt --output-file requirements/types.txt
	$(COMPILE) --group build --constraint requirements/dev.txt --output-file requirements/build.txt

.PHONY: clean
clean: ## Remove what was built and cached, and the environments of other Pythons; .venv stays
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache $(wildcard .venv-*)
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
