# `make` lists the targets. Each one installs what it needs and nothing more: the demo needs no
# torch, lint needs neither torch nor FUSE. An installation is done when its stamp in .venv exists.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-engines
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet

PREFIX ?= /usr/local
SBINDIR ?= /sbin
LIBDIR = $(PREFIX)/lib/kvfs

PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: help venv demo test test-slow test-gluster test-3fs test-threefs test-vllm test-sglang test-lmcache test-deepinfer engines test-engines test-gpu lint format bench bench-peers man install uninstall clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(VENV)/.system: .ci/system-packages
	.ci/system-packages $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	touch $@

# Byte code is made at once: where PYTHONDONTWRITEBYTECODE is set it would never be.
$(VENV)/.core: pyproject.toml $(VENV)/.system
	$(PIP) -e '.[fuse,serve,blake3]'
	$(PY) -m compileall -q kvfs cli gpu
	touch $@

# torch is several hundred megabytes: only the tests of the engines want it.
$(VENV)/.test: $(VENV)/.core
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.system
	$(PIP) -e '.[lint]'
	touch $@

venv: $(VENV)/.test $(VENV)/.lint ## create .venv with everything, for work on the code

demo: $(VENV)/.core ## a store, real requests, the mounted tree, a prefix compared byte by byte
	$(PY) -m kvfs.demo

test: $(VENV)/.test ## all tests but the slow ones
	$(PY) -m pytest -q -m 'not slow and not gluster and not engines' $(PYTEST_ARGS)

test-slow: $(VENV)/.test ## the slow tests: crashes, long traces, many processes
	$(PY) -m pytest -q -m slow $(PYTEST_ARGS) || { \
	    status=$$?; [ $$status -eq 5 ] && echo "no slow test selected" || exit $$status; }

test-gluster: $(VENV)/.test ## two hosts on GlusterFS, a brick killed: installs it (Debian, root)
	command -v glusterd glusterfs >/dev/null || { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	        glusterfs-server glusterfs-client iproute2 >/dev/null; }
	$(PY) -m pytest -q -rs -m gluster $(PYTEST_ARGS)

test-3fs: $(VENV)/.test ## stores, fetches, journals and housekeeping again, by rings: root
	KVFS_TEST_BACKEND=3fs $(PY) -m pytest -q -rs -m 'not slow and not gluster and not engines' \
	    tests/t1_store tests/t2_fetch tests/t2_vfs tests/t4_fleet $(PYTEST_ARGS)

test-threefs: $(VENV)/.test ## our rings beside 3FS's own library: KVFS_HF3FS_LIB=FILE, KVFS_HF3FS_DIR=DIR
	test -n "$$KVFS_HF3FS_LIB" || { echo "set KVFS_HF3FS_LIB to libhf3fs_api_shared.so"; exit 2; }
	$(PY) -m pytest -q -rs tests/t4_fleet/test_threefs_library.py \
	    tests/t1_store/test_backend_contract.py $(PYTEST_ARGS)

test-gpu: $(VENV)/.test ## swap-in: its tests, those on a GPU where there is one, and its figures
	$(PY) -m pytest -q -rs tests/t5_engines/test_gpu_*.py $(PYTEST_ARGS)
	$(PY) -m kvfs.gpu.bench

# Each engine has an environment of its own: they pin other versions of the same packages. Of our own
# tree one is made after the other, since that writes into it.
$(ENGINES)/%/.ready: .ci/%.txt $(VENV)/.system
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINES)/$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	    -r .ci/$*.txt
	flock $(ENGINES) $(ENGINES)/$*/bin/python -m pip --disable-pip-version-check install --quiet \
	    --no-deps --no-build-isolation -e .
	touch $@

# The engines' own warnings are theirs.
test-vllm: $(ENGINES)/vllm/.ready ## whole vLLM engines on this CPU (2 GB to install)
	$(ENGINES)/vllm/bin/python -m pytest -q -W ignore $(PYTEST_ARGS) tests/t5_engines/test_vllm*.py

# SGLang compiles a part of itself when it is first used (with a C++ compiler): kept for the next.
test-sglang: $(ENGINES)/sglang/.ready ## whole SGLang engines on this CPU (2.5 GB to install)
	PYTHONPATH=tests/t5_engines/sglang_cpu \
	TORCH_EXTENSIONS_DIR=$(abspath $(ENGINES))/sglang/extensions \
	$(ENGINES)/sglang/bin/python -m pytest -q -W ignore $(PYTEST_ARGS) \
	    tests/t5_engines/test_sglang*.py

