# The two main commands are `make demo` and `make test`. Both work in a new clone with Python 3.11+.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
PIP_INSTALL := bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
INSTALL := .venv/$(PIP_INSTALL)

.PHONY: demo help test test-slow faults test-engines test-lplb test-vllm test-gpu gpu-report test-deploy test-console
.PHONY: example-join example-qwen3moe check sim explore mutants quint chaos fuzz
.PHONY: format console-vendor console-images readme-picture
.PHONY: proto verify-proto
.PHONY: proto-breaking proto-release deploy-files requirements sbom clean

# SLOW=1 slows a rank for a while; SLOW=told slows it from the start, and ranks tell their times.
SLOW_FLAGS = $(if $(SLOW),--slow $(if $(filter told,$(SLOW)),--told))
# RESIZE=1 takes the group from 4 ranks to 6 and to 3 while it serves requests.
# CONSOLE=1 serves until Ctrl-C and prints the link of the web console.
demo: .venv/ready ## Shows a real engine that loses and regains its balance.
	$(BIN)/evenkeel demo $(if $(FAULT),--fault $(FAULT)) $(SLOW_FLAGS) $(if $(CONSOLE),--console) $(if $(RESIZE),--resize) \
	  $(DEMO_FLAGS)

# In a new clone the kernels are compiled beside the checks: each takes one core.
test: .venv/installed ## Checks the code and runs all tests that need nothing else.
	$(MAKE) -j2 .venv/ready check
	$(BIN)/pytest -n 3 --dist worksteal

# CI runs these too. `make test` has the shorter tests of the same parts.
test-slow: .venv/ready ## Runs the tests that take half a minute or more each.
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Tests of faults with engines or a browser run with the other tests of that kind.
faults: .venv/ready ## Runs the tests of faults that people met and lists them.
	$(BIN)/python -m tests.faults

help: ## Lists these commands.
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

# Downloads the wheels of the engines once (about 400 MB, without dependencies) and tests the plugins
# with the engines' own balancers. ENGINES="vllm==0.32.0 sglang==0.5.22" tests other versions.
test-engines: .venv/ready ## Tests the plugins with the engines' own balancers.
	$(INSTALL) -c constraints.txt -e '.[examples]'
	ENGINES="$(ENGINES)" $(BIN)/python -m tests.engines.fetch
	ENGINES="$(ENGINES)" $(BIN)/pytest -v -n 3 --dist loadfile -m engines tests/engines

# Not in CI: Triton has 1 GB, and its interpreter takes minutes. For more problems:
# `python -m bench.lplb_kernel --problems 10000`.
test-lplb: .venv/ready ## Runs LPLB's kernel under Triton's interpreter against HiGHS.
	$(INSTALL) -c constraints.txt -e '.[lplb]'
	$(BIN)/pytest tests/dispatch/test_lplb_kernel.py

# Runs the toy engine of docs/join.md on two processes under a real controller.
example-join: .venv/ready ## Runs the toy engine of docs/join.md under a real controller.
	$(BIN)/python -m examples.join

# Runs the real vLLM 0.32.0 on a CPU with the plugin under a real controller, in an environment of
# its own (3.6 GB). PyPI has no CPU build of torch: pip finds it at the index in PIP_FLAGS.
test-vllm: .venv/ready .cache/vllm/ready ## Runs the real vLLM on a CPU with the plugin.
	.cache/vllm/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	$(BIN)/pytest -m vllm tests/vllm

.cache/vllm/ready: tests/vllm/requirements.txt
	rm -rf .cache/vllm && $(BIN)/python -m venv .cache/vllm
	# Without a hash, because each index may have built its own.
	.cache/vllm/$(PIP_INSTALL) --no-deps torch==2.13.0+cpu
	.cache/vllm/$(PIP_INSTALL) --no-deps --require-hashes -r tests/vllm/requirements.txt
	touch $@

# Runs a Hugging Face MoE model on two processes under a real controller. It fails if any bit of an
# output changes.
example-qwen3moe: .venv/ready ## Runs a Hugging Face MoE model under a real controller.
	$(INSTALL) -c constraints.txt -e '.[examples]'
	$(BIN)/python -m examples.qwen3moe

