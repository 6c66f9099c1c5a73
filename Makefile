# `make` lists the targets. Everything runs in .venv, which `make setup` builds.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

# The virtual environment's programs come first, so that `python` in dvc.yaml is its Python. In a
# shell of your own: `. .venv/bin/activate`, then dvc and python are the same ones.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
STAMP := .venv/.drydock-setup

# Runs a command that gets a SIGTERM when make dies, however it dies: what `setpriv --pdeathsig
# TERM` does, by the Python that is there in any case.
GUARD := python -c 'import os, sys; from lib.cli import die_with_parent as guard; guard(); \
	os.execvp(sys.argv[1], sys.argv[1:])'

# The first of these Pythons that is 3.11 or 3.12 and can build a virtual environment.
PYTHONS := $(PYTHON) python3.12 python3.11 python3 python
SUITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

.PHONY: help setup repro check smoke lint types test test-layouts test-gpu torture bench plots \
	unlock clean clean-state lock preset dvc-settings

help: ## lists the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) dvc-settings ## builds .venv from requirements.lock (PYTHON=... picks the Python)

repro: setup preset check ## runs the pipeline, or what changed; PRESET=laptop sets parameters first
	@exec $(GUARD) dvc repro
	@python -m stages.show_summary

check: setup ## checks parameters, declared code and the graph of stages, in seconds
	@python -m stages.validate_config --schema-only
	@python -m stages.check_workflow
	@dvc dag > /dev/null && echo "dvc.yaml: the stages form a graph without cycles"

smoke: setup ## tries this machine; then every stage in a scratch copy, layouts, a kill and resume
	@$(GUARD) python -m stages.check_hardware
	@exec $(GUARD) python -m stages.run_smoke

lint: setup ## checks format, lint rules and who may import whom
	ruff format --check .
	ruff check .
	lint-imports

types: setup ## checks types
	pyrefly check

test: setup ## runs the tests that need no GPU
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadgroup -m "not gpu and not multi_gpu and not layouts" \
		--ignore tests/layouts
	@# Alone: beside other work, up to 8 ranks wait for each other's turn at every collective.
	OMP_NUM_THREADS=1 python -m pytest -m "not layouts" tests/layouts

test-layouts: setup ## compares every layout of up to 8 processes with one, and other long tests
	python -m pytest -v tests/layouts
	python -m pytest -v -m layouts --ignore tests/layouts

test-gpu: setup ## runs the tests that need one or more GPUs
	python -m pytest -m "(gpu or multi_gpu) and not shared_gpu"
	python -m pytest -m "not gpu" tests/kernels

KILLS := 100
torture: setup ## kills a training KILLS=100 times at random, spoils its disk; compares the end
	@exec $(GUARD) python -m stages.torture_run --kills $(KILLS) --faults

bench: setup ## measures how fast this machine tokenises, trains, saves and loads
	@python -m stages.measure_tokenizing
	@python -m stages.measure_speed
	@python -m stages.measure_checkpoint
	@python -m stages.measure_kernels

plots: setup ## draws results/ as dvc_plots/index.html, which needs no network
	@python -m stages.render_plots

unlock: setup ## removes a lock that a killed dvc left behind; refuses while one works
	@python -m stages.unlock_workflow

clean: ## removes caches of the tools and drawn plots; no data, model, results or state
	rm -rf dvc_plots .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find lib stages kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-state: setup ## removes checkpoints of finished and superseded runs, not of the present one
	@python -m stages.clean_state

preset: setup
	@[ -z "$(PRESET)" ] || python -m stages.apply_preset $(PRESET)

$(STAMP): requirements.lock
	@$(call build_venv,.venv)
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.lock
	.venv/bin/python -m stages.render_plots --template-only
	@touch $@

# Keeps a virtual environment that works and replaces one that does not.
define build_venv
	if ! $(1)/bin/python -m pip --version > /dev/null 2>&1 || \
	  ! $(1)/bin/python -c '$(SUITS)' 2> /dev/null; then \
	  for python in $(PYTHONS); do \
	    if $$python -c '$(SUITS)' > /dev/null 2>&1; then \
	      echo "building $(1) with $$($$python --version)"; \
	      exec $$python -m venv --clear $(1); \
	    fi; \
	  done; \
	  echo "error: no Python 3.11 or 3.12 with venv here. Install one (Debian, Ubuntu: python3.12" \
	    "and python3.12-venv), or name one: make setup PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi
endef

# DVC asks git for history; a project without git (an unpacked archive) has to say that it has none.
dvc-settings: $(STAMP)
	@if git ls-files --error-unmatch dvc.yaml > /dev/null 2>&1; then \
	  ! grep -qs no_scm .dvc/config.local || dvc config --local --unset core.no_scm; \
	else \
	  grep -qs no_scm .dvc/config.local || dvc config --local core.no_scm true; \
	fi

lock: ## writes requirements.lock anew from requirements.in (takes minutes)
	@$(call build_venv,.venv-lock)
	.venv-lock/bin/python -m pip install -r requirements.in
	@sed '/^#/!d' requirements.lock > .venv-lock/new
	@.venv-lock/bin/python -m pip freeze --all \
	  | sed -e '/^pip==/d' -e '/^nvidia-/d' -e '/^cuda-/d' -e 's/^\(torch==[^+]*\)+.*/\1/' >> .venv-lock/new
	@mv .venv-lock/new requirements.lock && rm -r .venv-lock
