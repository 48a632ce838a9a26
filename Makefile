# Two commands matter: `make demo` and `make test`. Both work from a fresh clone with Python 3.11+.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin

.PHONY: demo test test-engines test-gpu example-qwen3moe check sim chaos format proto verify-proto proto-breaking proto-release
.PHONY: clean test-deploy deploy-files sbom

demo: .venv/ready
	$(BIN)/evenkeel demo $(if $(FAULT),--fault $(FAULT)) $(DEMO_FLAGS)

test: .venv/ready check
	$(BIN)/pytest -n 3 --dist worksteal

# Downloads the wheels of vLLM and SGLang once (about 375 MB, without their dependencies) and runs their own balancers.
test-engines: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[examples]'
	$(BIN)/pytest -m engines tests/engines

# A Hugging Face MoE model split over two processes under a real controller; fails if an output changes by a bit.
example-qwen3moe: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[examples]'
	$(BIN)/python -m examples.qwen3moe

test-gpu: .venv/ready
	@if $(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then $(BIN)/pytest -m gpu; else echo "test-gpu: no GPU is here, nothing was run"; fi

# What operators run: chart, dashboards, alerts. Needs promtool and prometheus, on Debian from the package prometheus.
test-deploy: .venv/ready
	$(BIN)/pytest tests/deploy -m "$(or $(MARKS),deploy or promtool)"

# The generated files of chart and compose, after a change of settings, values, rules or dashboards.
deploy-files: .venv/ready
	$(BIN)/python -m deploy.generate

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.structure
	$(MAKE) verify-proto

# Ten minutes of real processes being killed, paused and cut off; prints what it found and fails naming what broke.
chaos: .venv/ready
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

sim: .venv/ready
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),20000)

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PROTOS := $(wildcard proto/evenkeel/v1/*.proto)

# The protocol's package is evenkeel.v1, the Python package is evenkeel_moe: only the stubs' imports differ.
STUBS := .cache/stubs/evenkeel/v1

$(STUBS): .venv/ready $(PROTOS)
	rm -rf .cache/stubs && mkdir -p .cache/stubs
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=.cache/stubs --pyi_out=.cache/stubs --grpc_python_out=.cache/stubs $(PROTOS)
	sed -i 's/^from evenkeel\.v1 import/from evenkeel_moe.v1 import/' $(STUBS)/*

proto: $(STUBS)
	cp $(STUBS)/*.py $(STUBS)/*.pyi service/evenkeel_moe/v1/

verify-proto: $(STUBS)
	diff -r -x __pycache__ -x __init__.py $(STUBS) service/evenkeel_moe/v1

# The protocol against what was last released, by buf from npm: whatever would break a rank or controller of that version.
BUF := .cache/buf/node_modules/.bin/buf
RELEASED := proto/evenkeel.v1.binpb

$(BUF):
	npm install --prefix .cache/buf --no-fund --no-audit --ignore-scripts --loglevel=error @bufbuild/buf@1.75.0

proto-breaking: .venv/ready $(BUF)
	$(BUF) lint proto
	$(BUF) breaking proto --against $(RELEASED)
	$(BIN)/pytest -q -m buf tests/wire

# With a release: from then on the protocol is held to what it is now.
proto-release: proto-breaking
	$(BUF) build proto -o $(RELEASED)

# What the image installs, as CycloneDX JSON in .cache/sbom: installed as in the Dockerfile, looked at, compared with constraints.txt.
sbom: .venv/ready
	rm -rf .cache/sbom build && mkdir -p .cache/sbom
	$(BIN)/python -m venv .cache/sbom/image && $(BIN)/python -m venv .cache/sbom/tool
	.cache/sbom/image/bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt '.[controller]'
	.cache/sbom/image/bin/pip uninstall --quiet --yes pip setuptools
	.cache/sbom/tool/bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) cyclonedx-bom==7.5.0
	.cache/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --mc-type application -o .cache/sbom/evenkeel.cdx.json .cache/sbom/image/bin/python
	rm -rf .cache/sbom/image .cache/sbom/tool build
	$(BIN)/python -m deploy.sbom .cache/sbom/evenkeel.cdx.json

# PIP_FLAGS chooses another package index, for example a CPU-only one for torch.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	# Kernels are compiled once here and cached beside their sources, so that no first run waits for them.
	$(BIN)/python -c "from evenkeel_moe.planning.policies.registry import warm_kernels; warm_kernels()"
	touch $@

# make bench-dispatch, bench-planning, ...: prints and writes bench/out/NAME.json; exits 0 whatever the figures.
bench-%: .venv/ready
	$(BIN)/python -m bench.$*

# numba's caches too: it does not see that a kernel changed which another file's kernel calls.
clean:
	rm -rf .venv .cache bench/out
	find service bench tests -name '*.nb[ic]' -delete
