# Two commands on a bare machine with Python 3.11 to 3.13: `make quickstart` and `make test`. Everything stays in this folder, but for the cache of downloads.
PYTHON ?= python3
PACKAGES := rollout-vllm rollout-sglang engine-megatron core engine-fsdp algos agents trackers
UV := .tools/bin/uv
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# else Ray's workers wait for the suites beside them
export RAY_worker_niceness ?= 0
# nor start workers ahead: an actor of ours has an environment of its own, and takes none of them
export RAY_prestart_worker_first_driver ?= 0
# Compiled files are kept, whatever the environment says: hundreds of processes import torch
export PYTHONDONTWRITEBYTECODE =
# An environment holds gigabytes that the cache has already: linked, not copied, where both are on one disk
export UV_LINK_MODE ?= hardlink

.PHONY: quickstart test suite-workspace suite-typed suite-outside suite-ray suite-runs faults-rollout-vllm lint docs wheels fresh-install setup environments clean
.PRECIOUS: .envs/%/.synced

quickstart: .venv/.synced
	.venv/bin/python examples/quickstart/quickstart.py $(ARGS)

# Every package's suite and the kit for what it brings, in the environment of its own; tests/ in the one that has all of
# them. PACKAGE=core runs one; --jobs 4 runs four at a time, of which the longest begin. FULL=1 adds the tests that are
# marked slow, and further models and layouts of the kit.
ifdef PACKAGE
test: test-$(PACKAGE)
else
test: suite-runs suite-workspace suite-typed suite-ray suite-outside suite-core lint docs suite-rollout-sglang suite-rollout-vllm \
  kit-engine-fsdp kit-engine-megatron suite-engine-fsdp suite-agents faults-rollout-vllm kit-rollout-sglang suite-engine-megatron $(addprefix test-,$(PACKAGES))
endif

setup: .venv/.synced

# What all suites need: made first, it leaves the order of the suites to `test`, whose longest begin.
environments: .venv/.synced $(PACKAGES:%=.envs/%/.synced)

$(UV):
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9,<1"

