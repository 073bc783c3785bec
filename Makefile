# `make demo` and `make test` need python3 (3.11 or newer) with venv, and nothing else; with a C++ compiler and
# Python's headers, `make test` tests Horovod too. Each installs what it needs into .venv once; after that no target
# installs anything until pyproject.toml or constraints.txt changes. `uv`, where it is on the path, installs for pip.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --constraint constraints.txt
UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt,$(PIP))
TORCH := torch==2.13.0
comma := ,

DEMO := .venv/.installed-demo
TEST := .venv/.installed-test
DEV := .venv/.installed-dev
HOROVOD := .venv/.installed-horovod
BROWSER := .venv/.installed-browser
LOGGERS := .venv/.installed-loggers
STREAMS := .venv/.installed-streams
NOTEBOOK := .venv/.installed-notebook
PEERS_TEST := .venv/.installed-peers
JAX := .venv/.installed-jax
DOCS := .venv/.installed-docs
PACKAGE := .venv/.installed-package

.DEFAULT_GOAL := help
.PHONY: help demo demo-keras test test-all test-launchers test-every test-peers test-matrix test-kubernetes mutants chaos soak fuzz check format docs docs-serve bench package clean
.NOTPARALLEL:

help:
	@echo "make demo    train with 3 workers, kill one, add one"
	@echo "make demo-keras  the same with Keras, on TensorFlow and Horovod"
	@echo "make test    every unit test, one case of each other test (minutes); PART=keras: those of a folder"
	@echo "make test-all    also the slow tests, and each value of each parameter in each of them; PART= as above (takes an hour)"
	@echo "make test-launchers  the slow tests of Slurm, MPI, ssh, horovodrun, Kubernetes, as far as these are installed (half an hour)"
	@echo "make test-every  every case of every test; PART= as above (takes hours)"
	@echo "make test-peers  Lightning's and Keras's own tests with ElasticFlow; LIGHTNING_SRC names a checkout of Lightning (hours)"
	@echo "make test-kubernetes  the tests with a Kubernetes, which is built first, once (three minutes)"
	@echo "make test-matrix  what we expect of other packages, with their oldest and newest releases (downloads gigabytes)"
	@echo "make chaos   each fault in each worker at each moment, after 405,310 simulated schedules (takes hours)"
	@echo "make soak    40 minutes of training under constant faults"
	@echo "make mutants  break the product in one way after the other; the tests must find each (takes hours)"
	@echo "make fuzz    a minute of fuzzing for each reader of what others have written; findings in build/fuzz"
	@echo "make check   formatting, lint, types, import layers"
	@echo "make format  format the code and fix what can be fixed"
	@echo "make docs    build the documentation site into build/docs; warnings are errors"
	@echo "make docs-serve  build it, and serve it at http://localhost:8000"
	@echo "make bench   benchmarks; results in build/bench.json"
	@echo "make package  build the distribution into dist/, check it, and train with it on each Python; REPOSITORY= its URL (downloads gigabytes)"
	@echo "make clean   remove what the other targets made, except environments"

demo: $(DEMO)
	@rm -rf build/demo
	@$(BIN)/elasticflow demo --run-dir=build/demo

demo-keras: $(HOROVOD)
	@rm -rf build/demo-keras
	@$(BIN)/elasticflow demo --framework=keras --run-dir=build/demo-keras

# Which tests belong to which tier: see tests/tiers.
test: $(HOROVOD) $(BROWSER)
	@$(BIN)/python -B -m tests.tiers run fast --part="$(PART)"

test-all: $(HOROVOD) $(BROWSER) $(LOGGERS) $(STREAMS) $(JAX) $(NOTEBOOK)
	@$(BIN)/python -B -m tests.tiers run all --part="$(PART)"

# Kubernetes is tested where `make test-kubernetes` has built one.
test-launchers: $(HOROVOD) $(BROWSER)
	@$(BIN)/python -B -m tests.tiers run launchers --part="$(PART)"

