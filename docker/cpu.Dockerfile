# Training and rollout=hf on the CPU, from this checkout:  docker build -f docker/cpu.Dockerfile -t coupler:cpu .
FROM python:3.11-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap g++ \
 && rm -rf /var/lib/apt/lists/*
COPY packages /src/packages
COPY recipes /src/recipes
COPY examples /src/examples
RUN cd /src/packages \
 && pip install --no-cache-dir "./core[ray,reasoning-gym,tensorboard]" ./engine-fsdp ./algos ./trackers "./agents[gateway]" \
 && rm -rf /src
WORKDIR /work
ENTRYPOINT ["coupler"]
