# make          what there is
# Every target sets up what it needs; a second run finds it in place.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo deb test test-packages test-system test-browser coverage chaos lint docs docs-links pictures generated bench clean install uninstall

DEV := packaging/dev
PY := .venv/bin/python
USER_MANAGER := $(DEV)/user-manager
IS_ROOT := $(filter 0,$(shell id -u))

# Measuring makes the tests half as long again, so only `make coverage` does.
COVERAGE ?=
# Data of every measured process, also of daemons in units and of tests that run as another user.
COVERAGE_DIR := $(CURDIR)/build/coverage
PYTEST := $(PY) -m $(if $(COVERAGE),coverage run -m )pytest
# For processes that the system tests start in units; unit tests look at what a fresh process imports, so not for them.
MEASURE_UNITS := $(if $(COVERAGE),COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml)
PYTEST_OPTIONS ?=
SYSTEM_OPTIONS := -p no:cacheprovider -m system $(PYTEST_OPTIONS)
SYSTEM := $(MEASURE_UNITS) $(USER_MANAGER) --private -- $(PYTEST) $(SYSTEM_OPTIONS)
# About half of the time that the system tests take, so that two of them run beside each other for most of it.
ABOUT_CARDS := $(addprefix tests/system/test_,admission.py card_troubles.py release.py published_rows.py \
	refusal_pages.py refusals.py several_cards.py suspend.py logind.py restarts.py memory_views.py \
	drains_and_stalls.py machine_troubles.py)
# Behind the shorter of the two that run first. Its processes are another system's, and not measured.
ifeq ($(COVERAGE),)
PACKAGE_TOO := , then the Debian package in a clean system
OWN_PACKAGE := && $(DEV)/own-package
endif
# 10,000 steps of every seed: measured for coverage, it would take three times as long.
LONG := tests/unit/test_admission_machine.py
# Once more as an ordinary user, who the product is for and whom files can be closed to.
AS_USER := tests/system/test_end_to_end.py tests/system/test_bad_input.py tests/system/test_doctor.py \
	tests/system/test_history.py tests/system/test_journal.py
# A time limit is as long for everybody.
AS_ROOT_ONLY := $(addprefix --deselect=tests/system/test_doctor.py::test_,an_engine_that_hangs a_systemctl_that_hangs)
# An installation in a home, and logins: as an ordinary user only.
FOR_USERS := tests/system/test_setup.py tests/system/test_login.py
ifneq ($(IS_ROOT),)
ONCE_MORE := , and some of the others once more as an ordinary user
AS_USER_TOO := && $(MEASURE_UNITS) $(USER_MANAGER) --as-user -- $(PYTEST) $(SYSTEM_OPTIONS) $(AS_USER) $(AS_ROOT_ONLY) $(FOR_USERS)
NOT_AS_ROOT := $(FOR_USERS)
endif

# The same seed does the same steps.
SEED ?= 1
MINUTES ?= 15
CHAOS := $(USER_MANAGER) --private -- $(PY) -m tests.chaos

SHELL_SCRIPTS := $(DEV)/setup.sh $(DEV)/install.sh $(DEV)/side-by-side $(DEV)/verify-units $(DEV)/build-deb $(DEV)/own-package packaging/completions/lllm3090ctl.bash .ci/run \
	$(addprefix packaging/arch/,PKGBUILD lllm3090.install dry-run)
DEV_SCRIPTS := $(DEV)/user-manager $(DEV)/lock-bundle packaging/debian/check-requirements

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: ## load a small real model, ask it one question, unload it
	@$(DEV)/setup.sh demo
	@$(USER_MANAGER) -- $(PY) $(DEV)/demo.py

deb: ## a Debian package for the release that this runs on, in build/deb
	@$(DEV)/setup.sh deb
	@$(DEV)/build-deb

test: ## all tests, with real engines and a real systemd --user
	@$(DEV)/setup.sh test
	@$(DEV)/side-by-side \
		"unit tests" '$(PYTEST) -p no:cacheprovider -m unit $(PYTEST_OPTIONS) --ignore=$(LONG) tests/unit' \
		"a long simulation$(PACKAGE_TOO)" '$(PY) -m pytest -p no:cacheprovider -m unit $(LONG) $(OWN_PACKAGE)'
	@echo "== tests with real engines, which want all cores: their threads wait for each other at every step"
	@$(PYTEST) -p no:cacheprovider -m engine $(PYTEST_OPTIONS) tests/engine
	@$(DEV)/side-by-side \
		"system tests about cards$(ONCE_MORE)" '$(SYSTEM) $(ABOUT_CARDS) $(AS_USER_TOO)' \
		"all other system tests" '$(SYSTEM) tests/system $(addprefix --ignore=,$(ABOUT_CARDS) $(NOT_AS_ROOT))'
	@echo "== chaos, 60 s of it"
	@$(CHAOS) --seed $(SEED) --seconds 60 --quiet