test-every: $(HOROVOD) $(BROWSER) $(LOGGERS) $(STREAMS) $(JAX) $(NOTEBOOK)
	@$(BIN)/python -B -m tests.tiers run every --part="$(PART)"

# Keras's are in its wheel. PEERS names some of them: PEERS=tests_pytorch/callbacks (relative to the folder `tests` of
# that checkout), PEERS=keras/src/callbacks
test-peers: $(PEERS_TEST)
	@$(BIN)/python -B -m tests.peers $(PEERS)

# Debian 12 has the source of a Kubernetes, and etcd; the build is kept in ~/.cache/elasticflow, and so are helm and kubectl.
# KUBERNETES names a folder with the programs of another release: kube-apiserver, kube-scheduler, kube-controller-manager,
# and etcd, unless that of the machine is new enough. Debian 12's Kubernetes knows no rules (CEL), so the rules are then
# judged by a part of a newer API server. It is made of packages that change; if it cannot be built, its tests are skipped.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elasticflow
KUBERNETES_DEBIAN := $(CACHE)/kubernetes-1.20.2
KUBERNETES_DEFINITIONS := $(CACHE)/kubernetes-definitions
KUBERNETES_TOOLS := $(CACHE)/kubernetes-tools
test-kubernetes: $(TEST) $(if $(KUBERNETES),,$(KUBERNETES_DEBIAN) $(KUBERNETES_DEFINITIONS)) $(KUBERNETES_TOOLS)
	@OMP_NUM_THREADS=1 KUBERNETES="$(KUBERNETES)" $(BIN)/python -B -m pytest -q tests/core/test_cluster.py tests/kubernetes

$(KUBERNETES_DEBIAN):
	@echo "Building Kubernetes (once)"
	@mkdir -p $(dir $@)
	@tests/kubernetes/build.sh $@

$(KUBERNETES_DEFINITIONS):
	@echo "Building the API server of definitions (once)"
	@mkdir -p $(dir $@)
	@tests/kubernetes/build_definitions.sh $@ || echo "It could not be built: the tests that need it are skipped."

$(KUBERNETES_TOOLS):
	@tests/kubernetes/tools.sh $@

mutants: $(HOROVOD)
	@$(BIN)/python -B -m tests.mutants

# Contracts with the private parts of other packages, and with what of them may differ from release to release: with the
# oldest releases that pyproject.toml allows, and with the newest. Horovod is not built for them.
MATRIX := tests/lightning/test_hooks.py tests/lightning/test_plain_checkpoint.py tests/lightning/test_own_files.py \
	tests/keras/test_hooks.py tests/launch/test_torchrun_handler.py tests/launch/test_torchrun_agent.py \
	tests/launch/test_unnamed_rendezvous.py tests/launch/test_c10d.py tests/collectives tests/faults/test_join.py tests/test_matrix.py
test-matrix: .venv-oldest/.installed .venv-newest/.installed
	@status=0; \
	export OMP_NUM_THREADS=1; \
	for version in oldest newest; do \
		echo "With the $$version releases:"; \
		.venv-$$version/bin/python -m pytest -n 2 --dist loadfile $(MATRIX) || status=$$?; \
	done; \
	exit $$status

.venv-oldest/.installed: CONSTRAINTS := --constraint tests/matrix/oldest.txt
.venv-%/.installed: pyproject.toml tests/matrix/oldest.txt
	@echo "Installing the $* releases into .venv-$*"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-input $(CONSTRAINTS) --editable \
		'.[lightning,pytorch-lightning,keras,s3,tls,testing]' setuptools tensorflow-cpu pytest pytest-timeout pytest-xdist
	@touch $@

