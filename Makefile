# make run                 set up, start the services, run the whole line on the tiny profile, print the results
# make test [ARGS=...]     set up, run the quick tests (ARGS='-m "not bench"' for all of them, as .ci/run does)
# make stop                end the services that `make run` started
# make profile NAME=node   compose conf/node.yaml into params.yaml
# make bench | lint | lock | results | clean
#
# Nothing here needs an activated environment. VENV names another one, PYTHON another interpreter (3.11 or 3.12).

VENV ?= .venv
PY := $(VENV)/bin/python
PATH := $(abspath $(VENV))/bin:$(PATH)
export PATH
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
ARGS ?= -m "not slow and not bench"

.PHONY: run test stop setup bench profile lint lock results clean

run: setup
	@$(PY) -m flows run

setup:
	@[ -n "$(PYTHON)" ] || { echo "error: no python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m flows.setup $(VENV)

test: setup
	@$(PY) -m pytest --color=no $(ARGS)

stop:
	@if [ -x $(PY) ]; then $(PY) -m flows.services down; fi

bench: setup
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps -r requirements-bench.lock
	@$(PY) -m pytest --color=no -m bench -s tests/bench

profile: setup
	@[ -n "$(NAME)" ] || { echo "error: which one? make profile NAME=tiny" >&2; exit 1; }
	@$(PY) -m tasks profile $(NAME)

lint: setup
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

lock: setup
	@$(PYTHON) -m flows.setup --lock

results: setup
	@$(PY) -m flows results

clean: stop
	rm -rf work data/report metrics plots