test-lmcache: $(ENGINES)/lmcache/.ready ## LMCache's storage manager and server, with vLLM before it
	$(ENGINES)/lmcache/bin/python -m pytest -q -W ignore $(PYTEST_ARGS) \
	    tests/t5_engines/test_lmcache*.py

# Only its source is read, for its memory layout: to build it takes a GPU's tools.
$(ENGINES)/deepinfer/.ready: $(VENV)/.test
	rm -rf $(ENGINES)/deepinfer
	mkdir -p $(ENGINES)/deepinfer
	VIRTUAL_ENV=$(abspath $(VENV)) $(PY) -m pip --disable-pip-version-check download --quiet \
	    --no-deps --ignore-requires-python \
	    -d $(ENGINES)/deepinfer deepinfer==0.1.0
	tar -xzf $(ENGINES)/deepinfer/deepinfer-0.1.0.tar.gz -C $(ENGINES)/deepinfer
	touch $@

test-deepinfer: $(ENGINES)/deepinfer/.ready ## the DeepInfer mixin, also beside its release's layout code
	KVFS_DEEPINFER_SOURCE=$(abspath $(ENGINES)/deepinfer/deepinfer-0.1.0) \
	    $(PY) -m pytest -q -rs $(PYTEST_ARGS) tests/t5_engines/test_deepinfer*.py

# Installed side by side, since each waits for the network and for one core in turn; tested one after
# the other, since an engine takes all cores.
engines: $(VENV)/.test ## install all inference engines, each in an environment of its own (7 GB)
	$(MAKE) -j4 $(foreach engine,vllm sglang lmcache deepinfer,$(ENGINES)/$(engine)/.ready)

test-engines: engines ## all inference engines
	$(MAKE) test-vllm test-deepinfer test-sglang test-lmcache

lint: $(VENV)/.lint ## ruff (rules and format), mypy in strict mode, shell syntax
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	bash -n .ci/run .ci/system-packages

format: $(VENV)/.lint ## let ruff format the code and sort the imports
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.core ## the figures of docs/benchmarks.md, with their limits: BENCH_ARGS='check --json'
	$(VENV)/bin/kvctl bench $(BENCH_ARGS)

# Each peer has an environment of its own in .venv-peers; one that cannot be made is in the report.
bench-peers: $(VENV)/.core ## kvfs beside what it is an alternative to, in one run: BENCH_ARGS='--quick --json'
	command -v redis-server >/dev/null || { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	        redis-server >/dev/null; } || true
	$(PY) -m kvfs.bench.peers --install $(BENCH_ARGS)

man: $(VENV)/.core ## write man/*.1 from the commands
	$(PY) -m kvfs.cli.manpage man

# The commands live in an environment of their own, so that no other package's scripts or
# dependencies meet them; a kvctl of another package is left alone (`kvfs` is the same command).
install: .ci/system-packages ## install for all users: PREFIX=/usr/local SBINDIR=/sbin
	.ci/system-packages $(PYTHON)
	$(PYTHON) -m venv $(LIBDIR)
	rm -rf build  # setuptools would pack what an older version left there
	$(LIBDIR)/bin/python -m pip --disable-pip-version-check install --quiet '.[fuse,serve,blake3]'
	install -d $(PREFIX)/bin $(SBINDIR) $(PREFIX)/share/doc/kvfs
	ln -sfn $(LIBDIR)/bin/kvfs $(PREFIX)/bin/kvfs
	if [ -e $(PREFIX)/bin/kvctl ] && \
	   [ "$$(readlink $(PREFIX)/bin/kvctl)" != $(LIBDIR)/bin/kvctl ]; then \
	    echo "$(PREFIX)/bin/kvctl belongs to something else and stays; use kvfs"; \
	else ln -sfn $(LIBDIR)/bin/kvctl $(PREFIX)/bin/kvctl; fi
	ln -sfn $(LIBDIR)/bin/mount.kvfs $(SBINDIR)/mount.kvfs
	for page in man/*.[158]; do \
	    install -Dm644 -t $(PREFIX)/share/man/man$${page##*.} $$page; done
	install -m644 -t $(PREFIX)/share/doc/kvfs README.md CHANGELOG.md LICENSE docs/examples/*

uninstall: ## remove what `make install` put there
	rm -rf $(LIBDIR) $(PREFIX)/share/doc/kvfs
	for page in man/*.[158]; do rm -f $(PREFIX)/share/man/man$${page##*.}/$${page##*/}; done
	for link in $(PREFIX)/bin/kvfs $(PREFIX)/bin/kvctl $(SBINDIR)/mount.kvfs; do \
	    case "$$(readlink $$link)" in $(LIBDIR)/*) rm -f $$link;; esac; done

clean: ## remove builds and caches, keep .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find kvfs cli gpu tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV) .venv-peers
