# make run     compare the cases on this machine's CPU with configs/quick_4xcpu.yaml; ends with the report
# make test    run the tests
# make lint    style and types
# make clean   remove the environments and caches (never runs/)
#
# The first use of each makes its own virtual environment with the versions of constraints.txt; only
# Python 3.11 or newer is needed. Another interpreter: make PYTHON=python3.12 run. Another comparison:
# make run SPEC=configs/mock_2xh200.yaml. A selection of the tests: make test ARGS="tests/unit -k plan".

PYTHON ?= python3
SPEC ?= configs/quick_4xcpu.yaml
ARGS ?=

# The first name is read by every pip for what it installs, the second by newer ones for build tools.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test lint clean

run: .venv/installed
	.venv/bin/dcpbench run $(SPEC)

test: .venv-test/installed
	.venv-test/bin/python -m pytest $(ARGS)

lint: .venv-test/installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy dcpbench

clean:
	rm -rf .venv .venv-test .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Two environments: so `make run` proves that the package needs nothing of what the tests need.
.venv/installed: pyproject.toml constraints.txt
	$(call install,.venv,.)

.venv-test/installed: pyproject.toml constraints.txt
	$(call install,.venv-test,.[test])

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dcpbench needs Python 3.11 or newer, this is %d.%d; name another with: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --progress-bar off --editable '$(2)'
	@touch $@
endef
