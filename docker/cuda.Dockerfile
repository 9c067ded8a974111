# engine=fsdp with rollout=vllm on GPUs, from this checkout:  docker build -f docker/cuda.Dockerfile -t coupler:cuda .
# Run it with:  docker run --gpus all --ipc=host -v "$PWD:/work" coupler:cuda train --config recipe.yaml
# rollout=sglang pins other versions than vLLM: give it an image of its own, with ROLLOUT=sglang.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG ROLLOUT=vllm
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ bubblewrap \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/coupler
ENV PATH=/opt/coupler/bin:$PATH
COPY packages /src/packages
COPY recipes /src/recipes
COPY examples /src/examples
RUN cd /src/packages \
 && pip install --no-cache-dir "./core[ray,reasoning-gym,tensorboard]" ./engine-fsdp ./algos ./trackers "./agents[gateway]" "./rollout-$ROLLOUT[cuda]" \
 && rm -rf /src
WORKDIR /work
ENTRYPOINT ["coupler"]
