# make demo and make test set up what they need in .venv; PYTHON picks another interpreter (3.11 or newer), which gets an
# environment of its own. With 3.13, torch is NeMo-RL's.
PYTHON ?= python3
# What make gpu runs: a python that has torch and triton already; nothing is installed.
GPU_PYTHON ?= python3
VENV := .venv$(filter-out -python3,-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Installs nothing but the files whose hashes are listed.
HASHED := $(PIP) --no-deps --require-hashes

.PHONY: help demo test test-all quick matrix mutation soak audit pins vllm nemo-rl nemo-rl-environment nemo-rl-losses refusals gpu lint docs site release smoke clean

help:
	@echo "make demo   train a small MoE policy on an int4 engine, without and with a token weight, and diagnose it (about a minute)"
	@echo "make test   the tests, on all cores (NEMO_RL_ROOT=… for those inside NeMo-RL); a release also runs them with PYTHON=python3.13, on NeMo-RL's torch"
	@echo "make test-all   the same with the long matrices: every compiled loss, every layout of ranks, every tutorial"
	@echo "make quick  the oracle, every part of the core, the rules of check, and one test of each expensive kind"
	@echo "make matrix every objective, weight and mask on up to 16 ranks against the float64 oracle (about 15 minutes)"
	@echo "make mutation  changes of one operator or number at a time in the core, and whether a test notices (hours; ARGS=…)"
	@echo "make soak   100,000 losses, 10,000 recorded steps, killed recorders, labs and ranks (hours; ARGS='--scale 0.1')"
	@echo "make audit  known vulnerabilities and licences of everything that is pinned; fails if it can't look"
	@echo "make pins   the hashes in .ci anew; with ARGS=--upgrade the versions too"
	@echo "make vllm   vLLM as generation engine, on the CPU, in an environment of its own (about 4 minutes)"
	@echo "make nemo-rl NEMO_RL_ROOT=…  rehearsals and a probe through that NeMo-RL on the CPU, in an environment of its own"
	@echo "make refusals CHECKOUTS='…'  where each NeMo-RL has the refusals of check's rules"
	@echo "make nemo-rl-environment  that environment alone, for rehearse and probe (about 10 minutes)"
	@echo "make gpu    on a machine with a GPU: the kernels' tests and the benchmarks, with GPU_PYTHON's torch and triton"
	@echo "make lint   ruff and mypy"
	@echo "make docs   rewrite the generated tables and the schema"
	@echo "make site   build the documentation site in docs/_build; a broken link fails"
	@echo "make release   build the wheel and the source distribution in dist, check both, and try them in fresh environments"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "nemo-geomask needs Python 3.11 or newer; found $$($(PYTHON) --version). Use: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: its exact version is what selects a build. torch-requirements.txt says why pip doesn't check it.
LOCKS := $(addprefix .ci/,build-requirements.txt test-requirements.txt torch-requirements.txt)

$(VENV)/.torch: .ci/constraints.txt $(LOCKS) | $(BIN)/python
	@sed -n 's/^\([a-z].*[^ ]\) *\\$$/\1/p' $(LOCKS) > $(VENV)/pins.txt
	$(HASHED) -r .ci/build-requirements.txt
	$(PIP) --constraint $(VENV)/pins.txt --report $(VENV)/torch.json torch
	@$(BIN)/python .ci/check_hashes.py $(VENV)/torch.json $(LOCKS)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint $(VENV)/pins.txt --editable '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(HASHED) --no-build-isolation -r .ci/test-requirements.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/nemo-geomask lab recipes/lab/demo.yaml --out results/demo $(ARGS)
	$(BIN)/nemo-geomask diagnose results/demo --brief --html results/demo/report.html || test $$? = 3  # 3: broken, as int4 is

# Workers as tests/conftest.py says, each with one thread. More than 8 only wait. Bytecode is kept, even if the
# environment says otherwise: hundreds of processes would compile the same modules.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# Without the long matrices, of each of which it has a representative.
test: $(VENV)/.test
	$(PYTEST) -m "not long" $(ARGS)

test-all: $(VENV)/.test
	$(PYTEST) $(ARGS)

# The rooms whose tests start in a moment, and one test of each expensive kind: compiled, ranks, interpreted kernels, the lab.
QUICK := -m "(not slow and not long) or quick" --hypothesis-profile quick $(addprefix tests/,test_docs.py test_errors.py test_metrics.py test_metric_sums.py config \
	recipe cli functional segments kernels parallel losses tools/check tools/lab/test_training.py) \
	--ignore tests/tools/check/test_hostile_recipes.py

quick: $(VENV)/.test
	$(PYTEST) $(QUICK) $(ARGS)

matrix: $(VENV)/.test
	GEOMASK_MATRIX=1 $(BIN)/python -m pytest -rP tests/losses/test_matrix.py

$(VENV)/.mutation: .ci/mutation-requirements.txt $(VENV)/.test
	$(HASHED) -r .ci/mutation-requirements.txt
	@touch $@

# ARGS: rooms, --sample N of each; what came of it is in docs/background/reliability.md. One thread, since mutmut forks.
mutation: $(VENV)/.mutation
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation $(ARGS)

soak: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

AUDIT := .venv-audit

$(AUDIT)/.ready: .ci/audit-requirements.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r .ci/audit-requirements.txt
	@touch $@

# Licences of what is installed; then known vulnerabilities of all that is pinned. --strict: what can't be looked up fails.
audit: $(AUDIT)/.ready $(VENV)/.test
	$(AUDIT)/bin/pip-licenses --python $(BIN)/python --allow-only "$$(grep -v '^#' .ci/licences.txt | paste -sd ';')" > /dev/null
	$(AUDIT)/bin/pip-audit --strict --progress-spinner off --disable-pip --no-deps \
		$(addprefix -r ,$(wildcard .ci/*-requirements.txt .ci/*-constraints.txt))

pins: $(AUDIT)/.ready
	$(AUDIT)/bin/python .ci/write_pins.py $(ARGS)

VLLM := .venv-vllm
VPIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

# An environment of its own: vLLM needs a later transformers than NeMo-RL.
$(VLLM)/.ready: .ci/vllm-constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VPIP) $$(grep '^torch==' .ci/vllm-constraints.txt)
	grep -v '^torch==' .ci/vllm-constraints.txt | $(VPIP) --no-deps --require-hashes -r /dev/stdin
	$(VPIP) --no-deps --editable .
	@touch $@

vllm: $(VLLM)/.ready
	PYTHONDONTWRITEBYTECODE= $(VLLM)/bin/python -m pytest tests/hosts/vllm tests/tools/lab/vllm

NEMO := .venv-nemo-rl
NPIP := $(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

# An environment of its own: NeMo-RL's requirements, and the last of vLLM's CPU builds that takes its transformers.
$(NEMO)/.ready: .ci/nemo-rl-constraints.txt pyproject.toml
	$(PYTHON) -m venv $(NEMO)
	$(NPIP) $$(grep '^torch==' .ci/nemo-rl-constraints.txt)
	grep -v '^torch==' .ci/nemo-rl-constraints.txt | $(NPIP) --no-deps --require-hashes -r /dev/stdin
	$(NPIP) --no-deps --editable .
	@# Each process of a rehearsal imports NeMo-RL and vLLM; uncompiled they take twice as long. Templates don't compile.
	@$(NEMO)/bin/python -m compileall -q -j 0 $(NEMO)/lib >/dev/null 2>&1 || true
	@touch $@

nemo-rl-environment: $(NEMO)/.ready

# ARGS: --label NAME, --only BEGINNING of a case's name, --jobs N; the results are in docs/hosts.
nemo-rl: $(NEMO)/.ready nemo-rl-losses
	@test -n "$(NEMO_RL_ROOT)" || { echo "say which NeMo-RL: make nemo-rl NEMO_RL_ROOT=/path/to/RL"; exit 1; }
	NEMO_RL_ROOT=$(NEMO_RL_ROOT) $(NEMO)/bin/python -m pytest -o addopts= tests/tools/rehearse/test_real.py tests/tools/probe/test_real.py
	NEMO_RL_ROOT=$(NEMO_RL_ROOT) $(NEMO)/bin/python -m tests.evidence.hosts.case_matrix $(ARGS)

# Where each checkout has the refusals that the rules of check speak of; a rule whose refusal is gone must be silent.
refusals: $(VENV)/.test
	@test -n "$(CHECKOUTS)" || { echo "say which: make refusals CHECKOUTS='/path/to/RL-v0.6.0 /path/to/RL-v0.7.0 /path/to/RL'"; exit 1; }
	$(BIN)/python -m tests.evidence.hosts.rule_sources $(CHECKOUTS)

# NeMo-RL's own tests of its loss, under ours, on the CPU. Left out: another loss's constants, drawn from a card's generator,
# and three refusals that are the same in other words.
nemo-rl-losses: $(NEMO)/.ready
	@test -n "$(NEMO_RL_ROOT)" || { echo "say which NeMo-RL: make nemo-rl-losses NEMO_RL_ROOT=/path/to/RL"; exit 1; }
	PYTHONPATH=tests/tools/rehearse/own_tests:.:$(NEMO_RL_ROOT):$$PYTHONPATH $(NEMO)/bin/python -m pytest -p under_our_loss -o addopts= --noconftest \
		--rootdir $(NEMO_RL_ROOT) $(NEMO_RL_ROOT)/tests/unit/algorithms/test_loss_functions.py \
		-k "not distillation_loss_different_settings and not rejects_tis_min_above_max"

# Needs torch, triton, numpy and pytest; what else is missing skips with its reason. addopts is strict about plugins.
gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -ra -o addopts= tests/gpu tests/tools/lab/test_on_gpu.py
	PYTHONPATH=. $(GPU_PYTHON) -m tests.benchmarks --device cuda --out docs/performance $(ARGS)
	PYTHONPATH=. $(GPU_PYTHON) -m tests.benchmarks.tables

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python -m tests.benchmarks.tables
	$(BIN)/python -m tests.evidence.diagnose.detection_power --page docs/evidence/diagnosis.md
	$(BIN)/python -m tests.evidence.lab
	$(BIN)/nemo-geomask schema --out recipes/recipe.schema.json

SITE := .venv-site

$(SITE)/.ready: .ci/site-requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r .ci/site-requirements.txt
	@touch $@

# Every warning is an error: a page in no table of contents, a link or an anchor that leads nowhere.
site: $(SITE)/.ready $(VENV)/.test
	rm -rf docs/_build docs/_parts
	$(BIN)/python -m tests.pages --to docs/_parts
	$(SITE)/bin/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs docs/_build

RELEASE := .venv-release
# Interpreters of the fresh environments; NeMo-RL's is 3.13.
RELEASE_PYTHONS ?= python3.11 python3.13

$(RELEASE)/.ready: .ci/release-requirements.txt .ci/build-requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r .ci/release-requirements.txt -r .ci/build-requirements.txt
	@touch $@

# The wheel is built from the source distribution, whose own tests then run, outside this checkout.
release: $(RELEASE)/.ready $(VENV)/.test
	@for python in $(RELEASE_PYTHONS); do $$python -c "" 2>/dev/null || { \
		echo "make release tries the wheel with $(RELEASE_PYTHONS), and $$python does not run here;"; \
		echo "install it, or name others, also by their path: make release RELEASE_PYTHONS='/path/to/python3.13'"; exit 1; }; done
	rm -rf dist build *.egg-info
	$(RELEASE)/bin/python -m build --no-isolation
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl
	tar -xzf dist/*.tar.gz -C dist
	cd dist/nemo_geomask-*/ && PYTHONPATH=. OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest --numprocesses auto --maxprocesses 8 \
		--dist worksteal $(QUICK)
	rm -rf dist/nemo_geomask-*/
	for python in $(RELEASE_PYTHONS); do $(MAKE) smoke PYTHON=$$python || exit 1; done

SMOKE := .venv-smoke-$(notdir $(PYTHON))
SPIP := $(SMOKE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(SMOKE)/pins.txt

# The wheel in an environment that has nothing else, without extras and then with those of the demo.
smoke:
	rm -rf $(SMOKE)
	$(PYTHON) -m venv $(SMOKE)
	@sed -n 's/^\([a-z].*[^ ]\) *\\$$/\1/p' $(LOCKS) > $(SMOKE)/pins.txt
	$(SPIP) --report $(SMOKE)/bare.json dist/*.whl
	@$(SMOKE)/bin/python .ci/check_hashes.py $(SMOKE)/bare.json $(LOCKS)
	$(SMOKE)/bin/python .ci/smoke_test.py bare
	$(SPIP) --report $(SMOKE)/demo.json "$$(echo dist/*.whl)[demo]"
	@$(SMOKE)/bin/python .ci/check_hashes.py $(SMOKE)/demo.json $(LOCKS)
	$(SMOKE)/bin/python .ci/smoke_test.py demo
	rm -rf $(SMOKE)

clean:
	rm -rf .venv .venv-* build dist docs/_build docs/_parts *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
