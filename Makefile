# The template's commands; bare `make` prints them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
OUT ?= build
PORT ?= 8000
FROM ?= gh:org/dist-template
TORCH_INDEX ?=
TORCH_CUDA ?=
PROJECT := {{cookiecutter.project_slug}}
DEMO := $(OUT)/my-trainer
READY := .venv/.ready
JOBS ?= 3
WHICH ?= pinned
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder
TESTS = .venv/bin/python -m pytest $(PARALLEL)
TESTED := tests fake-cuda/tests
TEMPLATE := $(shell find cookiecutter.json hooks '$(PROJECT)' -type f -not -path '*/__pycache__/*')
export PYTHON TORCH_INDEX TORCH_CUDA

help:  ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile
	@echo "  Variables: PYTHON (makes .venv; 3.11 or newer), OUT (where demo generates; build),"
	@echo "             PORT (of finetune-demo's server; 8000), JOBS (test files that run at once; 3),"
	@echo "             TORCH_INDEX (package index for torch alone), TORCH_CUDA=1 (accept its CUDA build without a GPU)"

demo: $(OUT)/.my-trainer  ## generate a project with the default answers under build/ and train it
	$(MAKE) --no-print-directory -C '$(DEMO)' train RUN='$(CURDIR)/.venv/bin/python'
	@$(MAKE) --no-print-directory demo-next

# Each line with two blanks can be typed as it stands, here and one after another; a test types them.
demo-next:
	@echo "demo: to go on, type"
	@echo "  cd '$(abspath $(DEMO))'"
	@for rest in 'diagnose runs/quickstart' 'report runs/quickstart' 'evaluate runs/quickstart --baseline start' \
	  'export runs/quickstart --output exported' 'serve runs/quickstart'; do \
	  echo "  '$(CURDIR)/.venv/bin/python' -m my_trainer $$rest"; done

finetune-demo: $(OUT)/.my-trainer  ## fine-tune SmolLM2-135M in that project, serve it, ask it before and after
	@.venv/bin/python -m demonstrations.finetune '$(DEMO)' '$(PORT)'

# Threads of several processes on few cores wait for each other, spinning.
test test-all test-real test-quick: export OMP_NUM_THREADS = 1

test: $(READY)  ## tests the library and the template, then the default project
	$(TESTS) $(TESTED)
	@rm -rf build/test && mkdir -p build/test
	.venv/bin/cookiecutter . --no-input --default-config --output-dir build/test
	$(MAKE) --no-print-directory -C build/test/my-trainer test RUN='$(CURDIR)/.venv/bin/python' ARGS='-m ""'

test-all: $(READY)  ## every test, the nightly ones too
	$(TESTS) -m "" $(TESTED)

test-real: $(READY)  ## the tests with published weights (SmolLM2-135M, from the package index); on two idle cores 25 minutes
	.venv/bin/python -m pytest -m "" tests/wings/test_real_model.py

test-quick: $(READY) dev  ## the tests that take no more than seconds, the project's run in place
	$(TESTS) -n 2 -m "not slow and not nightly" $(TESTED)
	$(MAKE) --no-print-directory -C build/dev test RUN='$(CURDIR)/.venv/bin/python'

dev:  ## link the un-rendered project into build/dev, its package named trainer_dev, to run it in place
	@$(PYTHON) -c 'import tests' && find -L build/dev -maxdepth 1 -type l -delete
	@echo "dev: cd build/dev && ../../.venv/bin/python -m trainer_dev fit --config configs/quickstart.yaml"

check: $(READY) dev  ## lint (ruff, benchmarks too) and type-check (ty) the hooks, the tests and the un-rendered package
	.venv/bin/ruff check --no-respect-gitignore .ci src fake-cuda hooks tests docs benchmarks zoo demonstrations build/dev/trainer_dev build/dev/tests
	.venv/bin/ty check --no-respect-ignore-files --python .venv --extra-search-path src --extra-search-path build/dev --extra-search-path fake-cuda/tests .ci src fake-cuda/tests hooks tests docs build/dev/trainer_dev build/dev/tests

bench: $(READY) dev build/peers  ## measure the project beside a hand-written loop and its peers (PART="step dist data …")
	.venv/bin/python -m benchmarks $(PART)

slower: $(READY) dev build/peers  ## what has become slower since the newest release, or SINCE=<commit>
	.venv/bin/python -m benchmarks.against $(SINCE)

build/peers: $(READY) benchmarks/peers.txt
	@.venv/bin/python -m pip install --quiet --no-deps --upgrade --target build/peers -r benchmarks/peers.txt && touch build/peers

docs: $(READY)  ## build the documentation site, its reference page from the code
	.venv/bin/python docs/reference.py
	.venv/bin/zensical build

# From git and not from this folder, so that the archive pins the library to what others can fetch.
starter: $(READY)  ## archive a generated project, for people without cookiecutter (FROM=gh:org/dist-template TAG=)
	rm -rf '$(OUT)/starter' && mkdir -p '$(OUT)/starter'
	.venv/bin/cookiecutter '$(FROM)' $${TAG:+--checkout "$$TAG"} --no-input --default-config -o '$(OUT)/starter'
	@if grep '^library = "dist-template @ file:.*/"' '$(OUT)'/starter/*/pyproject.toml; then echo "starter: FROM=$(FROM) is a \
	folder, which other machines do not have: give a git address."; exit 1; fi
	tar -czf '$(OUT)/my-trainer.tar.gz' -C '$(OUT)/starter' my-trainer

compat: $(READY)  ## test the lowest, the pinned or the newest versions that are allowed (WHICH=lowest, …; PYTHON)
	.ci/compat '$(WHICH)' '$(shell command -v $(PYTHON))'

release: $(READY)  ## check, set VERSION in every file, commit and build (VERSION=1.2.3); tags and pushes nothing
	.venv/bin/python .ci/release.py check '$(VERSION)'
	$(MAKE) --no-print-directory check docs
	.venv/bin/python .ci/release.py commit '$(VERSION)'
	$(MAKE) --no-print-directory dist

dist: $(READY) docs  ## build HEAD's wheel, sdist, template archive, site and notes into build/release, the same bytes each time
	.venv/bin/python .ci/release.py build "$${TAG-}"
	cp -r site build/release/site

lock:  ## hashes of the generated project's versions and of the tests' (TORCH_INDEX after another torch)
	@$(MAKE) --no-print-directory -C '$(PROJECT)' lock VENV=../.venv LIBRARY='dist-template @ file://$(CURDIR)/' \
	  ARGS='../pyproject.toml --extra dev $(ARGS)'

clean:  ## remove build/, the site and the tools' caches; .venv stays
	rm -rf build site .tools .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +

# The versions of the generated project, and the library from this folder. A .venv that is a link has another checkout's.
$(READY): $(PROJECT)/pyproject.toml $(PROJECT)/lock-cpu.txt $(PROJECT)/lock-cuda.txt pyproject.toml
	@$(MAKE) --no-print-directory -C '$(PROJECT)' setup VENV=../.venv
	@test -L .venv || .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# The stamp is older than a changed template, or the project is gone: generate (again).
$(OUT)/.my-trainer: $(READY) $(TEMPLATE) $(if $(wildcard $(DEMO)/Makefile),,missing)
	@echo "demo: generating $(DEMO) with the default answers"
	@mkdir -p '$(OUT)'
	@.venv/bin/cookiecutter . --no-input --default-config --overwrite-if-exists --output-dir '$(OUT)'
	@touch '$@'

.PHONY: help demo demo-next finetune-demo test test-all test-real test-quick dev check bench docs lock starter compat release dist \
  clean missing