test-gpu: .venv/ready ## Runs the tests that need a GPU.
	@if $(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; \
	then $(BIN)/pytest -m gpu; else echo "test-gpu: there is no GPU, so nothing was run"; fi

# Runs all that one GPU can show, in MINUTES (25), and writes docs/gpu.md. PARTS chooses some. Without
# a GPU it runs small and writes bench/out/gpu.md.
gpu-report: .venv/ready ## Measures on one GPU and writes docs/gpu.md.
	$(BIN)/python -m bench.gpu_report $(if $(MINUTES),--minutes $(MINUTES)) $(PARTS)

# Tests the chart, dashboards and alerts. Needs node, and promtool and prometheus, which are in the
# Debian package prometheus.
test-deploy: .venv/ready ## Tests the chart, dashboards and alerts.
	$(BIN)/pytest tests/deploy -m "$(or $(MARKS),deploy or promtool)"

# Writes the generated files again, after a change of settings, values, rules or dashboards.
deploy-files: .venv/ready ## Generates the tables of the docs and the files of the chart again.
	$(BIN)/python -m deploy.generate

# Downloads the console's JavaScript libraries again, in the versions of its list.
console-vendor: .venv/ready ## Downloads the console's JavaScript libraries again.
	$(BIN)/python -m deploy.console_vendor

# Drives the console in Chromium against a running fleet. Needs chromium and chromedriver, which are
# in the Debian packages chromium and chromium-driver.
test-console: .venv/ready ## Drives the console in a browser against a running fleet.
	$(BIN)/pytest tests/console -m "browser or not browser"

# Takes the pictures of the console in docs/images.
console-images: .venv/ready ## Takes the pictures of the console in docs/images.
	$(BIN)/python -m tests.console.images

# Draws docs/images/ranks.svg from the shipped trace.
readme-picture: .venv/ready ## Draws the picture of the README.
	$(BIN)/python -m deploy.readme_picture

check: .venv/installed ## Runs the linters, the type checker and the checks of structure.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.structure
	$(MAKE) verify-proto

# Kills, pauses and disconnects real processes for ten minutes; fails if a check is violated.
# PEERS=1 lets hostile peers attack instead, usually longer (SECONDS=3600); fails if the honest ranks
# lose anything, or a controller's memory grows without bound.
chaos: .venv/ready ## Kills, pauses and disconnects real processes.
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) \
	  $(if $(PEERS),--peers)

# Gives every parser wrong input for so many seconds. What made one fail is kept in the corpus.
fuzz: .venv/ready ## Gives every parser wrong input.
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600)

# Changes the code of PATHS in small wrong ways, one at a time; fails if no test notices one of them.
# All of protocol/ takes some hours on one core.
mutants: .venv/ready ## Changes code in small wrong ways that tests must notice.
	nice -n 10 $(BIN)/python -m tests.mutation $(or $(PATHS),service/evenkeel_moe/protocol)

sim: .venv/ready ## Simulates whole fleets with faults.
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),20000)

# Visits every state of small worlds. RANKS=2 WAVES=1 FAULTS=1 KINDS=lose,reload SECONDS=600 choose
# one world; MUTANTS=1 breaks each rule instead.
explore: .venv/ready ## Visits every state of small worlds.
	$(BIN)/python -m tests.explore $(if $(MUTANTS),--mutants) $(if $(RANKS),--ranks $(RANKS)) \
	  $(if $(WAVES),--waves $(WAVES)) $(if $(FAULTS),--faults $(FAULTS)) \
	  $(if $(KINDS),--kinds "$(KINDS)") $(if $(SECONDS),--seconds $(SECONDS))

# Checks the model of the switch in Quint, from npm: its types, and random runs against its
# invariants. FLAGS="--init=initNoDrain --max-samples=100" runs it with a rule broken.
QUINT := .cache/quint/node_modules/.bin/quint

$(QUINT): docs/quint/package.json
	mkdir -p .cache/quint && cp docs/quint/package.json .cache/quint
	npm install --prefix .cache/quint --no-fund --no-audit --ignore-scripts --loglevel=error
	touch $@

quint: $(QUINT) ## Checks the model of the switch.
	$(QUINT) typecheck docs/quint/switch.qnt
	$(QUINT) run docs/quint/switch.qnt --backend=typescript --max-samples=$(or $(RUNS),3) \
	  --max-steps=300 --invariant=safe --verbosity=1 $(FLAGS)

format: .venv/ready ## Formats the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PROTOS := $(wildcard proto/evenkeel/v1/*.proto)