# So that the quickstart's time is its own. Suites compile what they import: all of torch and vLLM, in ten environments
# of which some are made by tests, would take ten minutes of a processor.
.venv/.synced: export UV_COMPILE_BYTECODE = 1
.venv/.synced: uv.lock pyproject.toml $(wildcard packages/*/pyproject.toml) | $(UV)
	$(UV) sync --frozen --all-packages --python $(PYTHON) --quiet
	touch $@

.envs/%/.synced: uv.lock packages/%/pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .envs/$*
	UV_PROJECT_ENVIRONMENT=$(CURDIR)/.envs/$* $(UV) sync --frozen --package coupler-$* --group test $(SYNC_$*) --quiet
	touch $@

comma := ,
# Each suite names the tests that it waited for longest.
PYTEST := -m pytest --durations=8 --durations-min=5 $(if $(FULL),-m '')
# Beside other suites on two cores, a start of SGLang took more than the kit's 300 s.
KIT := --pyargs coupler.testing.conformance --coupler-limit 600
ONE_MODEL := $(if $(FULL),,$(comma)untied)
ROLLOUT := (test_rollout or test_pair) $(if $(FULL),,and not long)
# Long sequences and crowds of them on one rank, and every night in the layouts
SHORT := $(if $(FULL),,-k 'not (engine_long and parallel)')
KIT_core := --coupler engine=toy --coupler rollout=toy --coupler algorithm=toy --coupler transport=inproc \
  --coupler transport=disk --coupler transport=tcp --coupler sharding=stream --coupler tracker=jsonl --coupler tracker=console
KIT_engine-fsdp := --coupler engine=fsdp --coupler engine=fsdp,sequence_parallel=2 --coupler rollout=hf --coupler transport=nccl $(SHORT)
# Plain, and in each of these layouts: settings, and models of the kit, with commas between them; further ones are in
# the package's own suite. LAYOUTS=tensor_parallel=4 on the command line tries another.
LAYOUTS := tensor_parallel=2,pipeline_parallel=2 moe,expert_parallel=2 $(if $(FULL),context_parallel=2)
KIT_engine-megatron := --coupler engine=megatron $(addprefix --coupler engine=megatron$(comma),$(LAYOUTS)) $(SHORT)
KIT_algos := --coupler algorithm=grpo --coupler algorithm=rloo --coupler algorithm=ppo --coupler algorithm=sft \
  --coupler algorithm=dpo --coupler algorithm=dpo,loss=ipo --coupler algorithm=kto --coupler algorithm=reward_model \
  --coupler algorithm=grpo,ratio=geometric,opsm_delta=0.1 --coupler algorithm=grpo,shape=gate,clip_low=0,clip_high=0 \
  --coupler algorithm=grpo,shape=detached_clip,whiten=true,correction_cap=2,correction=mask
TOOLS := packages/agents/tests/kit_tools.py
KIT_agents := --coupler environment=tools --coupler environment=tools,target=$(TOOLS):Guess,calls=text \
  --coupler-set 'environment.functions=["$(TOOLS):add", "$(TOOLS):wait"]'
KIT_trackers := --coupler tracker=tensorboard --coupler tracker=wandb,mode=offline --coupler tracker=mlflow \
  --coupler tracker=trackio --coupler tracker=swanlab,mode=offline
KIT_rollout-vllm := --coupler engine=fsdp$(ONE_MODEL) --coupler rollout=vllm$(ONE_MODEL) -k '$(ROLLOUT)'
SYNC_rollout-vllm := --extra cpu
SYNC_engine-fsdp := --extra adamw8bit
SYNC_agents := --extra gateway --extra mcp --extra gymnasium --extra renderers
SYNC_trackers := --all-extras
KIT_rollout-sglang := --coupler engine=fsdp$(ONE_MODEL) --coupler rollout=sglang$(ONE_MODEL) -k '$(ROLLOUT)'
SYNC_rollout-sglang := --extra cpu
# SGLang on the CPU: a stand-in for its kernels
suite-rollout-sglang kit-rollout-sglang: export PYTHONPATH = $(CURDIR)/packages/rollout-sglang/tests/stand_in
# vLLM on the CPU: no warm-up, no pinned cores, the model worker in the scheduler's process, nothing compiled, which took a
# fifth of each start
VLLM_TESTS := suite-rollout-vllm faults-rollout-vllm kit-rollout-vllm
$(VLLM_TESTS): export VLLM_CPU_CI_ENV = 1
$(VLLM_TESTS): export VLLM_CPU_OMP_THREADS_BIND = nobind
$(VLLM_TESTS): export VLLM_ENABLE_V1_MULTIPROCESSING = 0
$(VLLM_TESTS): export TORCHDYNAMO_DISABLE = 1
# The longest suites are cut: tests/ into what starts processes and makes environments, what starts clusters, what trains, what
# people type and read, and the rest; rollout-vllm's into what kills vLLM or starts a cluster, and the rest
OUTSIDE := $(patsubst %,tests/test_%.py,interpreters packaging examples tasks)
RAY := $(patsubst %,tests/test_%.py,ray replicas torchrun preferences engines_take_over)
RUNS := $(patsubst %,tests/test_%.py,faults resume jobs supervised quickstart sft_evaluation reward_model distillation ppo megatron)
TYPED := $(patsubst %,tests/test_%.py,sweep commands console docs early_refusals doctor_run doctor_data hub report samples data_columns)
FAULTS := $(patsubst %,packages/rollout-vllm/tests/test_%.py,faults ray)
SUITE_rollout-vllm := $(FAULTS:%=--ignore=%)

$(PACKAGES:%=test-%): test-%: suite-% kit-%
test-rollout-vllm: faults-rollout-vllm

suite-%: .envs/%/.synced
	.envs/$*/bin/python $(PYTEST) packages/$*/tests $(SUITE_$*)

faults-rollout-vllm: .envs/rollout-vllm/.synced
	.envs/rollout-vllm/bin/python $(PYTEST) $(FAULTS)

kit-%: .envs/%/.synced
	.envs/$*/bin/python $(PYTEST) $(KIT) $(KIT_$*)

# Those that take other settings than KIT_agents
CLIENTS := packages/agents/tests/played_clients.py
MCP := {"played": {"command": [".envs/agents/bin/python", "packages/agents/tests/played_mcp.py"], \
  "tools": ["plus"], "session": "run"}}
kit-agents-adapters: .envs/agents/.synced
	.envs/agents/bin/python $(PYTEST) $(KIT) --coupler environment=tools --coupler-set 'environment.mcp=$(MCP)'
	.envs/agents/bin/python $(PYTEST) $(KIT) --coupler environment=gymnasium,target=packages/agents/tests/kit_gymnasium.py:Guess \
	  $(if $(FULL),--coupler environment=gymnasium$(comma)id=FrozenLake-v1)
	.envs/agents/bin/python $(PYTEST) $(KIT) --coupler environment=program,target=$(CLIENTS):with_openai \
	  $(if $(FULL),--coupler environment=program$(comma)target=$(CLIENTS):with_anthropic)
	.envs/agents/bin/python $(PYTEST) $(KIT) --coupler environment=toy,workers=2

test-agents: kit-agents-adapters

test-workspace: suite-workspace suite-typed suite-runs suite-outside suite-ray

# The tests of targets train a model with a tokenizer, which core's environment has not.
suite-workspace: .venv/.synced
	.venv/bin/python $(PYTEST) tests $(addprefix --ignore=,$(OUTSIDE) $(RAY) $(RUNS) $(TYPED)) \
	  packages/core/tests/test_plugins.py::test_a_target_that_cannot_be_made_is_one_sentence

suite-outside: .venv/.synced
	.venv/bin/python $(PYTEST) $(OUTSIDE)

suite-ray: .venv/.synced
	.venv/bin/python $(PYTEST) $(RAY)

suite-runs: .venv/.synced
	.venv/bin/python $(PYTEST) $(RUNS)

suite-typed: .venv/.synced
	.venv/bin/python $(PYTEST) $(TYPED)

lint: .venv/.synced
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/pyright --project .

# The site of docs/ into site/, from an environment that holds its builder alone; a dead link is an error
docs: .envs/docs/.synced
	NO_MKDOCS_2_WARNING=true .envs/docs/bin/mkdocs build --strict --quiet

.envs/docs/.synced: uv.lock pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .envs/docs
	UV_PROJECT_ENVIRONMENT=$(CURDIR)/.envs/docs $(UV) sync --frozen --only-group docs --quiet
	touch $@

wheels: | $(UV)
	$(UV) build --all-packages --wheel --out-dir dist --quiet

# The wheels in an empty environment, and a GRPO run from them: ARGS=cuda on a machine with a GPU
fresh-install: | $(UV)
	$(PYTHON) benchmarks/fresh_install.py $(ARGS)

clean:
	rm -rf .venv .envs dist site
