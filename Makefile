# Everything here works from a fresh checkout: Python 3.11 or newer, make, a C compiler and what pip downloads are
# all it needs. Each target first sets up what it uses, and is quick when that has not changed.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Python may keep what it compiled: the tests are imported in less than half the time.
unexport PYTHONDONTWRITEBYTECODE

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1

TORCH := torch==2.13.0
VENV := .venv
BENCH_VENV := .venv-bench
PY := $(VENV)/bin/python
BENCH_PY := $(BENCH_VENV)/bin/python
HOSTS := agilerl stable_baselines3 velora

# The first Python that is new enough; `make setup PYTHON=...` names one by hand.
PYTHON = $(firstword $(foreach name,python3.11 python3 python3.12 python3.13 python3.14 python,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

.PHONY: help setup demo test test-slow test-all attacks mutations walks test-peers test-hosts lint format bench clean outdated

help: ## show this list
	@echo "relive: the data layer of a reinforcement learning loop in PyTorch"
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) \
		| awk -F ':.*## ' '{ printf "  make %-11s %s\n", $$1, $$2 }'

setup: $(VENV)/installed ## create .venv: the package, its extras, the tools of the tests
	@echo "$(VENV) is ready"

demo: setup ## train PPO on CartPole-v1, under a minute; draws runs/ppo-CartPole-v1.png
	@$(PY) examples/ppo.py --env CartPole-v1 --plot runs/ppo-CartPole-v1.png

PROFILE := quick
test: setup ## style, types and every quick test; PROFILE=ci, as in .ci/run: more cases and random examples
	@$(PY) -m relive.compile > /dev/null & $(MAKE) lint; status=$$?; wait; exit $$status
	@$(PY) -m pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile $(PROFILE)

test-slow: setup ## the tests that `make test` leaves out
	@$(PY) -m pytest -n 2 --dist worksteal -m "slow or ci" --hypothesis-profile ci

test-all: lint ## the same with the slow tests and many more random examples
	@$(PY) -m pytest -n 2 --dist worksteal --hypothesis-profile thorough

attacks: $(VENV)/installed ## forged saves, kills, interrupts, forks: all of them; rewrites the table in docs/security.md
	@$(PY) tests/attacks/report.py

mutations: setup ## change the source line by line, and see that a quick test fails each time
	@$(PY) tests/mutations.py

walks: setup ## the files of src that ten public calls enter; rewrites the table in CONTRIBUTING.md
	@$(PY) tests/walks.py

test-peers: $(BENCH_VENV)/installed ## the known mistakes of the installed peers, beside what we do there
	@RELIVE_PEERS=1 $(BENCH_PY) -m pytest tests/peers

test-hosts: $(foreach host,$(HOSTS),.venv-$(host)/installed) ## other libraries' own training on our classes, each in its .venv-*
	@$(foreach host,$(HOSTS),RELIVE_HOST=$(host) .venv-$(host)/bin/python -m pytest tests/hosts &&) true

lint: setup ## ruff (rules and format) and pyright (strict in src)
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m pyright --pythonpath $(PY)

format: setup ## let ruff mend style and format
	@$(PY) -m ruff check --fix --exit-zero
	@$(PY) -m ruff format

bench: $(BENCH_VENV)/installed ## measure beside the installed peers; rewrites the tables and the chart
	@$(BENCH_PY) benchmarks/run.py

clean: ## remove the environments, the caches and runs/
	rm -rf $(VENV) $(BENCH_VENV) $(addprefix .venv-,$(HOSTS)) runs build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call prepare,ENV): an environment with torch in it, which goes in alone and first, so that everything after it
# is resolved against the build that is there. An environment is kept while its Python runs and it stands in the
# folder it was made for; one whose Python was upgraded away, or that was copied with a checkout, is made again.
usable = [ "$$(cat $(1)/folder 2>/dev/null)" = "$(CURDIR)" ] && $(1)/bin/python -c '' 2>/dev/null

define prepare
	@test -n "$(PYTHON)" || { echo "relive needs Python 3.11 or newer: add PYTHON=<path to one>" >&2; exit 1; }
	@{ $(usable); } || { echo "creating $(1)" && rm -rf $(1) && $(PYTHON) -m venv $(1) && echo "$(CURDIR)" > $(1)/folder; }
	@echo "installing $(TORCH) into $(1), the largest download"
	@$(1)/bin/python -m pip install "$(TORCH)"
endef

outdated = $(shell { $(usable); } || echo outdated)

$(VENV)/installed: pyproject.toml $(call outdated,$(VENV))
	$(call prepare,$(VENV))
	@$(PY) -m pip install --editable ".[dev]"
	@touch $@

PEERS := benchmarks/requirements.txt
LOOSE_PEERS := benchmarks/requirements-nodeps.txt

$(BENCH_VENV)/installed: pyproject.toml $(PEERS) $(LOOSE_PEERS) $(call outdated,$(BENCH_VENV))
	$(call prepare,$(BENCH_VENV))
	@$(BENCH_PY) -m pip install --requirement $(PEERS)
	@$(BENCH_PY) -m pip install --no-warn-conflicts --editable ".[test]"
	@$(BENCH_PY) -m pip install --no-deps --requirement $(LOOSE_PEERS)
	@touch $@

define host_environment
.venv-$(1)/installed: pyproject.toml tests/hosts/requirements-$(1).txt $$(call outdated,.venv-$(1))
	$$(call prepare,.venv-$(1))
	@.venv-$(1)/bin/python -m pip install --requirement tests/hosts/requirements-$(1).txt
	@.venv-$(1)/bin/python -m pip install --no-warn-conflicts --editable .
	@touch $$@
endef

$(foreach host,$(HOSTS),$(eval $(call host_environment,$(host))))