# The package of the protocol is evenkeel.v1 and the Python package is evenkeel_moe, so the imports
# of the stubs are adapted.
STUBS := .cache/stubs/evenkeel/v1

$(STUBS): .venv/installed $(PROTOS)
	rm -rf .cache/stubs && mkdir -p .cache/stubs
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=.cache/stubs \
	  --pyi_out=.cache/stubs --grpc_python_out=.cache/stubs $(PROTOS)
	sed -i 's/^from evenkeel\.v1 import/from evenkeel_moe.v1 import/' $(STUBS)/*

proto: $(STUBS) ## Generates the Python code of the protocol again.
	cp $(STUBS)/*.py $(STUBS)/*.pyi service/evenkeel_moe/v1/

verify-proto: $(STUBS) ## Compares that code with the protocol.
	diff -r -x __pycache__ -x __init__.py $(STUBS) service/evenkeel_moe/v1

# Compares the protocol with the last released one, with buf from npm: finds every change that would
# break a rank or controller of that version.
BUF := .cache/buf/node_modules/.bin/buf
RELEASED := proto/evenkeel.v1.binpb

$(BUF):
	npm install --prefix .cache/buf --no-fund --no-audit --ignore-scripts --loglevel=error \
	  @bufbuild/buf@1.75.0

proto-breaking: .venv/ready $(BUF) ## Compares the protocol with the last released one.
	$(BUF) lint proto
	$(BUF) breaking proto --against $(RELEASED)
	$(BIN)/pytest -q -m buf tests/wire

# Part of a release: later versions are compared with the protocol of this one.
proto-release: proto-breaking ## Records the protocol as released.
	$(BUF) build proto -o $(RELEASED)

requirements: .venv/ready ## Writes requirements.txt, what the image installs by hash.
	rm -rf .cache/uv && $(BIN)/python -m venv .cache/uv && .cache/uv/$(PIP_INSTALL) uv==0.13.9
	head -2 requirements.txt > .cache/uv/requirements.txt
	.cache/uv/bin/uv pip compile --quiet --extra controller -c constraints.txt --generate-hashes \
	  --no-annotate --no-header --python-version 3.11.9 pyproject.toml >> .cache/uv/requirements.txt
	mv .cache/uv/requirements.txt requirements.txt && rm -rf .cache/uv

# Lists the packages of the image as CycloneDX JSON in .cache/sbom: installs them as the Dockerfile
# does, lists them, and compares the list with constraints.txt.
sbom: .venv/ready ## Lists the packages of the image as CycloneDX.
	rm -rf .cache/sbom build && mkdir -p .cache/sbom
	$(BIN)/python -m venv .cache/sbom/image && $(BIN)/python -m venv .cache/sbom/tool
	.cache/sbom/image/$(PIP_INSTALL) --no-deps --require-hashes -r requirements.txt
	.cache/sbom/image/$(PIP_INSTALL) --no-deps .
	.cache/sbom/image/bin/pip uninstall --quiet --yes pip setuptools
	.cache/sbom/tool/$(PIP_INSTALL) cyclonedx-bom==7.5.0
	.cache/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --mc-type application -o .cache/sbom/evenkeel.cdx.json .cache/sbom/image/bin/python
	rm -rf .cache/sbom/image .cache/sbom/tool build
	$(BIN)/python -m deploy.sbom .cache/sbom/evenkeel.cdx.json

# PIP_FLAGS can select another package index, for example a CPU-only one for torch.
.venv/installed: pyproject.toml constraints.txt
	@echo "Installs Evenkeel and its tools into .venv. This takes some minutes; pip prints nothing."
	$(PYTHON) -m venv .venv
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

.venv/ready: .venv/installed
	@echo "Compiles the kernels once, beside their sources, so that no first run waits. A minute or more."
	@$(BIN)/python -c \
	  "from evenkeel_moe.planning.policies.registry import warm_kernels; warm_kernels()"
	touch $@

# make bench-dispatch, bench-planning, ...: prints the figures and writes bench/out/NAME.json. The
# exit code does not depend on the figures.
bench-%: .venv/ready ## Measures one part, for example bench-planning.
	$(BIN)/python -m bench.$*

# Also removes numba's caches: numba does not notice a change of a kernel in another file.
clean: ## Removes the environment, caches and results.
	rm -rf .venv .cache bench/out
	find service bench tests -name '*.nb[ic]' -delete
