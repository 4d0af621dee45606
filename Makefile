# xstage-lab. Everything lives in a virtual environment of its own, .venv; the machine needs
# Python 3.11 or newer and make. Choose a Python with `make lab PYTHON=python3.12`.

VENV = .venv
RUN = $(VENV)/bin/python
PYTHON = python3
ARGS =

.PHONY: help lab test demo bench lint clean

help:
	@echo 'make lab     open the Tune notebook in JupyterLab on this computer'
	@echo 'make test    run the test suite; choose tests with ARGS="tests/test_law.py -k knee"'
	@echo 'make demo    measure, predict and draw without a browser, into demo-figures/'
	@echo 'make bench   print how fast and how true the lab is on this machine'
	@echo 'make lint    check style and types'
	@echo 'make clean   remove .venv and everything else that was made here'

lab: $(VENV)/lab-installed
	@echo 'JupyterLab prints its address with the token below; Ctrl-C here ends it.'
	$(RUN) -m jupyterlab --ServerApp.ip=127.0.0.1 \
	    --LabApp.default_url=/lab/tree/notebooks/03_tune.ipynb \
	    $$(test "$$(id -u)" != 0 || echo --allow-root) $(ARGS)

test: $(VENV)/dev-installed
	$(RUN) -m pytest $(ARGS)

demo: $(VENV)/lab-installed
	$(RUN) -m xstage_lab demo --out demo-figures

bench: $(VENV)/dev-installed
	$(RUN) -m bench $(ARGS)

lint: $(VENV)/dev-installed
	$(RUN) -m ruff check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info demo-figures .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first Python that is new enough makes the environment. Debian and Ubuntu package venv apart.
$(RUN):
	@for python in $(PYTHON) python3.13 python3.12 python3.11; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        "$$python" -m venv --clear $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "$$python cannot make a virtual environment." >&2; \
	        echo "On Debian or Ubuntu: sudo apt-get install python3-venv, then try again." >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo 'xstage-lab needs Python 3.11 or newer, and found none.' >&2; \
	echo 'Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv), or name it:' >&2; \
	echo 'make lab PYTHON=/path/to/python3.11' >&2; \
	exit 1

# Each stamp says that this pyproject.toml is installed; another one is installed again.
$(VENV)/lab-installed: pyproject.toml | $(RUN)
	@echo 'Installing the lab into $(VENV); the first time takes a minute or two.'
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable .
	$(RUN) -m jupyterlab.labextensions disable '@jupyterlab/apputils-extension:announcements'
	touch $@

$(VENV)/dev-installed: pyproject.toml $(VENV)/lab-installed | $(RUN)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