coverage: export COVERAGE_FILE := $(COVERAGE_DIR)/data
coverage: ## all tests, and which lines they reach
	@$(DEV)/setup.sh test
	@rm -rf $(COVERAGE_DIR) && mkdir -p -m 1777 $(COVERAGE_DIR)
	@$(MAKE) test COVERAGE=1
	@$(PY) -m coverage combine --quiet $(COVERAGE_DIR)
	@$(PY) -m coverage report

test-system: ## only the system tests: make test-system PYTEST_OPTIONS='-k adopt'
	@$(DEV)/setup.sh test
	@$(USER_MANAGER) --private -- $(PY) -m pytest $(SYSTEM_OPTIONS) tests/system

test-packages: ## build the Debian packages; install, upgrade and remove each in a clean Debian 12 and 13 (root, some minutes)
	@$(DEV)/setup.sh debian
	@$(PY) -m pytest -p no:cacheprovider -m packages $(PYTEST_OPTIONS) tests/packages

test-browser: ## pages in Chromium against the gateway; Debian's chromium is installed for it
	@$(DEV)/setup.sh browser
	@$(USER_MANAGER) --private -- $(PY) -m pytest $(SYSTEM_OPTIONS) tests/system/test_browser.py

chaos: ## faults of every kind for a quarter of an hour: make chaos SEED=7 MINUTES=15
	@$(DEV)/setup.sh test
	@$(CHAOS) --seed $(SEED) --seconds $$(($(MINUTES) * 60))

lint: ## ruff, mypy --strict, shellcheck, systemd-analyze verify, the manual
	@$(DEV)/setup.sh venv
	.venv/bin/ruff check . $(DEV_SCRIPTS)
	.venv/bin/ruff format --check . $(DEV_SCRIPTS)
	.venv/bin/mypy
	MYPYPATH=$(DEV) .venv/bin/mypy --strict --scripts-are-modules $(DEV_SCRIPTS)
	.venv/bin/mypy --strict $(DEV)/demo.py $(DEV)/build_progress.py
	MYPYPATH=$(DEV) .venv/bin/mypy --strict -p shipped
	MYPYPATH=$(DEV) .venv/bin/mypy --strict -p manual
	if command -v shellcheck >/dev/null; then shellcheck $(SHELL_SCRIPTS); else echo "shellcheck is not there: skipped"; fi
	$(DEV)/verify-units
	@$(MAKE) --no-print-directory docs

SPHINX = .venv/bin/python -m sphinx -E -W -n --keep-going --quiet docs

docs: ## the manual as HTML in build/docs; a broken link is an error
	@$(DEV)/setup.sh docs
	$(SPHINX) -b html build/docs

docs-links: ## whether the addresses in the manual that lead elsewhere are still there; needs a network
	@$(DEV)/setup.sh docs
	$(SPHINX) -b linkcheck build/docs-links

pictures: ## of the client's output for the manual: docs/pictures; make pictures CHECK=--check only tells which are stale
	@$(DEV)/setup.sh venv
	PYTHONPATH=$(DEV):. $(USER_MANAGER) --private -- $(PY) -m manual.pictures $(CHECK)

generated: ## completions and manual pages, from the commands, the settings and the D-Bus interface
	@$(DEV)/setup.sh venv
	PYTHONPATH=$(DEV) $(PY) -m shipped

bench: ## all measurements, each printing a table
	@$(DEV)/setup.sh test
	@$(USER_MANAGER) --private -- $(PY) -m bench.report

install: ## for you alone: ~/.local/share/lllm3090, ~/.local/bin, user units; enables the socket
	@$(DEV)/install.sh install

uninstall: ## take that away again; models and what was learnt stay
	@$(DEV)/install.sh uninstall

clean: ## remove what was built and set up here (pip keeps the compiled engine in its own cache)
	rm -rf .venv .engine .demo build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf lllm3090.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
