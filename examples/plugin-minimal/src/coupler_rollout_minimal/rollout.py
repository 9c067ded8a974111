"""``rollout=minimal``: a transformers model that answers one request at a time."""

import asyncio

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coupler import Completion, Rollout, SyncReceipt


class MinimalRollout(Rollout):
    async def setup(self, rank):
        trust = self.model.trust_remote_code
        shape = AutoConfig.from_pretrained(self.model.path, trust_remote_code=trust)
        hf = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, trust_remote_code=trust)
        self.hf = hf.eval().requires_grad_(False)  # random until an update
        # The lock serves requests in the order in which they came.
        self.rank, self.version, self.turn = rank, -1, asyncio.Lock()
        return 1

    async def generate(self, request):
        async with self.turn:
            return await asyncio.to_thread(self._sample, request)

    def _sample(self, request):
        room = request.room(self.hf.config.max_position_embeddings, self.hf.config.vocab_size)
        random = torch.Generator().manual_seed(request.seed)
        ids, cache, tokens, logprobs = torch.tensor([request.prompt]), None, [], []
        while len(tokens) < room and not (tokens and tokens[-1] in request.stop):
            out = self.hf(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            log_p = (out.logits[0, -1] / (request.temperature or 1.0)).log_softmax(-1)
            if request.temperature == 0:
                ids = log_p.argmax().view(1, 1)
            else:
                ids = torch.multinomial(log_p.exp(), 1, generator=random).view(1, 1)
            tokens.append(int(ids))
            logprobs.append(float(log_p[ids]))
        finish = "stop" if tokens[-1] in request.stop else "length"
        return Completion(tuple(tokens), tuple(logprobs), (self.version,) * len(tokens), finish)

    async def update(self, update):
        # Two names of a tied parameter are one object.
        params = self.hf.state_dict(keep_vars=True)
        shapes = {name: param.shape for name, param in params.items()}
        reached, unexpected, num_received, num_bytes = set(), [], 0, 0
        # All come before one is loaded: a refused update leaves the old weights. They
        # are copies, since the transport takes each back when the next is asked for.
        received = [(name, tensor.clone()) for name, tensor in update.receive(self.rank, shapes)]
        for name, tensor in received:
            num_received, num_bytes = num_received + 1, num_bytes + tensor.nbytes
            if name in params:
                params[name].copy_(tensor)
                reached.add(id(params[name]))
            else:
                unexpected.append(name)
        missing = tuple(name for name, param in params.items() if id(param) not in reached)
        self.version, loaded = update.version, num_received - len(unexpected)
        return SyncReceipt(
            update.version, num_received, loaded, num_bytes, missing, tuple(unexpected)
        )

    async def pause(self, in_flight):
        # Behind the requests that run or wait: drain, the only kind it declares.
        await self.turn.acquire()

    async def resume(self):
        self.turn.release()