chaos: $(HOROVOD)
	@status=0; \
	export OMP_NUM_THREADS=1; \
	for what in "--schedules 100000" "--failover --schedules 200000" "--handovers --schedules 20000" \
		"--founding --schedules 20000" "--endpoints --schedules 20000" "--hangs --schedules 10000" \
		"--sizes --schedules 10000" "--streams --schedules 20000" \
		"--workers 16 --schedules 5000" "--workers 64 --schedules 300" "--workers 256 --schedules 10"; do \
		$(BIN)/python -m ef_common.testing.simulation $$what --jobs $$(nproc) || status=$$?; \
	done; \
	$(BIN)/python -m tests.chaos grid --table docs/grid.md $(GRID) || status=$$?; \
	exit $$status

soak: $(TEST)
	@rm -rf build/soak
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos soak

SECONDS := 60
fuzz: $(TEST)
	@for name in $$($(BIN)/python -m tests.fuzz); do \
		$(BIN)/python -m tests.fuzz $$name --seconds=$(SECONDS) || exit 1; \
	done

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS)
	@$(BIN)/python -m sphinx --fail-on-warning --quiet docs build/docs
	@echo "The site is in build/docs/index.html"

docs-serve: docs
	@$(BIN)/python -m http.server --directory build/docs 8000

bench: $(TEST)
	@mkdir -p build
	@$(BIN)/python -m tests.benchmarks

package: $(PACKAGE)
	@$(BIN)/python -B -m tests.package $(if $(REPOSITORY),--repository="$(REPOSITORY)") $(PACKAGE_OPTIONS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis lightning_logs
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

# torch comes first and by itself, so that no other package chooses its build; pip's own settings choose it.
define install
	@echo "Installing .[$(1)] into .venv (once; this can take minutes)"
	@$(PIP) $(TORCH)
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --editable '.[$(1)]'
endef

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,lightning$(comma)demo)
	@touch $@

# test holds all that the demo needs.
$(TEST): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,test)
	@touch $@ $(DEMO)

$(DEV): $(TEST)
	$(call install,dev)
	@touch $@

# The reference is made of the code, which is imported for it.
$(DOCS): $(TEST)
	$(call install,docs)
	@touch $@

# 50 MB, where there is a browser for it (Debian's chromium): else the tests in a browser are skipped, and say so.
$(BROWSER): $(TEST)
	@if command -v chromium >/dev/null; then $(INSTALL) playwright && touch $@; fi

# Weights & Biases, MLflow and Comet, 200 MB: without them, their cases are skipped.
$(LOGGERS): $(TEST)
	$(call install,loggers)
	@touch $@

# Hugging Face datasets, pyarrow, webdataset and torchdata, 300 MB: without them, their cases are skipped.
$(STREAMS): $(TEST)
	$(call install,streams)
	@touch $@

# A kernel of Jupyter's, 60 MB: without it, the test of the notebook is skipped.
$(NOTEBOOK): $(TEST)
	$(call install,notebook)
	@touch $@

# 350 MB: without it, the cases of Keras on JAX are skipped.
$(JAX): $(TEST)
	$(call install,jax)
	@touch $@

$(PACKAGE): $(TEST)
	$(call install,package)
	@touch $@

$(PEERS_TEST): $(TEST)
	$(call install,peers)
	@touch $@

# Compiled once for the frameworks in .venv. Where that cannot be done, its tests are skipped, and say so; where it
# can be done and fails, so does this. Without a stamp, the next `make test` tries again.
$(HOROVOD): $(TEST) ef_common/horovod/source.py ef_common/horovod/memory.cc
	@echo "Building Horovod (this takes minutes the first time; then it is kept in ~/.cache/elasticflow)"
	@command -v cmake >/dev/null || $(INSTALL) cmake
	@if $(BIN)/elasticflow horovod build; then touch $@; \
	elif $(BIN)/python -c 'from ef_common.horovod.build import check_tools; check_tools()' 2>/dev/null; then exit 1; \
	else echo "The tests of Horovod are skipped."; fi
