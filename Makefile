# make demo | test | check | format | bench | gpu | wheel | clean
#
# The first target that needs it makes a virtual environment in .venv. To use an interpreter that
# has everything already, without an environment and without network: make gpu PYTHON=python3

VENV := .venv
OUT ?= build/gpu

ifeq ($(origin PYTHON),command line)
export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
NVCC := $(VENV)/.nvcc
endif

.DEFAULT_GOAL := demo
.PHONY: demo test test-all check format bench gpu wheel clean

# nvcc's wheels bring the headers that the simulator compiles with.
demo: $(INSTALLED) $(NVCC)
	$(PYTHON) examples/demo.py
	OMP_NUM_THREADS=1 $(PYTHON) examples/train_gpt.py --device cpu --check
	OMP_NUM_THREADS=1 $(PYTHON) examples/generate.py --device cpu --check

# A worker for each core, each with one compiler and one thread of torch. Files in their order,
# in which those that compile come first.
PYTEST = OMP_NUM_THREADS=1 FLASHCUTE_JOBS=$(1) \
	$(PYTHON) -m pytest -n $$(nproc) --dist loadfile --no-loadscope-reorder

test: check $(NVCC)
	$(call PYTEST,1)

# Few files compile most of it, each in one worker: what ships is compiled before, on all cores, and
# then a worker may have some compilers.
test-all: check $(NVCC)
	$(PYTHON) -m flashcute build --all --target 90
	$(call PYTEST,$$(( ($$(nproc) + 7) / 8 ))) --all

CXX_FILES = $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
CLANG_FORMAT = $(PYTHON) -c 'from clang_format import clang_format; clang_format()'

check: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)
	$(PYTHON) tools/generate_instantiations.py --check
	$(PYTHON) tools/check_project.py

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)
	$(PYTHON) tools/generate_instantiations.py
	$(PYTHON) tools/update_docs.py
	$(PYTHON) tools/make_figures.py

bench: $(INSTALLED) $(NVCC)
	$(PYTHON) -m flashcute bench --sustained --json benchmarks/results/fwd.json --plots benchmarks/results

gpu: $(INSTALLED) $(NVCC)
	$(PYTHON) tools/check_gpu.py --out $(OUT) $(ARGS)

# The kernels of these GPUs travel in the wheel; with PREBUILD= none do.
PREBUILD ?= 80,90

wheel: $(INSTALLED) $(if $(PREBUILD),$(NVCC))
	FLASHCUTE_PREBUILD=$(PREBUILD) $(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --wheel-dir dist .
	@du -h dist/*.whl

clean:
	rm -rf $(VENV) build dist flashcute.egg-info flashcute/prebuilt third_party/cutlass
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A torch of the machine is used where there is one: any from 2.10 on will do.
HAS_TORCH = -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'

PIP_INSTALL = $(PYTHON) -m pip install --quiet --disable-pip-version-check

$(VENV)/.installed: pyproject.toml setup.py
	@echo "setting up $(VENV): an environment with torch, the test tools and a small model"
	@python3 -m venv $$(python3 $(HAS_TORCH) && echo --system-site-packages) $(VENV)
	@$(PYTHON) $(HAS_TORCH) || $(PIP_INSTALL) torch==2.13.0
	@$(PIP_INSTALL) --editable '.[test,model]'
	@touch $@

# CUDA's compiler from PyPI, where the machine has none.
$(VENV)/.nvcc: $(INSTALLED)
	@$(PYTHON) -c 'from flashcute.jit.toolchain import find_nvcc; find_nvcc()' 2>/dev/null || \
		$(PIP_INSTALL) --editable '.[nvcc]'
	@touch $@
