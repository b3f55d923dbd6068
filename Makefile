PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
PYTEST := $(VENV)/bin/python -m pytest

.PHONY: demo test test-multihost test-faults lint

demo: $(READY) # built-in problems, without and with sequence parallelism, without and with drafts
	$(VENV)/bin/lockstep generate demo --tp 2 --strategy sp-late --draft-tokens 3 && rm -rf demo-comparison
	$(VENV)/bin/lockstep compare demo --tp 2 --draft-tokens 0,3 --num-prompts 8 --repeat 3 --out demo-comparison

test: $(READY)
	$(PYTEST)
test-multihost: $(READY) # two hosts, as network namespaces; as root, with iproute2, openssh-server and pdsh
	LOCKSTEP_MULTIHOST=1 $(PYTEST) tests/test_multihost.py tests/test_ssh.py tests/test_slow_link.py
test-faults: $(READY) # each rank lost at each place under each launcher, 100 launches of each, each with each comm
	LOCKSTEP_ALL_FAULTS=1 $(PYTEST) -rP $(patsubst %,tests/test_%.py,dying lost_ranks many_launches same_result)

lint: $(READY) # and three rules on who may import what
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	! grep -rnE '(import|from) +torch\.distributed|from torch import .*distributed' --include=*.py cli engine models
	! grep -rnE '(import|from) +lockstep\.engine|from lockstep import .*engine' --include=*.py models
	! grep -rnE '^ *(import|from) +(typer|rich)' --include=*.py comm engine models

$(READY): pyproject.toml constraints.txt # made once, and again when what it is made from changes
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev,deepspeed,mpi]'
	touch $@
