# Everything here works from a fresh checkout: Python 3.10 or newer, make and what pip downloads are all it needs. Each
# target first sets up what it uses, and is quick when that has not changed.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Python may keep what it compiled: the tests are imported in less than half the time.
unexport PYTHONDONTWRITEBYTECODE

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1

TORCH := torch==2.13.0
VENV := .venv
BENCH_VENV := .venv-bench
AUDIT_VENV := .venv-audit
LOWEST_VENV := .venv-lowest
PY := $(VENV)/bin/python
BENCH_PY := $(BENCH_VENV)/bin/python
DOCS_VENV := .venv-docs
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/relive/__init__.py)
HOSTS := agilerl embodichain fasttd3 holosoma mjlab pytorchrl rsl_rl sb3_contrib skrl stable_baselines3 velora

# The first Python that is new enough; `make setup PYTHON=...` names one by hand.
PYTHON = $(firstword $(foreach name,python3.11 python3 python3.12 python3.13 python3.14 python3.10 python,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 10) and print("$(name)")' 2>/dev/null)))

# The core is compiled by CXX or what is on PATH. Where there is nothing, RELIVE_ZIG=1 has pip bring a compiler, which
# `make RELIVE_ZIG=1 ...` also does by hand.
ifeq ($(origin RELIVE_ZIG)$(origin CXX),undefineddefault)
RELIVE_ZIG := $(if $(strip $(shell for name in c++ g++ clang++; do command -v $$name; done; true)),,1)
endif
export RELIVE_ZIG

.PHONY: help setup demo test test-slow test-all test-gpu test-lowest sanitize tsan zig clang package attacks mutations stub walks \
	notebooks checkouts test-peers hosts audit-libraries lint format docs docs-links bench bench-quick bench-readme \
	clean outdated

##@ First steps

setup: $(VENV)/installed ## create .venv: the package, its extras, the tools of the tests
	@echo "$(VENV) is ready"

demo: ## train PPO on CartPole-v1 and draw its learning curve
	@echo "1 of 2: install relive and what it needs into $(VENV): a few minutes of downloads, and one of compiling;" \
		"nothing the next time"
	@$(MAKE) setup
	@echo "2 of 2: PPO learns CartPole-v1, until 25 episodes in a row reach a mean of 490 of 500: under a minute"
	@$(PY) examples/ppo.py --env CartPole-v1 --plot runs/ppo-CartPole-v1.png

PROFILE := quick
test: lint ## style, types and the quick tests; PROFILE=ci for more cases, as in .ci/run
	@$(PY) -m pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile $(PROFILE)

format: setup ## let ruff mend style and format
	@$(PY) -m ruff check --fix --exit-zero
	@$(PY) -m ruff format

SPHINX = PYTHONPATH=src $(DOCS_VENV)/bin/python -m sphinx -W --keep-going -q -j 2 -c docs -d build/doctrees
docs: $(DOCS_VENV)/installed ## the site of the documents: build/site/<version>/index.html
	@echo "Sphinx makes the pages, and says nothing meanwhile: half a minute"
	@$(SPHINX) . build/site/$(VERSION)
	@echo "build/site/$(VERSION)/index.html is ready"

bench-quick: $(BENCH_VENV)/installed ## is it slower than recorded? the main tables in short
	@$(BENCH_PY) benchmarks/run.py --quick --only gae add minibatches replay_add replay_sample

##@ More tests

lint: setup ## style and types alone: ruff, and pyright, strict in src
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@echo "pyright reads the types of all files, and says nothing meanwhile: about a minute"
	@$(PY) -m pyright --pythonpath $(PY)

test-slow: setup ## what `make test` leaves out
	@$(PY) -m pytest -n 2 --dist worksteal -m "slow or ci" --hypothesis-profile ci

test-all: lint ## all of it, and many more random examples
	@$(PY) -m pytest -n 2 --dist worksteal --hypothesis-profile thorough

test-gpu: setup ## the tests of devices on an NVIDIA GPU, which has to be there
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no GPU here")'
	@$(PY) -m pytest -n 0 -k cuda --hypothesis-profile ci tests/gpu tests/device tests/memory/test_device.py \
		tests/rollout/test_device.py

# not part of `make test`: its torch is a download of its own, on Linux with all of CUDA
test-lowest: $(LOWEST_VENV)/installed ## the main parts with the lowest versions of what the package needs
	@$(LOWEST_VENV)/bin/python -m pytest -n 2 --dist worksteal -p no:cacheprovider -m "not slow" \
		-k "not forty_calls and not other_threads_run" tests/core tests/ring tests/replay tests/rollout

mutations: setup ## wrong lines in the source, each of which a quick test has to notice
	@$(PY) tests/mutations.py

attacks: $(VENV)/installed ## forged saves, kills, interrupts, forks; rewrites the table in docs/security.md
	@$(PY) tests/attacks/report.py
	@echo "two features of a replay at once, each pair for some seconds: about ten minutes"
	@PYTHONPATH=tests $(PY) -m attacks.pairs 60

##@ The compiled core

# a sanitizer takes memory and time itself
sanitize: setup ## the core, rings and replays while g++'s sanitizers watch the core
	@command -v g++ > /dev/null || { echo "the sanitizers are those of g++, which is not on PATH" >&2; exit 1; }
	$(call apart,sanitize,-D RELIVE_SANITIZE=ON -D CMAKE_CXX_COMPILER=g++)
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONMALLOC=malloc PYTHONPATH=build/sanitize/src \
		$(PY) -m pytest -n 2 --dist worksteal -p no:cacheprovider -m "not slow and not ci" \
		-k "not more_memory and not other_threads_run" tests/core tests/ring tests/replay \
		tests/attacks/test_core_arguments.py

# Python is not compiled for it, so reports of what is none of the core are left out; addresses of a fixed layout are
# what it needs. First a planted race, which has to be seen: 66 is what the run ends with then.
tsan: setup ## threads that share replays, while g++'s ThreadSanitizer watches the core
	@command -v g++ > /dev/null || { echo "the sanitizers are those of g++, which is not on PATH" >&2; exit 1; }
	$(call apart,tsan,-D RELIVE_TSAN=ON -D CMAKE_CXX_COMPILER=g++)
	@run() { LD_PRELOAD="$$(g++ -print-file-name=libtsan.so) $$(g++ -print-file-name=libstdc++.so)" \
		TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66" OMP_NUM_THREADS=1 PYTHONPATH=build/tsan/src \
		setarch -R $(PY) tests/races.py "$$@"; }; \
		run planted > build/tsan/planted 2>&1; test $$? = 66 && grep -q "data race" build/tsan/planted \
			|| { cat build/tsan/planted; echo "the planted race was not seen" >&2; exit 1; }; run

zig: setup ## the tests of the core, compiled by Zig's C++ compiler
	@$(PY) -m pip install $(call required,build.requires)
	$(call apart,zig,-D RELIVE_ZIG=ON)
	@PYTHONPATH=build/zig/src $(PY) -m pytest -n 2 -p no:cacheprovider -m "not slow" tests/core

clang: setup ## the tests of the core, compiled by clang
	@command -v clang++ > /dev/null || { echo "clang++ is not on PATH" >&2; exit 1; }
	$(call apart,clang,-D CMAKE_CXX_COMPILER=clang++)
	@PYTHONPATH=build/clang/src $(PY) -m pytest -n 2 -p no:cacheprovider -m "not slow" tests/core

stub: setup ## the types of the core; rewrites src/relive/core/_core.pyi
	@$(PY) tests/stub.py

walks: setup ## the files that ten public calls enter; rewrites docs/contributing/walks.md
	@$(PY) tests/walks.py

##@ Beside other libraries

bench: $(BENCH_VENV)/installed checkouts ## measure beside the other libraries; rewrites tables and charts; fails if slower
	@$(BENCH_PY) benchmarks/run.py

bench-readme: $(BENCH_VENV)/installed ## the README's three figures again, in a minute
	@$(BENCH_PY) benchmarks/readme.py

FASTTD3 := build/checkouts/FastTD3/fast_td3/fast_td3_utils.py
HOLOSOMA := build/checkouts/holosoma/src/holosoma/holosoma/agents/fast_sac/fast_sac_utils.py
CLEANRL := build/checkouts/cleanrl/cleanrl/ppo.py
TUTORIAL := build/checkouts/Gymnasium/docs/tutorials/training_agents/vector_a2c.py
checkouts: $(FASTTD3) $(HOLOSOMA) $(CLEANRL) $(TUTORIAL) ## sources of peers that no index has, in build/checkouts

test-peers: $(BENCH_VENV)/installed checkouts ## the known mistakes of other libraries, beside what relive does there
	@RELIVE_PEERS=1 $(BENCH_PY) -m pytest tests/peers

# HOSTS=agilerl for one. What was tried before is forgotten first: an environment that cannot be made is red, too.
hosts: ## newest releases of libraries on our drop-in classes; rewrites docs/migration/index.md
	@rm -f $(HOSTS:%=tests/hosts/results/%.json)
	@$(MAKE) --keep-going $(HOSTS:%=host-%) || true
	@$(PYTHON) tests/hosts/table.py $(HOSTS)

host-%: .venv-%/installed
	@echo "$*: its newest release"
	@.venv-$*/bin/python -m pip install --upgrade --upgrade-strategy only-if-needed \
		--requirement tests/hosts/requirements-$*.txt
	$(if $(wildcard tests/hosts/requirements-$*-nodeps.txt),@.venv-$*/bin/python -m pip install --upgrade --no-deps \
		--requirement tests/hosts/requirements-$*-nodeps.txt)
	$(if $(PINNED_$*),@.venv-$*/bin/python -m pip install "$$(.venv-$*/bin/python tests/hosts/pinned.py $* $(PINNED_$*))")
	@echo "$*: its own tests on both classes, and ours: minutes"
	@.venv-$*/bin/python tests/hosts/run.py $*

audit-libraries: $(AUDIT_VENV)/installed checkouts ## ask other libraries for their mistakes; rewrites docs/audit-of-libraries.md
	@$(AUDIT_VENV)/bin/python benchmarks/audit_faults.py

##@ Pages and releases

docs-links: $(DOCS_VENV)/installed ## ask every site that the documents link to, which needs the network
	@$(SPHINX) -b linkcheck . build/links

notebooks: setup ## run the notebooks of docs/notebooks, and store what their cells show
	@$(PY) tests/notebooks.py

package: setup ## the sdist, and the wheels of this machine's Pythons, all tried
	@$(PY) -m pip install $(call required,package)
	@$(PY) tests/package.py $(TORCH)

##@ Besides

help: ## show this list
	@echo "relive: the data layer of a reinforcement learning loop in PyTorch"
	@awk -F ':.*## ' '/^##@ / { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' \
		$(firstword $(MAKEFILE_LIST))

clean: ## remove the environments, the caches, build/ and runs/
	rm -rf $(VENV) $(BENCH_VENV) $(AUDIT_VENV) $(DOCS_VENV) $(LOWEST_VENV) $(addprefix .venv-,$(HOSTS)) runs build dist
	@rm -rf .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call prepare,ENV,TORCH): an environment with torch in it, which goes in alone and first, so that everything after it
# is resolved against the build that is there. An environment is kept while its Python runs and it stands in the
# folder it was made for; one whose Python was upgraded away, or that was copied with a checkout, is made again.
usable = [ "$$(cat $(1)/folder 2>/dev/null)" = "$(CURDIR)" ] && $(1)/bin/python -c '' 2>/dev/null

define prepare
	@test -n "$(PYTHON)" || { echo "relive needs Python 3.10 or newer: add PYTHON=<path to one>" >&2; exit 1; }
	@{ $(usable); } || { echo "creating $(1)" && rm -rf $(1) && $(PYTHON) -m venv $(1) && echo "$(CURDIR)" > $(1)/folder; }
	@echo "installing $(or $(2),$(TORCH)) into $(1), the largest download"
	@$(1)/bin/python -m pip install "$(or $(2),$(TORCH))"
endef

outdated = $(shell { $(usable); } || echo outdated)

# $(call required,KEY): what pyproject.toml lists there
required = $(shell sed -n 's/^$(1) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',')

CORE := CMakeLists.txt $(wildcard src/core/*)

# $(call editable,WHAT): the package in place, with its core in src/relive/core. The tools that build it stay in the
# environment, and what they built in build/editable, so that a change compiles only what it concerns.
editable = @$(PY) -m pip install --no-build-isolation --config-settings build-dir=build/editable --editable

define whole
	$(call prepare,$(VENV))
	@$(PY) -m pip install $(call required,requires) "cmake>=3.20" "ninja>=1.11" $(if $(RELIVE_ZIG),$(call required,build.requires))
	@echo "compiling the core, which says nothing for a minute, and installing what the package and its tests need"
	$(editable) ".[dev]"
endef

define core
	@echo "compiling what changed of the core: up to a minute, without a word"
	$(editable) . --no-deps
endef

$(VENV)/installed: pyproject.toml $(CORE) $(call outdated,$(VENV))
	$(if $(filter-out $(CORE),$?),$(whole),$(core))
	@touch $@

# $(call apart,NAME,OPTIONS): a copy of the package in build/NAME/src whose core is built with other options of CMake
define apart
	@mkdir -p build/$(1)
	@$(VENV)/bin/cmake -S . -B build/$(1) -G Ninja -D CMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" \
		-D Python_EXECUTABLE="$(CURDIR)/$(PY)" -D nanobind_DIR="$$($(PY) -m nanobind --cmake_dir)" $(2) \
		> build/$(1)/log || { cat build/$(1)/log; exit 1; }
	@$(VENV)/bin/cmake --build build/$(1) > build/$(1)/log || { cat build/$(1)/log; exit 1; }
	@rm -rf build/$(1)/src && cp -r src build/$(1)/src && rm -f build/$(1)/src/relive/core/_core*.so
	@$(VENV)/bin/cmake --install build/$(1) --prefix build/$(1)/src > build/$(1)/log
endef

# Sphinx imports the package, so its environment also sees what .venv has. It reads the classes of libraries whose
# drop-ins are subclasses of theirs. They need nothing else for that.
READ_BY_SPHINX := tests/hosts/requirements-sb3_contrib.txt tests/hosts/requirements-skrl.txt
$(DOCS_VENV)/installed: docs/requirements.txt $(READ_BY_SPHINX) \
	$(call outdated,$(DOCS_VENV)) | $(VENV)/installed
	@echo "creating $(DOCS_VENV)" && rm -rf $(DOCS_VENV) && $(PY) -m venv $(DOCS_VENV) && echo "$(CURDIR)" > $(DOCS_VENV)/folder
	@$(DOCS_VENV)/bin/python -m pip install --requirement docs/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip install --no-deps $(shell grep -h '^s' $(READ_BY_SPHINX))
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(DOCS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/relive-packages.pth"
	@touch $@

# the lowest versions that pyproject.toml allows
LOWEST = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)".*/\1==\2/p' pyproject.toml)

$(LOWEST_VENV)/installed: pyproject.toml $(CORE) $(call outdated,$(LOWEST_VENV))
	$(call prepare,$(LOWEST_VENV),$(filter torch==%,$(LOWEST)))
	@$(LOWEST_VENV)/bin/python -m pip install $(LOWEST) pytest pytest-xdist hypothesis
	@$(LOWEST_VENV)/bin/python -m pip install --editable .
	@touch $@

PEERS := benchmarks/requirements.txt
LOOSE_PEERS := benchmarks/requirements-nodeps.txt

$(BENCH_VENV)/installed: pyproject.toml $(CORE) $(PEERS) $(LOOSE_PEERS) $(call outdated,$(BENCH_VENV))
	$(call prepare,$(BENCH_VENV))
	@$(BENCH_PY) -m pip install --requirement $(PEERS)
	@$(BENCH_PY) -m pip install --no-warn-conflicts --editable ".[test]"
	@$(BENCH_PY) -m pip install --no-deps --requirement $(LOOSE_PEERS)
	@touch $@

# $(call checkout,REPOSITORY,COMMIT,PATHS): folders or files of a repository on GitHub, without its history
define checkout
	@echo "fetching $(1)"
	@rm -rf build/checkouts/$(notdir $(1)) && git init --quiet build/checkouts/$(notdir $(1))
	@cd build/checkouts/$(notdir $(1)) && git remote add origin https://github.com/$(1) \
		&& git fetch --quiet --depth 1 --filter=blob:none origin $(2) \
		&& git checkout --quiet FETCH_HEAD -- $(3) && echo $(2) > COMMIT \
		|| echo "$(1) could not be fetched, so its tests and figures are left out"
endef

$(FASTTD3):
	$(call checkout,younggyoseo/FastTD3,229ed59bbf43ea2f7a2d5d90d1076314839944d7,fast_td3)

$(HOLOSOMA):
	$(call checkout,amazon-far/holosoma,fc600e7db2de580509eedaa656ca6c601bd3af9b,$(HOLOSOMA:build/checkouts/holosoma/%=%))

$(CLEANRL):
	$(call checkout,vwxyzjn/cleanrl,fe8d8a03c41a7ef5b523e2e354bd01c363e786bb,cleanrl/ppo.py cleanrl_utils)

$(TUTORIAL):
	$(call checkout,Farama-Foundation/Gymnasium,3f0476a8cc224dcce2167cc4b6971ae0f04d5cfc,$(TUTORIAL:build/checkouts/Gymnasium/%=%))

FAULTS := $(wildcard benchmarks/faults/requirements*.txt)

# the libraries alone, without the package: the programs ask them for nothing of ours
$(AUDIT_VENV)/installed: $(FAULTS) $(call outdated,$(AUDIT_VENV))
	$(call prepare,$(AUDIT_VENV))
	@$(AUDIT_VENV)/bin/python -m pip install --requirement benchmarks/faults/requirements.txt
	@$(AUDIT_VENV)/bin/python -m pip install --no-deps --ignore-requires-python \
		--requirement benchmarks/faults/requirements-nodeps.txt
	@touch $@

# what an environment has of another library is the release that this one pins
PINNED_mjlab := rsl-rl-lib

define host_environment
.venv-$(1)/installed: pyproject.toml $(CORE) $(wildcard tests/hosts/requirements-$(1)*.txt) $$(call outdated,.venv-$(1))
	$$(call prepare,.venv-$(1))
	@.venv-$(1)/bin/python -m pip install --requirement tests/hosts/requirements-$(1).txt
	@.venv-$(1)/bin/python -m pip install --no-warn-conflicts --editable .
	@touch $$@
endef

$(foreach host,$(HOSTS),$(eval $(call host_environment,$(host))))
